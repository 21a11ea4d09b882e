"""A program whose rank 1 fails, in the way that its argument names, while the others wait for it.

Every rank that gets to the end says so: no rank may.
"""

import signal
import sys
import time

import numpy as np

import zcomm


def fail(how: str) -> None:
    if how == "raise":
        raise ArithmeticError("the words of rank 1")
    if how == "exit":
        sys.exit(1)
    if how == "exit-text":
        sys.exit("the words of rank 1")
    if how == "exit-in-a-handler":
        # In the middle of the operation: the others come to it later, and find its handshake.
        signal.signal(signal.SIGALRM, lambda *_: sys.exit(1))
        signal.setitimer(signal.ITIMER_REAL, 0.5)


def main(how: str, others: str) -> None:
    comm = zcomm.init()
    comm.barrier()
    if comm.rank == 1:
        fail(how)
    elif others == "compute":
        time.sleep(600)
    elif others == "come-late":
        time.sleep(1.5)
    comm.all_reduce(np.ones(1 << 20, np.float32))
    # One write: mpirun would put the lines of ranks that write at the same time into each other.
    sys.stdout.write(f"rank {comm.rank} reached the end\n")


main(*sys.argv[1:3])
