"""Arrays that share memory: inputs inside outputs and the other way round, the same item twice."""

import numpy as np
import pytest
import torch

from tests.collectives.nodes import cut_small, own_process, share_memory, use_small
from tests.collectives.worlds import WORLDS, on
from zcomm import communicator, tuning
from zcomm.collectives import node

SIZE = 4
SIZES = [5, 3000, 4096 * 5 + 3]
KINDS = {"numpy": np.asarray, "torch": torch.from_numpy}


@pytest.fixture(params=["messages", "windows", "in place"])
def way(request, monkeypatch):
    cut_small(monkeypatch)
    if request.param != "messages":
        remote = own_process if request.param == "in place" else None
        share_memory(monkeypatch, WORLDS["1x4"], remote=remote)
        use_small(monkeypatch, node)
    return "2x2" if request.param == "messages" else "1x4"


def full_of(rank, numel):
    return (np.arange(SIZE * numel) % 1000 + 1000 * rank).astype(np.float32)


def places(rank, numel):
    """Starts of a shard in a full array: every rank's place, the own one, and between two."""
    return [*(other * numel for other in range(SIZE)), rank * numel, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", SIZES)
def test_reduce_scatter_into_its_input(way, kind, numel):
    total = sum(full_of(rank, numel) for rank in range(SIZE))

    def program(comm):
        for start in places(comm.rank, numel) * 2:
            x = KINDS[kind](full_of(comm.rank, numel))
            out = x[start : start + numel]
            assert comm.reduce_scatter(x, out) is out
            assert np.array_equal(out, total[comm.rank * numel :][:numel])

    on(way, program)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", SIZES)
def test_all_gather_of_a_part_of_its_output(way, kind, numel):
    gathered = np.concatenate([full_of(rank, numel)[:numel] for rank in range(SIZE)])

    def program(comm):
        for start in places(comm.rank, numel) * 2:
            out = KINDS[kind](np.zeros(SIZE * numel, np.float32))
            shard = out[start : start + numel]
            shard[:] = KINDS[kind](full_of(comm.rank, numel)[:numel])
            comm.all_gather(shard, out)
            assert np.array_equal(out, gathered)

    on(way, program)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", SIZES)
def test_all_to_all_in_place(kind, numel):
    def program(comm):
        x = KINDS[kind](full_of(comm.rank, numel))
        assert comm.all_to_all(x, x) is x
        parts = [full_of(rank, numel)[comm.rank * numel :][:numel] for rank in range(SIZE)]
        assert np.array_equal(x, np.concatenate(parts))

    on("2x2", program)


def test_all_reduce_of_an_item_twice_is_refused():
    def program(comm):
        x = np.ones(10, np.float32)
        with pytest.raises(ValueError, match="items 0 and 2 share memory"):
            comm.all_reduce([x[:6], np.ones(3), x[5:]])
        comm.all_reduce([x[:5], np.ones(3), x[5:], x[5:5]])
        assert (x == comm.size).all()

    on("2x2", program)


@pytest.mark.parametrize("world", ["2x2", "3+5"])
def test_no_arrays_at_all(world, monkeypatch):
    # As under MPI, where the cost model chooses among the algorithms.
    monkeypatch.setattr(communicator, "assume", lambda topology, _: tuning.assume(topology, "mpi"))

    def program(comm):
        assert comm.all_gather([]) == comm.reduce_scatter([]) == comm.all_reduce([]) == []
        assert comm.all_reduce(np.ones(2))[0] == comm.size

    on(world, program)
