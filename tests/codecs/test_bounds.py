"""Errors in float64 against the bound that the codec computes, and the bound against formulas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs import oracle
from tests.codecs.inputs import CODECS, DTYPES, KINDS, drawn
from zcomm import Codec
from zcomm.codecs import kernels
from zcomm.codecs.bounds import error_bound

FINITE_KINDS = [kind for kind in KINDS if kind != "special"]
BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


def exact(memory, dtype):
    return np.array(oracle.load(memory, dtype), np.float64)


def coded(codec, x, dtype, out_dtype):
    """What ``x`` is after the wire, in float64."""
    numel = x.nbytes // oracle.ITEMSIZE[dtype]
    starts, lengths = np.zeros(1, np.int64), np.array([numel])
    wire_codec = codec.on_wire(dtype)
    wire = np.empty(wire_codec.wire_nbytes(numel), np.uint8)
    out = np.empty(numel * oracle.ITEMSIZE[out_dtype], np.uint8)
    kernels().encode(wire_codec, x, dtype, starts, lengths, wire)
    kernels().decode(wire_codec, wire, starts, lengths, out, out_dtype)
    return exact(out, out_dtype)


@settings(max_examples=300)
@given(
    codec=st.sampled_from(CODECS),
    kind=st.sampled_from(FINITE_KINDS),
    dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from(DTYPES),
    numel=st.integers(1, 700),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_finite_block_stays_inside_the_bound(codec, kind, dtype, out_dtype, numel, seed):
    x = drawn(np.random.default_rng(seed), kind, numel, dtype)
    values, decoded = exact(x, dtype), coded(codec, x, dtype, out_dtype)
    bound = error_bound(codec.on_wire(dtype), x, dtype, out_dtype)
    finite = np.isfinite(values)
    if codec.quantised:
        blocks = np.arange(numel) // codec.block
        finite = ~np.isin(blocks, blocks[~finite])
        assert np.isnan(decoded[~finite]).all()
        assert np.isnan(bound[~finite]).all()
    assert not np.isnan(bound[finite]).any()
    with np.errstate(invalid="ignore"):
        assert (np.abs(decoded - values)[finite] <= bound[finite]).all()


@pytest.mark.parametrize(("text", "bits"), [("int8", 8), ("int4", 4)])
def test_bound_is_half_a_step_but_where_the_range_ends(text, bits):
    codec = Codec.parse(text)
    x = np.random.default_rng(1).standard_normal(codec.block).astype(np.float32)
    x[:2] = 4, -4  # the extreme, -4, takes the lowest code; +4 is one step beyond the highest
    step = 4 / 2 ** (bits - 1)
    bound = codec.error_bound(x)
    within = np.abs(x) <= (2 ** (bits - 1) - 1.5) * step
    assert (bound[within] == step / 2 * (1 + 2**-7)).all()
    assert bound[0] == step * (1 + 2**-7)
    assert bound[1] == step / 2 * (1 + 2**-7)


@pytest.mark.parametrize(
    ("text", "x", "bound"),
    [
        ("bf16", 3.0, 3 * 2**-8 + 2**-134),
        ("fp16", 3.0, 3 * 2**-11 + 2**-25),
        ("none", 3.0, 0.0),
        ("int8", 2.0**-101, 2.0**-101),
    ],
)
def test_bound_of_single_values(text, x, bound):
    assert Codec.parse(text).error_bound(np.array([x], np.float32)).tolist() == [bound]


def test_bound_of_a_rounded_output():
    x = np.array([1.0, -0.3], np.float32)
    codec = Codec("int8")
    decoded = codec.decode(codec.encode(x), 2, "float32").astype(np.float64)
    added = codec.error_bound(x, "float16") - codec.error_bound(x)
    assert np.allclose(added, 2**-11 * np.abs(decoded) + 2**-25, rtol=1e-12, atol=0)
    assert codec.error_bound(x.reshape(2, 1)).shape == (2, 1)


@pytest.mark.parametrize(("text", "expected"), [("int4", 0.0107), ("int8", 4.8e-5)])
def test_reference_points_of_the_relative_error(text, expected):
    codec = Codec.parse(text)
    x = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    decoded = codec.decode(codec.encode(x), x.size, "float32").astype(np.float64)
    error = ((decoded - x) ** 2).sum() / (x.astype(np.float64) ** 2).sum()
    digits = 4 if text == "int4" else 6
    assert round(error, digits) == expected
