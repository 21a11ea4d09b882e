"""Exact collectives: operation × kind of array × dtype × cluster × algorithm, compared in bits."""

from functools import partial

import numpy as np
import pytest

from tests.collectives import checks, oracle
from tests.collectives.dtypes import (
    HALF,
    KINDS,
    as_array,
    assert_bits,
    filled,
    store,
    widen,
)
from tests.collectives.worlds import LAYERED, SEVERAL, UNIFORM, WORLDS, algorithms, on
from tests.marks import one_in, slow
from topology import from_shape

EVERY_WORLD = pytest.mark.parametrize("world", WORLDS)

# Every cluster meets the dtypes that differ in their arithmetic, one of them in the fast tier; two
# meet all kinds and dtypes.
MAIN_KINDS = [("torch", "bfloat16"), ("numpy", "float16"), ("torch", "float32")]
CASES = one_in(3, list(WORLDS), MAIN_KINDS)
CASES += [("2x2", *kind) for kind in KINDS if kind not in MAIN_KINDS]
CASES += [slow("1+2 round-robin", *kind) for kind in KINDS if kind not in MAIN_KINDS]
EVERY_CASE = pytest.mark.parametrize(("world", "kind", "dtype"), CASES)


@EVERY_CASE
def test_all_gather(world, kind, dtype):
    def program(comm):
        for shape in checks.SHAPES:
            checks.every_algorithm(comm, checks.all_gather, kind, dtype, shape)

    on(world, program)


@EVERY_CASE
def test_reduce_scatter(world, kind, dtype):
    ops = [op for op in oracle.possible_ops(dtype) if op in ("sum", "avg")]

    def program(comm):
        for op in ops:
            for shape in checks.SHAPES[1:]:
                checks.every_algorithm(comm, checks.reduce_scatter, kind, dtype, op, shape)
            checks.reduce_scatter(comm, kind, dtype, op, (9,), algorithm="ordered")

    if ops:
        on(world, program)


@EVERY_CASE
def test_all_reduce(world, kind, dtype):
    def program(comm):
        for op in oracle.possible_ops(dtype):
            checks.every_algorithm(comm, checks.all_reduce, kind, dtype, op, (13,))
            checks.all_reduce(comm, kind, dtype, op, (13,), algorithm="ordered")
            for shape in ((), (0, 3)):
                checks.all_reduce(comm, kind, dtype, op, shape)

    on(world, program)


@pytest.mark.parametrize("world", ["2x2", "3+5"])
def test_products_of_complex_numbers(world):
    """Whole numbers: whether a complex multiplication uses FMA does not show."""

    def program(comm):
        rng = np.random.default_rng(1)
        inputs = rng.integers(-9, 10, (comm.size, 13)) + 1j * rng.integers(-9, 10, (comm.size, 13))
        for algorithm in (*algorithms(comm.topology), "ordered"):
            result = comm.all_reduce(inputs[comm.rank].copy(), op="product", algorithm=algorithm)
            assert (result == inputs.prod(axis=0)).all()

    on(world, program)


@pytest.mark.parametrize(
    ("world", "dtype"), one_in(4, SEVERAL, ["float32", "bfloat16", "float16", "int32"])
)
@pytest.mark.parametrize("numel", [4095, 70_001])
def test_all_reduce_of_many_elements(world, dtype, numel):
    def program(comm):
        checks.every_algorithm(comm, checks.all_reduce, "torch", dtype, "sum", (numel,))

    on(world, program)


@EVERY_WORLD
@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
def test_partial_sums_of_bfloat16(world, reduce_dtype):
    def program(comm):
        for algorithm in (*algorithms(comm.topology), "ordered"):
            options = {"algorithm": algorithm, "reduce_dtype": reduce_dtype}
            checks.reduce_scatter(comm, "torch", "bfloat16", "avg", (301,), **options)
            checks.all_reduce(comm, "torch", "bfloat16", "sum", (301,), **options)

    on(world, program)


def test_a_sum_shows_in_which_order_it_was_made():
    """The oracle itself: orders that differ in bits exist in every layered cluster."""
    for world in LAYERED:
        topology = WORLDS[world]
        for dtype in ("float32", "bfloat16"):
            values = [checks.drawn((301,), dtype, 2, rank) for rank in range(topology.size)]
            nested = oracle.reduced(values, dtype, topology)
            ordered = oracle.reduced(values, dtype, oracle.nesting(topology, "ordered"))
            assert (nested != ordered).any()


@EVERY_CASE
def test_all_to_all(world, kind, dtype):
    def program(comm):
        for shape in checks.SHAPES[1:]:
            checks.all_to_all(comm, kind, dtype, shape)

    on(world, program)


@EVERY_CASE
def test_broadcast_from_every_root(world, kind, dtype):
    def program(comm):
        for root in range(comm.size):
            for shape in ((), (5,), (0,)):
                checks.broadcast(comm, kind, dtype, shape, root)

    on(world, program)


@EVERY_WORLD
@pytest.mark.parametrize(("kind", "dtype"), [("numpy", "float32"), ("torch", "bfloat16")])
def test_send_and_recv(world, kind, dtype):
    def program(comm):
        for shape in checks.SHAPES:
            checks.send_and_recv(comm, kind, dtype, shape)

    on(world, program)


@EVERY_WORLD
def test_barrier_holds_every_rank_until_the_last_has_come(world):
    arrived = []

    def program(comm):
        for turn in range(20):
            arrived.append((turn, comm.rank))
            comm.barrier()
            assert sum(one == turn for one, _ in arrived) == comm.size
            comm.barrier()

    on(world, program)


@EVERY_WORLD
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_lists_of_several_dtypes(world, kind):
    on(world, lambda comm: checks.every_algorithm(comm, checks.lists, kind))


