"""The communicator that MPI tests get is the job that mpirun started."""

import numpy as np
import pytest
from mpi4py import MPI


@pytest.mark.mpi
def test_comm_is_the_world(comm):
    assert (comm.rank, comm.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert comm.topology.size == comm.size


@pytest.mark.mpi
def test_comm_reaches_every_rank(comm):
    gathered = comm.all_gather(np.array([comm.rank, comm.rank**2], np.int64))
    expected = [number for rank in range(comm.size) for number in (rank, rank**2)]
    assert gathered.tolist() == expected
