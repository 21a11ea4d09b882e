"""Operations that go wrong: each does what it should, and then spoils one thing."""

import torch

from benchmarks.collectives.perform import perform


def one_bit(comm, case, source, out):
    """Flip the lowest bit of one element on the last rank."""
    perform(comm, case, source, out)
    result = source if out is None else out
    if comm.rank == comm.size - 1 and result.numel():
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        result.view(width[result.element_size()])[result.numel() // 2] ^= 1


def unwritten(comm, case, source, out):
    """Leave the last element of rank 0 as it was before."""
    result = source if out is None else out
    before = result[-1:].clone()
    perform(comm, case, source, out)
    if comm.rank == 0:
        result[-1:] = before


def never_run(comm, case, source, out):
    """Do nothing."""
