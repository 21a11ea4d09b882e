"""Sub-communicators: who is in them, what they compute, and where their bytes are counted."""

import numpy as np
import pytest

from tests.collectives import checks, oracle
from tests.collectives.dtypes import as_array, assert_bits, drawn
from tests.collectives.worlds import LAYERED, UNIFORM, WORLDS, on, wire
from topology import TopologyError


def members(comm, group):
    """Return the world ranks of a sub-communicator, in its order."""
    return group.all_gather_values(np.array([comm.rank]))[:, 0].tolist()


def every_operation(comm):
    """Run one of each and compare, inside a sub-communicator as in any other."""
    checks.every_algorithm(comm, checks.all_gather, "torch", "bfloat16", (5,))
    checks.every_algorithm(comm, checks.reduce_scatter, "numpy", "float32", "avg", (5,))
    checks.every_algorithm(comm, checks.all_reduce, "torch", "bfloat16", "sum", (5,))
    checks.all_to_all(comm, "numpy", "int16", (3,))
    checks.broadcast(comm, "torch", "float64", (3,), comm.size - 1)
    checks.send_and_recv(comm, "torch", "float32", (3,))
    comm.barrier()


@pytest.mark.parametrize("world", WORLDS)
def test_level(world):
    topology = WORLDS[world]

    def program(comm):
        for number, level in enumerate(topology.levels):
            (expected,) = (group for group in level.groups if comm.rank in group)
            group = comm.level(number)
            assert members(comm, group) == list(expected)
            assert (group.size, group.rank) == (len(expected), expected.index(comm.rank))
            every_operation(group)

    on(world, program)


@pytest.mark.parametrize("world", UNIFORM)
def test_rail(world):
    topology = WORLDS[world]

    def program(comm):
        mine = topology.coordinates(comm.rank)
        for number in range(len(topology.levels)):
            others = [
                rank
                for rank in range(comm.size)
                if all(
                    a == b or level == number
                    for level, (a, b) in enumerate(
                        zip(topology.coordinates(rank), mine, strict=True)
                    )
                )
            ]
            others.sort(key=lambda rank: topology.coordinates(rank)[number])
            group = comm.rail(number)
            assert members(comm, group) == others
            every_operation(group)

    on(world, program)


def test_a_rail_needs_equal_groups():
    def program(comm):
        with pytest.raises(TopologyError, match="equal"):
            comm.rail(1)

    on("3+5", program)


@pytest.mark.parametrize("world", ["2x2", "2x3", "3+5", "round-robin"])
def test_split_orders_by_key_then_rank(world):
    def program(comm):
        group = comm.split(comm.rank % 2, -comm.rank)
        expected = [rank for rank in reversed(range(comm.size)) if rank % 2 == comm.rank % 2]
        assert members(comm, group) == expected
        every_operation(group)
        same = comm.split(7, 0)
        assert members(comm, same) == list(range(comm.size))
        alone = comm.split(comm.rank, 0)
        assert (alone.size, alone.rank) == (1, 0)
        every_operation(alone)
        every_operation(group.split(0, group.rank))  # a group of a group

    on(world, program)


@pytest.mark.parametrize("world", LAYERED)
def test_bytes_of_groups_are_counted_at_the_levels_of_the_world(world):
    topology = WORLDS[world]
    outermost = len(topology.levels) - 1

    def program(comm):
        x = np.zeros(10, np.float32)
        inside, across = comm.level(0), comm.rail(outermost)
        assert len(inside.topology.levels) == len(across.topology.levels) == outermost + 1
        comm.traffic.reset()
        inside.all_gather(x)
        assert wire(comm, "all_gather") == {0: 40 * (inside.size - 1)}
        comm.traffic.reset()
        across.all_gather(x)
        assert wire(comm, "all_gather") == {outermost: 40 * (across.size - 1)}
        assert across.traffic.snapshot() == comm.traffic.snapshot()

    on(world, program)


def test_a_codec_per_level_keeps_its_meaning_in_a_rail():
    def program(comm):
        rail, node = comm.rail(1), comm.level(0)
        comm.traffic.reset()
        x = np.zeros(2000, np.float32)
        rail.reduce_scatter(x, codec=(None, "int4"))
        chunk = oracle.chunk_nbytes(1000, "float32", "int4")
        assert wire(comm, "reduce_scatter") == {1: chunk}
        comm.traffic.reset()
        node.reduce_scatter(x, codec=(None, "int4"))
        assert wire(comm, "reduce_scatter") == {0: 4000}

    on("2x2", program, min_numel=0)


def test_hops_by_hand_are_the_hierarchical_algorithm():
    """Nodes first, then rails: what the definition says is what groups give."""

    def program(comm):
        values = [drawn((4 * 6,), "float32", 30, rank) for rank in range(comm.size)]
        mine = as_array(values[comm.rank], "float32", "numpy")
        partial = comm.level(0).all_reduce(mine.copy())
        total = comm.rail(1).all_reduce(partial.copy())
        assert_bits(total, oracle.reduced(values, "float32", comm.topology), "float32")
        assert_bits(comm.all_reduce(mine), total, "float32")

    on("2x3", program)


def test_two_groups_are_guarded_apart():
    """What one group does differently is no business of the other."""

    def program(comm):
        group = comm.split(comm.rank % 2, 0)
        for _ in range(3 if comm.rank % 2 else 1):
            group.barrier()
        comm.barrier()

    on("2x2", program)


def test_work_on_groups_and_the_world_runs_in_the_order_of_issue():
    def program(comm):
        rail = comm.rail(1)
        x = np.ones(1000, np.float32)
        works = []
        for _ in range(10):
            works.append(rail.all_reduce(x, async_op=True))
            works.append(comm.all_reduce(x, async_op=True))
        for work in works:
            work.wait()
        # x2 (rail of two) then x4 (world of four), ten times, exact in float32 up to 2^30.
        assert (x == 2.0**30).all()

    on("2x2", program)


def test_among_needs_no_message_and_keeps_the_order_given():
    def program(comm):
        if comm.rank in (0, 3, 4):
            comm.traffic.reset()
            group = comm.among([4, 0, 3])
            assert wire(comm, "all_gather") == {}
            assert members(comm, group) == [4, 0, 3]
            every_operation(group)

    on("2x3", program)


def test_among_refuses_ranks_that_cannot_be():
    def program(comm):
        for ranks in ([0, 1, 1], [0, 1, 6]):
            with pytest.raises(ValueError, match="different ones of 0 to 5"):
                comm.among(ranks)
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        with pytest.raises(ValueError, match=f"rank {comm.rank} is not among"):
            comm.among(others)

    on("2x3", program)
