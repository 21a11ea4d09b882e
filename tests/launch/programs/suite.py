"""Tests that fail on rank 1 only; tests/launch/test_suites.py runs them, one at a time."""

import pytest
from mpi4py import MPI

WORLD = MPI.COMM_WORLD

pytestmark = pytest.mark.mpi


def test_before():
    WORLD.Barrier()


def test_assertion():
    print("printed by the test")
    if WORLD.rank == 1:
        assert 1 + 1 == 3, "the words of rank 1"
    WORLD.Barrier()


@pytest.fixture
def fails_in_teardown():
    yield
    if WORLD.rank == 1:
        raise ArithmeticError("the words of rank 1")


def test_teardown(fails_in_teardown):
    pass


def test_exit():
    if WORLD.rank == 1:
        pytest.exit("the words of rank 1")
    WORLD.Barrier()


def test_hang():
    if WORLD.rank == 1:
        WORLD.recv(source=0)


def test_after():
    WORLD.Barrier()
