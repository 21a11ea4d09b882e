"""Stochastic rounding in collectives: seeds, repetition, equal replicas, no bias."""

import numpy as np
import pytest

import zcomm
from tests.collectives import checks
from tests.collectives.dtypes import as_array, drawn, stored_in
from tests.collectives.worlds import algorithms, on
from zcomm import Codec, CollectiveMismatch, seeds
from zcomm.layout import Layout, Segment

RANDOM = ("int8:rounding=stochastic", "int4:rounding=stochastic")
KINDS = pytest.mark.parametrize("kind", ["torch", "fake"])


def test_the_mix_is_that_of_splitmix64():
    """The first three numbers of the generator with seed 0, as published."""
    step = 0x9E3779B97F4A7C15
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [seeds.derive(i * step) for i in range(3)] == published


def test_seeds_do_not_collide_where_one_number_differs():
    for vary in range(4):
        numbers = [[1, 2, 3, 4] for _ in range(2000)]
        for value, row in enumerate(numbers):
            row[vary] = value
        assert len({seeds.derive(*row) for row in numbers}) == len(numbers)
    assert seeds.derive(0, 2**64 + 5) == seeds.derive(0, 5)
    assert seeds.derive(0, -1) == seeds.derive(0, 2**64 - 1)
    assert all(0 <= seeds.derive(7, i) < 2**64 for i in range(100))


def run(world, kind, seed=0, calls=2, codec=RANDOM[1]):
    """Return, by rank, the bits of some calls of every operation."""

    def program(comm):
        stored = drawn((comm.size * 300,), "float32", 90, comm.rank)
        bits = []
        for _ in range(calls):
            for algorithm in algorithms(comm.topology):
                options = {"codec": codec, "algorithm": algorithm}
                results = (
                    comm.all_gather(as_array(stored[:300], "float32", kind), **options),
                    comm.reduce_scatter(as_array(stored, "float32", kind), **options),
                    comm.all_reduce(as_array(stored, "float32", kind), **options),
                )
                bits += [stored_in(result)[0].tobytes() for result in results]
        return bits

    return on(world, program, min_numel=0, seed=seed)


@KINDS
def test_calls_differ_and_jobs_repeat(kind):
    first = run("2x2", kind)
    assert run("2x2", kind) == first
    assert all(len(set(bits)) == len(bits) for bits in first)
    other = run("2x2", kind, seed=1)
    assert all(not set(bits) & set(others) for bits, others in zip(first, other, strict=True))


@pytest.mark.parametrize("world", ["2x2", "2x2x2", "3+5"])
@pytest.mark.parametrize("codec", RANDOM)
def test_replicas_have_the_same_bits(world, codec):
    def program(comm):
        x = drawn((5000,), "float32", 91, comm.rank)
        for algorithm in algorithms(comm.topology):
            for options in ({}, {"async_op": True}):
                result = comm.all_reduce(
                    as_array(x, "float32", "torch"), codec=codec, algorithm=algorithm, **options
                )
                checks.same_everywhere(comm, result.wait() if options else result)
                result = comm.all_gather(as_array(x, "float32", "torch"), codec=codec)
                checks.same_everywhere(comm, result)

    on(world, program, min_numel=0)


@pytest.mark.parametrize("world", ["2", "2x2"])
def test_the_mean_of_many_calls_is_the_sum(world):
    """Unbiased: within 5 standard errors of the exact mean, each element and all together.

    An element that hardly ever rounds away from its neighbour seems to vary less than it does: half
    the steps of the chunks, which bound one draw's deviation, count where they are more.
    """
    calls = 200
    codec = Codec.parse(RANDOM[1])

    def program(comm):
        inputs = [drawn((comm.size * 64,), "float32", 92, rank) for rank in range(comm.size)]
        at = slice(comm.rank * 64, comm.rank * 64 + 64)
        exact = np.mean([one[at].astype(np.float64) for one in inputs], axis=0)
        how = {"op": "avg", "codec": codec}
        rows = [comm.reduce_scatter(inputs[comm.rank], **how) for _ in range(calls)]
        found = np.array(rows, np.float64)
        steps = [codec.error_bound(one[at]) / 2 / comm.size for one in inputs]
        drawn_once = np.sqrt(np.sum(np.square(steps), axis=0))
        deviation = np.maximum(found.std(axis=0, ddof=1), drawn_once) / np.sqrt(calls)
        error = found.mean(axis=0) - exact
        assert (np.abs(error) <= 5 * deviation).all()
        return error, found.std(axis=0, ddof=1) / np.sqrt(calls)

    errors, deviations = map(np.concatenate, zip(*on(world, program, min_numel=0), strict=True))
    assert deviations.max() > 0
    assert abs(errors.sum()) <= 5 * np.sqrt(np.square(deviations).sum())


