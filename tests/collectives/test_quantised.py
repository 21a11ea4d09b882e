"""Quantised collectives: the bits of encode, decode and float32 sums one after the other, and
values inside the bound of the float64 result, on every cluster.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collectives import checks, oracle
from tests.collectives.dtypes import (
    as_array,
    assert_bits,
    drawn,
    exact,
    filled,
    store,
    stored_in,
)
from tests.collectives.worlds import LAYERED, SEVERAL, WORLDS, algorithms, on
from topology import from_shape

CODECS = ("int8", "int4", "int8:block=32", "int4:block=64")
DTYPES = ("float32", "bfloat16", "float16")
EVERY_WORLD = pytest.mark.parametrize("world", SEVERAL)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


@EVERY_WORLD
@EVERY_DTYPE
def test_all_gather(world, dtype):
    def program(comm):
        for codec in CODECS[::3]:
            for numel in (0, 130):
                shards = [drawn((numel,), dtype, 1, rank) for rank in range(comm.size)]
                for algorithm in algorithms(comm.topology):
                    checks.quantised_gather(comm, shards, dtype, codec, algorithm)

    on(world, program, min_numel=0)


@EVERY_WORLD
@EVERY_DTYPE
def test_reduce_scatter(world, dtype):
    def program(comm):
        for codec in CODECS[1:3]:
            for numel in (0, 130):
                fulls = [drawn((numel * comm.size,), dtype, 2, r) for r in range(comm.size)]
                for algorithm in algorithms(comm.topology):
                    checks.quantised_reduce_scatter(
                        comm, fulls, dtype, checks.per_level(codec, comm), algorithm=algorithm
                    )

    on(world, program, min_numel=0)


@EVERY_WORLD
@EVERY_DTYPE
def test_all_reduce_leaves_one_result_on_all_ranks(world, dtype):
    def program(comm):
        for numel in (1, 700, 4096 * comm.size + 5):
            inputs = [drawn((numel,), dtype, 3, rank) for rank in range(comm.size)]
            for codec in ("int8", "int4:block=64"):
                mine = as_array(inputs[comm.rank], dtype, "torch")
                assert comm.all_reduce(mine, op="avg", codec=codec) is mine
                checks.same_everywhere(comm, mine)
                assert_all_reduced(comm, inputs, mine, dtype, codec)

    on(world, program, min_numel=0)


def assert_all_reduced(comm, inputs, result, dtype, codec):
    """Reduce, round to the dtype, and pass the codec once more: cuts are at whole blocks."""
    nesting, codecs = checks.flattened(comm.topology, "auto", checks.per_level(codec, comm))
    mean = oracle.Quantised(inputs, dtype, nesting, codecs)
    decoded, limits = oracle.roundtrip(codec, mean.stored, dtype)
    error = np.abs(exact(stored_in(result)[0], dtype) - mean.exact)
    assert (error <= mean.bound + limits + oracle.rounding_bound(decoded, dtype)).all()


@pytest.mark.parametrize("world", LAYERED)
@pytest.mark.parametrize(
    "codecs", [(None, "int4"), ("int8", "int4"), ("int8", None), ("bf16", "int8")]
)
@EVERY_DTYPE
def test_a_codec_per_level(world, codecs, dtype):
    topology = WORLDS[world]
    codecs = (*codecs[:1] * (len(topology.levels) - 1), codecs[-1])

    def program(comm):
        fulls = [drawn((300 * comm.size,), dtype, 4, rank) for rank in range(comm.size)]
        for op in ("sum", "avg"):
            checks.quantised_reduce_scatter(comm, fulls, dtype, codecs, op)
        if codecs[0] is None:  # the network through the codec, then decoded values inwards
            shards = [drawn((300,), dtype, 4, rank) for rank in range(comm.size)]
            mine = as_array(shards[comm.rank], dtype, "torch")
            result = comm.all_gather(mine, codec=codecs)
            expected = [oracle.roundtrip(codecs[-1], one, dtype)[0] for one in shards]
            stored = store(np.concatenate(expected), dtype)
            far = [
                r for r in range(comm.size) if r not in topology.group(len(codecs) - 2, comm.rank)
            ]
            found = stored_in(result)[0].reshape(comm.size, -1)
            assert (found[far] == stored.reshape(comm.size, -1)[far]).all()
            checks.same_everywhere(comm, result)

    on(world, program, min_numel=0)


@pytest.mark.parametrize("world", ["2x3", "3+5"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_outputs_in_float32_are_not_rounded(world, kind):
    dtype = "float16" if kind == "numpy" else "bfloat16"

    def program(comm):
        shards = [drawn((300,), dtype, 5, rank) for rank in range(comm.size)]
        checks.quantised_gather(comm, shards, dtype, "int8", kind=kind, out_dtype="float32")
        fulls = [drawn((300 * comm.size,), dtype, 5, rank) for rank in range(comm.size)]
        out = filled((300,), "float32", kind, np.nan)
        comm.reduce_scatter(as_array(fulls[comm.rank], dtype, kind), out, op="avg", codec="int4")
        nesting, codecs = checks.flattened(comm.topology, "auto", checks.per_level("int4", comm))
        at = oracle.even_slices(300 * comm.size, comm.size)[comm.rank]
        chunks = [one[at] for one in fulls]
        expected = oracle.Quantised(chunks, dtype, nesting, codecs, out_dtype="float32")
        assert_bits(out, expected.stored, "float32", kind)

    on(world, program, min_numel=0)


def test_float64_is_quantised_as_float32():
    def program(comm):
        full = np.random.default_rng([17, comm.rank]).standard_normal(4 * 300)
        narrow = full.astype(np.float32)
        for codec in ("int8", "bf16"):
            gathered = comm.all_gather(full, codec=codec)
            assert gathered.dtype == np.float64
            assert (gathered == comm.all_gather(narrow, codec=codec)).all()
            part = comm.reduce_scatter(full, codec=codec)
            assert (part == comm.reduce_scatter(narrow, codec=codec)).all()
            both = comm.all_reduce(full.copy(), codec=codec)
            assert (both == comm.all_reduce(narrow.copy(), codec=codec)).all()

    on("2x2", program, min_numel=0)


def test_none_as_a_codec_changes_nothing():
    def program(comm):
        x = drawn((400,), "float32", 18, comm.rank)
        for codec in ("none", ("none", None), (None, None)):
            assert (comm.reduce_scatter(x, codec=codec) == comm.reduce_scatter(x)).all()
            assert (comm.all_gather(x, codec=codec) == comm.all_gather(x)).all()

    on("2x2", program, min_numel=0)


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
@pytest.mark.parametrize("world", ["2x2", "3+5"])
def test_casts(codec, world):
    def program(comm):
        shards = [drawn((300,), "float32", 19, rank) for rank in range(comm.size)]
        checks.quantised_gather(comm, shards, "float32", codec)
        fulls = [drawn((300 * comm.size,), "float32", 19, rank) for rank in range(comm.size)]
        checks.quantised_reduce_scatter(comm, fulls, "float32", checks.per_level(codec, comm))

    on(world, program, min_numel=0)


REFUSED = {
    "unknown": (lambda c, x: c.all_gather(x, codec="int7"), "int7.*int8"),
    "unknown option": (lambda c, x: c.all_gather(x, codec="int8:blok=64"), "blok.*block"),
    "bad block": (lambda c, x: c.all_gather(x, codec="int8:block=100"), "100.*32.*4096"),
    "three for two levels": (
        lambda c, x: c.reduce_scatter(x, codec=("int8", "int4", "int4")),
        r"\b3\b.*\b2\b",
    ),
    "one for two levels": (lambda c, x: c.reduce_scatter(x, codec=("int8",)), r"\b1\b.*\b2\b"),
    "two codecs in a gather": (
        lambda c, x: c.all_gather(x, codec=("int8", "int4")),
        "once.*int8.*int4",
    ),
    "integers": (lambda c, x: c.all_gather(x.int(), codec="int8"), "int32.*floating"),
    "integers, reduced": (lambda c, x: c.all_reduce(x.int(), codec="int8"), "int32.*floating"),
    "complex": (
        lambda c, x: c.all_gather(x.to(torch.complex64), codec="int8"),
        "complex64.*floating",
    ),
    "max": (lambda c, x: c.all_reduce(x, op="max", codec="int8"), "sum and avg.*max"),
    "product": (
        lambda c, x: c.reduce_scatter(x, op="product", codec="int4"),
        "sum and avg.*product",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_codecs_that_do_not_fit_are_named(case):
    call, message = REFUSED[case]

    def program(comm):
        with pytest.raises(ValueError, match=message) as caught:
            call(comm, torch.ones(8))
        assert "\n" not in str(caught.value)
        checks.all_reduce(comm, "torch", "float32", "sum", (3,))

    on("2x2", program, min_numel=0)


def test_a_codec_is_refused_for_small_tensors_as_for_large_ones():
    """Whether an argument is right must not depend on min_numel."""

    def program(comm):
        for case in ("max", "two codecs in a gather", "product"):
            with pytest.raises(ValueError, match=REFUSED[case][1]):
                REFUSED[case][0](comm, torch.ones(8))

    on("2x2", program, min_numel=1000)


@settings(max_examples=25)
@given(
    shape=st.sampled_from([(2,), (3,), (2, 2), (3, 2), (2, 3), (2, 1, 2)]),
    numel=st.integers(0, 300),
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["sum", "avg"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size_codec_and_cluster(shape, numel, codec, dtype, op, seed):
    def program(comm):
        fulls = [drawn((numel * comm.size,), dtype, seed, rank) for rank in range(comm.size)]
        codecs = checks.per_level(codec, comm)
        checks.quantised_reduce_scatter(comm, fulls, dtype, codecs, op, "hierarchical")
        checks.quantised_gather(comm, [one[:numel] for one in fulls], dtype, codec)

    on(from_shape(shape), program, min_numel=0)
