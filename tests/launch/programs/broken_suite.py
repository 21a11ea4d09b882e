"""A module of tests that rank 1 cannot import."""

import pytest
from mpi4py import MPI

if MPI.COMM_WORLD.rank == 1:
    raise ArithmeticError("the words of rank 1")


@pytest.mark.mpi
def test_barrier():
    MPI.COMM_WORLD.Barrier()
