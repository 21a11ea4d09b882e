"""A rank that raises, is killed or stops (the argument) in the middle of a large reduce_scatter."""

import os
import signal
import sys
import time

import numpy as np

import zcomm
from zcomm.collectives.courier import Posted

send = Posted.send


def dying(self, *arguments):
    if self._channel.rank == 1 and self._number == 2:
        if sys.argv[1] == "raise":
            raise ArithmeticError("in the middle")
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)
    send(self, *arguments)


Posted.send = dying
comm = zcomm.init(topology="2x2")
comm.reduce_scatter(np.zeros(1 << 22, np.float32))
print("finished")
