"""A program whose rank 1 fails, in the way that its argument names, while the others wait for it.

Every rank that gets to the end says so: no rank may.
"""

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


def main(how: str, others: str) -> None:
    comm = zcomm.init()
    comm.barrier()
    if comm.rank == 1:
        fail(how)
    elif others == "compute":
        time.sleep(600)
    comm.all_reduce(np.ones(1000, np.float32))
    # One write: mpirun would put the lines of ranks that write at the same time into each other.
    sys.stdout.write(f"rank {comm.rank} reached the end\n")


main(*sys.argv[1:3])
