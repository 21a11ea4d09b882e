"""The oracle of the benchmark against float64, and against results worked out by hand."""

import itertools

import numpy as np
import pytest

import topology
from benchmarks.collectives import inputs, oracle
from benchmarks.collectives.cases import DATA_TYPES
from zcomm.codecs import Codec

FLOATING = [name for name, dtype in DATA_TYPES.items() if dtype.floating]
TOPOLOGIES = ["1", "2", "2x2", "1x4", "4x1", "2x3", "3x2", "2x2x2", "3+5"]


def reduced(values, spec, dtype="float", op="sum", codecs=None, algorithm=None):
    """Reduce one row of values per rank; return the term as it would be stored."""
    where = topology.parse(spec)
    codecs = codecs or (None,) * len(where.levels)
    algorithm = algorithm or ("hierarchical" if where.uniform else "flat")
    steps = oracle.stages(where, algorithm, [codec and Codec.parse(codec) for codec in codecs])
    dtype = DATA_TYPES[dtype]
    rows = {rank: np.array(row, dtype.carrier) for rank, row in enumerate(values)}
    return oracle.stored(oracle.reduce(rows, steps, dtype, op), dtype)


def draw(spec, dtype, count=3000):
    ranks = range(topology.parse(spec).size)
    return [inputs.normal(DATA_TYPES[dtype], 11, rank, 0, count) for rank in ranks]


@pytest.mark.parametrize("spec", TOPOLOGIES)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [*itertools.product(["sum", "prod", "min", "max"], DATA_TYPES)]
    + [("avg", dtype) for dtype in FLOATING],
)
def test_exact_data_give_the_float64_result(spec, dtype, op):
    size = topology.parse(spec).size
    rows = [inputs.exact(DATA_TYPES[dtype], op, size, 2, rank, 0, 200) for rank in range(size)]
    stacked = np.stack(rows).astype(np.float64)
    function = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max, "avg": np.mean}[op]
    true = function(stacked, axis=0)
    assert np.array_equal(oracle.true_reduction(dict(enumerate(rows)), op), true)
    expected = inputs.round_to(true, DATA_TYPES[dtype]) if op == "avg" else true
    assert np.array_equal(reduced(rows, spec, dtype, op).values, expected)


def test_sums_nest_as_the_levels_do():
    # 1e8 + 1 is 1e8 in float32, whose neighbours there are 8 apart.
    values = [[1e8], [1.0], [-1e8], [1.0]]
    assert reduced(values, "4").values == [1.0]
    assert reduced(values, "2x2").values == [0.0]
    assert reduced(values, "2x2", algorithm="flat").values == [0.0]
    assert reduced(values, "2x2", algorithm="ordered").values == [1.0]
    assert reduced(values, "1+3").values == [reduced(values[1:], "3").values + np.float32(1e8)]


def test_partial_sums_of_bfloat16_are_rounded_and_those_of_half_are_not():
    values = [[256.0], [1.0], [0.0], [1.0]]
    # 257 is a tie between 256 and 258 in bfloat16: the partial sum is 256, and so is 256 + 1.
    assert reduced(values, "2x2", "bfloat16").values == [256.0]
    assert reduced(values, "4", "bfloat16").values == [258.0]
    assert reduced([[2048.0], [1.0], [0.0], [1.0]], "2x2", "half").values == [2050.0]
    assert reduced([[60000.0], [60000.0], [-60000.0], [0.0]], "2x2", "half").values == [60000.0]
    assert reduced([[60000.0], [60000.0]], "2", "half").values == [np.inf]


def test_the_mean_is_one_division_at_the_end():
    # 41 · fl(1/41) is not 1, and neither is a mean of means.
    assert reduced([[1.0]] * 41, "41", op="avg").values == [1.0]
    assert reduced([[2.0]] * 6, "2x3", op="avg").values == [2.0]


def test_integers_wrap_around_in_their_own_type():
    assert reduced([[100], [100], [100]], "3", "int8").values == [300 - 256]


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical"])
@pytest.mark.parametrize(
    "codecs", [("int8", "int8"), ("int8", "int4"), (None, "int4"), ("int4", None)]
)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("spec", ["2x2", "2x3", "1x4"])
def test_a_quantised_result_lies_within_its_bound(spec, op, dtype, codecs, algorithm):
    rows = draw(spec, dtype)
    term = reduced(rows, spec, dtype, op, codecs, algorithm)
    true = oracle.true_reduction(dict(enumerate(rows)), op)
    error = np.abs(term.values.astype(np.float64) - true)
    assert (error <= term.bound).all()
    # The bound is one of the worst case, not of any case: errors of this size do occur.
    used = codecs if algorithm == "hierarchical" else codecs[-1:]
    if any(used) and not (spec == "1x4" and not codecs[0]):
        assert error.max() > 0.05 * term.bound.max()


@pytest.mark.parametrize("dtype", FLOATING)
def test_an_exact_result_lies_within_its_bound(dtype):
    rows = draw("2x2x2", dtype)
    term = reduced(rows, "2x2x2", dtype)
    error = np.abs(
        term.values.astype(np.float64) - oracle.true_reduction(dict(enumerate(rows)), "sum")
    )
    assert (error <= term.bound).all()


def test_each_level_encodes_with_its_own_codec_and_levels_of_one_do_not():
    # One block; the extreme is -8 or -4, so int4's scale is 1 or 1/2 and int8's 1/16 or 1/32.
    row = [-8.0, 3.3] + [0.0] * 30
    other = [-4.0, 3.3] + [0.0] * 30
    one_hop = reduced([row, other], "2", codecs=("int4",)).values
    assert one_hop[:2].tolist() == [-12.0, 3.0 + 3.5]
    # 3.3 · 16 = 52.8 and 3.3 · 32 = 105.6 round to 53 and 106.
    exact = np.float32(53 / 16) + np.float32(106 / 32)
    assert reduced([row, other], "1x2", codecs=("int8", "int4")).values[1] == exact
    # A flat hop has the codec of the outermost level with peers.
    flat = reduced([row, other], "1x2", codecs=("int8", "int4"), algorithm="flat").values[1]
    assert flat == exact
    # Two nodes of one: level 0 has no hop, so only int4 is used.
    assert reduced([row, other], "2x1", codecs=("int8", "int4")).values[1] == 6.5
    # Two nodes of two: the sum inside a node, 2 · 53/16 beside -16, is then encoded with scale 2.
    two_hops = reduced([row, row, row, row], "2x2", codecs=("int8", "int4")).values
    assert two_hops[:2].tolist() == [-32.0, 2 * 2 * round(2 * 53 / 16 / 2)]


def test_a_gather_encodes_once():
    row = np.array([-8.0, 3.3] + [0.0] * 30, np.float32)
    term = oracle.passed(
        oracle.given(row, DATA_TYPES["float"], None), DATA_TYPES["float"], Codec.parse("int4")
    )
    assert term.values[:2].tolist() == [-8.0, 3.0]
    assert term.bound[1] >= 0.3
    exact = oracle.passed(oracle.given(row, DATA_TYPES["float"], None), DATA_TYPES["float"], None)
    assert np.array_equal(exact.values, row)
    assert not exact.bound.any()
