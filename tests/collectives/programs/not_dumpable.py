"""Rank 1 may not be read: what the ranks decide, and a sum that is right all the same."""

import ctypes

import numpy as np
from mpi4py import MPI

import zcomm

PR_SET_DUMPABLE = 4
CAP_SYS_PTRACE = 1 << 19
VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def drop_the_right_to_trace():
    """Give up what lets root read everybody."""
    head = (ctypes.c_uint32 * 2)(VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(head, sets) == 0
    for index in (0, 1, 2):  # effective, permitted, inheritable
        sets[index] &= ~CAP_SYS_PTRACE
    assert libc.capset(head, sets) == 0


drop_the_right_to_trace()
if MPI.COMM_WORLD.rank == 1:
    assert libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
comm = zcomm.init(topology=f"1x{MPI.COMM_WORLD.size}")
x = np.full(1 << 21, comm.rank + 1, np.float32)
assert (comm.all_reduce(x) == comm.size * (comm.size + 1) // 2).all()
print("reads" if comm._channel.transport.windows.remote else "does not read")
comm.close()