def test_chunks_of_one_call_draw_differently():
    """All shards, items and ranks hold the same values: equal codes would be equal draws."""

    def program(comm):
        x = np.full(300, 0.3, np.float32)
        x[0] = 1
        shards = comm.all_gather([x, x], codec=RANDOM[1])
        rows = [one.reshape(comm.size, -1)[i] for one in shards for i in range(comm.size)]
        assert len({row.tobytes() for row in rows}) == 2 * comm.size
        full = np.tile(x, comm.size)
        return comm.reduce_scatter([full, full], codec=RANDOM[1])

    results = [part.tobytes() for parts in on("2x2", program, min_numel=0) for part in parts]
    assert len(set(results)) == 8


@KINDS
def test_a_given_seed_gives_the_codes_that_a_codec_writes(kind):
    """The same shard and seed, in whatever communicator: what Codec.encode gives for that seed."""
    codec = Codec.parse(RANDOM[0])
    value = drawn((500,), "float32", 93, 0)
    expected = codec.decode(codec.encode(value, seed=77), 500, np.float32)

    def gathered(comm, shard_of):
        segments = tuple((Segment(500 * rank, 500),) for rank in range(comm.size))
        full = as_array(np.zeros(500 * comm.size, np.float32), "float32", kind)
        shard = as_array(value, "float32", kind)
        layout = Layout("float32", segments)
        comm.gather_layout([shard], [full], [layout], codec=codec, seed=77)
        return stored_in(full)[0].reshape(comm.size, -1)[shard_of]

    def program(comm):
        for group in (comm, comm.rail(1), comm.level(0)):
            for rank in range(group.size):
                assert (gathered(group, rank) == expected).all()

    on("2x2", program, min_numel=0)


def test_a_given_seed_of_a_reduction_replaces_the_number_of_the_call():
    def program(comm):
        full = drawn((400,), "float32", 94, comm.rank)
        layout = Layout.even("float32", 400, comm.size)
        parts = []
        for seed in (5, 5, 6, None, None):
            part = np.zeros(400 // comm.size, np.float32)
            comm.reduce_layout([full], [part], [layout], codec=RANDOM[1], seed=seed)
            parts.append(part.tobytes())
        assert parts[0] == parts[1]
        assert len(set(parts)) == 4

    on("2x2", program, min_numel=0)


@pytest.mark.parametrize(
    ("seed", "error", "says"),
    [
        (-1, ValueError, r"seed -1: possible are 0 to 2\^64 - 1"),
        (2**64, ValueError, r"possible are 0 to 2\^64 - 1"),
        (1.5, TypeError, r"seed 1\.5: an int is expected"),
        ("1", TypeError, r"seed '1': an int is expected"),
    ],
)
def test_a_seed_is_64_bits(seed, error, says):
    with pytest.raises(error, match=says):
        on("2", lambda comm: None, seed=seed)


@pytest.mark.mpi(min_size=2)
def test_ranks_agree_on_the_seed():
    from mpi4py import MPI

    with pytest.raises(CollectiveMismatch, match=r"seed=0.*seed=1"):
        zcomm.init(abort=False, seed=int(MPI.COMM_WORLD.rank == 1))


@pytest.mark.mpi
def test_jobs_repeat_under_mpi():
    bits = []
    for seed in (3, 3, 4):
        with zcomm.init(abort=False, seed=seed, min_numel=0) as comm:
            x = as_array(drawn((400,), "float32", 95, comm.rank), "float32", "torch")
            result = comm.all_reduce(x, codec=RANDOM[1])
            checks.same_everywhere(comm, result)
            bits.append(stored_in(result)[0].tobytes())
    assert bits[0] == bits[1]
    assert (bits[0] != bits[2]) or comm.size == 1