@EVERY_WORLD
@pytest.mark.parametrize("dtype", HALF)
def test_float32_outputs_of_16_bit_inputs(world, dtype):
    on(world, lambda comm: checks.every_algorithm(comm, checks.wide_outputs, dtype, "torch"))


@pytest.mark.parametrize("world", ["2x2", "3+5"])
def test_async_operations_finish_with_the_same_bits(world):
    def program(comm):
        options = {"async_op": True}
        checks.every_algorithm(comm, checks.all_gather, "torch", "bfloat16", (37,), **options)
        checks.every_algorithm(
            comm, checks.reduce_scatter, "numpy", "float32", "avg", (37,), **options
        )
        checks.every_algorithm(comm, checks.all_reduce, "torch", "float16", "sum", (37,), **options)
        checks.all_to_all(comm, "numpy", "int32", (5,), **options)
        checks.broadcast(comm, "torch", "complex64", (5,), comm.size - 1, **options)

    on(world, program)


@pytest.mark.parametrize("world", ["2x2", "round-robin"])
def test_many_operations_in_flight_keep_their_order(world):
    def program(comm):
        inputs = [
            [checks.drawn((50 + i,), "float32", i, r) for r in range(comm.size)] for i in range(40)
        ]
        mine = [as_array(one[comm.rank], "float32", "torch") for one in inputs]
        works = [comm.all_reduce(one, async_op=True) for one in mine]
        checks.all_reduce(comm, "numpy", "float32", "sum", (64,))  # queues behind the others
        assert all(work.done() for work in works)
        for work, one, values in zip(
            reversed(works), reversed(mine), reversed(inputs), strict=True
        ):
            assert work.wait() is one
            expected = oracle.reduced(values, "float32", comm.topology)
            assert_bits(one, expected, "float32")

    on(world, program)


@pytest.mark.parametrize("world", ["2x2", "2x3", "3+5"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_special_values_are_summed_as_ieee_says(world, dtype):
    """-0 stays -0, Inf - Inf and every NaN become the one NaN, an overflow is Inf."""
    largest = {"float32": 3e38, "float16": 6e4, "bfloat16": 3e38}[dtype]
    column = [-0.0, np.inf, -np.inf, np.nan, largest, 1e-7]

    def program(comm):
        values = np.array(column * comm.size, np.float32)
        if comm.rank == comm.size - 1:
            values[1 :: len(column)] = -np.inf
        inputs = [np.array(column * comm.size, np.float32) for _ in range(comm.size)]
        inputs[-1][1 :: len(column)] = -np.inf
        stored = [store(one, dtype) for one in inputs]
        expected = oracle.reduced(stored, dtype, comm.topology)
        for algorithm in algorithms(comm.topology):
            mine = as_array(stored[comm.rank], dtype, "torch")
            part = comm.reduce_scatter(mine, algorithm=algorithm)
            assert_bits(part, expected[: len(column)], dtype)
            assert_bits(comm.all_reduce(mine, algorithm=algorithm), expected, dtype)
        meaning = widen(expected[: len(column)], dtype)
        assert np.signbit(meaning[0])
        assert np.isnan(meaning[[1, 3]]).all()
        assert np.isposinf(meaning[4])

    on(world, program)


def test_s1_means_of_float16_neither_overflow_nor_underflow():
    def program(comm):
        for value in (3e4, 6e-8, -3e4, 65504.0):
            x = filled((16,), "float16", "torch", value)
            expected = store(np.full(16, value), "float16")
            for algorithm in algorithms(comm.topology):
                part = comm.reduce_scatter(x, op="avg", algorithm=algorithm)
                assert_bits(part, expected[:2], "float16")
                assert_bits(comm.all_reduce(x, op="avg", algorithm=algorithm), expected, "float16")

    for shape in ((8,), (4, 2), (2, 2, 2), (2, 4)):
        on(from_shape(shape), program)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_q15_no_algorithm_changes_a_bit(dtype):
    """Also against each other, over sizes on both sides of every threshold."""
    for world in ("2x2x2", "round-robin"):

        def program(comm):
            for numel in (1, 255, 4096, 8191, 33_000):
                results = []
                for algorithm in algorithms(comm.topology):
                    mine = as_array(checks.drawn((numel,), dtype, 3, comm.rank), dtype, "torch")
                    results.append(comm.all_reduce(mine, algorithm=algorithm, op="avg"))
                for one in results[1:]:
                    assert (one == results[0]).all()
                checks.same_everywhere(comm, results[0])

        on(world, program)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_64_ranks(dtype):
    def program(comm):
        for algorithm in ("flat", "hierarchical"):
            checks.all_gather(comm, "torch", dtype, (3,), algorithm=algorithm)
            checks.reduce_scatter(comm, "torch", dtype, "avg", (3,), algorithm=algorithm)

    on(from_shape((8, 8)), program)


@pytest.mark.parametrize("world", UNIFORM)
def test_control_values_come_in_rank_order(world):
    def program(comm):
        for dtype in (np.float64, np.int64):
            rows = comm.all_gather_values(np.array([comm.rank, -comm.rank], dtype))
            assert rows.dtype == dtype
            assert rows.tolist() == [[rank, -rank] for rank in range(comm.size)]
        assert comm.all_gather_values(np.zeros(0)).shape == (comm.size, 0)
        x = np.array([np.nan, -0.0, 5e-324])
        assert comm.all_gather_values(x)[-1].tobytes() == x.tobytes()

    on(world, program)


def test_one_thread_per_rank_gives_its_result_in_rank_order():
    assert on("2x3", lambda comm: (comm.rank, comm.size)) == [(rank, 6) for rank in range(6)]
    assert partial(on, "2")(lambda comm: comm.topology) == [WORLDS["2"]] * 2
