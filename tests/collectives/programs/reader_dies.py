"""A rank that raises, is killed or stops (the argument) while it reads the others' arrays."""

import os
import signal
import sys
import time

import numpy as np

import zcomm
from zcomm.transports.remote import RemoteMemory

read = RemoteMemory.read
calls = []


def dying(self, *arguments):
    calls.append(arguments)
    if comm.rank == 1 and len(calls) == 2:
        if sys.argv[1] == "raise":
            raise ArithmeticError("in the middle")
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)
    read(self, *arguments)


RemoteMemory.read = dying
os.environ["ZCOMM_CMA"] = "always"
comm = zcomm.init(topology="1x4")
comm.reduce_scatter(np.zeros(1 << 22, np.float32))
print("finished")
