"""Errors in float64 against the bound that the codec computes, and the bound against formulas."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs import oracle
from tests.codecs.inputs import DTYPES, KINDS, drawn, memory
from zcomm import Codec
from zcomm.codecs import reference
from zcomm.codecs.bounds import error_bound

BOTH = "rounding=stochastic,transform=hadamard"
INTEGERS = ("", "rounding=stochastic", "transform=hadamard", BOTH)
OPTIONS = {
    "int8": INTEGERS,
    "int4": INTEGERS,
    "fp8_e4m3": ("", "transform=hadamard"),
    "fp8_e5m2": ("", "transform=hadamard"),
    "bf16": ("",),
    "fp16": ("",),
    "none": ("",),
}
TEXTS = [f"{name}:{o}".rstrip(":") for name, options in OPTIONS.items() for o in options]
LARGEST = 3.4028234e38
SLACK = 1 + 2.0**-7


def exact(memory, dtype):
    return np.array(oracle.load(memory, dtype), np.float64)


def coded(codec, x, dtype, out_dtype, seed):
    """What ``x`` is after the wire, in float64."""
    numel = x.nbytes // oracle.ITEMSIZE[dtype]
    starts, lengths = np.zeros(1, np.int64), np.array([numel])
    wire, out = memory(codec.wire_nbytes(numel)), memory(numel * oracle.ITEMSIZE[out_dtype])
    reference.encode(codec, x, dtype, starts, lengths, wire, seed)
    reference.decode(codec, wire, starts, lengths, out, out_dtype)
    return exact(out, out_dtype)


def spikes(rng, numel):
    """Few values among zeros, equal values, or values of two sizes, anywhere up to the largest."""
    power = rng.integers(-110, 128)
    sparse = np.where(rng.random(numel) < 0.05, 1, rng.choice([0, 0, 2.0**-20, 1]))
    return sparse * rng.choice([-1, 1], numel) * (1 + rng.choice([0, 0.7])) * 2.0**power


def values_of(rng, kind, numel, dtype):
    """Memory of ``dtype``."""
    if kind != "spikes":
        return drawn(rng, kind, numel, dtype)
    x = np.clip(spikes(rng, numel), -LARGEST, LARGEST).astype(np.float32)
    return reference.from_float32(x, dtype, saturate=True).view(np.uint8).copy()


def check(codec, x, dtype, out_dtype, seed):
    values, decoded = exact(x, dtype), coded(codec, x, dtype, out_dtype, seed)
    bound = error_bound(codec, x, dtype, out_dtype)
    finite = np.isfinite(values)
    if codec.quantised:
        blocks = np.arange(values.size) // codec.block
        finite = ~np.isin(blocks, blocks[~finite])
        assert np.isnan(decoded[~finite]).all()
        assert np.isnan(bound[~finite]).all()
    if codec.transform == "hadamard":
        # A transform may overflow: then no finite value is promised.
        finite &= ~np.isnan(bound) | ~np.isnan(decoded)
        finite &= ~np.isinf(bound)
    assert not np.isnan(bound[finite]).any()
    with np.errstate(invalid="ignore"):
        assert (np.abs(decoded - values)[finite] <= bound[finite]).all()


ANY = {
    "kind": st.sampled_from([*(kind for kind in KINDS if kind != "special"), "spikes", "spikes"]),
    "block": st.sampled_from([32, 64, 256]),
    "dtype": st.sampled_from(DTYPES),
    "out_dtype": st.sampled_from(DTYPES),
    "numel": st.integers(1, 700),
    "seed": st.integers(0, 2**64 - 1),
}


def check_drawn(text, kind, block, dtype, out_dtype, numel, seed):
    codec = Codec.parse(text).on_wire(dtype)
    if codec.quantised:
        codec = dataclasses.replace(codec, block=block)
    check(codec, values_of(np.random.default_rng(seed), kind, numel, dtype), dtype, out_dtype, seed)


@pytest.mark.parametrize("text", TEXTS)
@settings(max_examples=100)
@given(**ANY)
def test_every_finite_block_stays_inside_the_bound(text, **drawn):
    check_drawn(text, **drawn)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
@settings(max_examples=1500)
@given(**ANY)
def test_every_finite_block_stays_inside_the_bound_on_many(text, **drawn):
    check_drawn(text, **drawn)


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_the_bound_is_nearly_reached(text):
    codec = Codec.parse(text)
    x = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    error = np.abs(coded(codec, x.view(np.uint8), "float32", "float32", 5) - x)
    # 32 errors of a transformed group rarely add up.
    reached = 0.25 if codec.transform == "hadamard" else 0.88
    assert (error / codec.error_bound(x)).max() > reached


@pytest.mark.parametrize(("text", "bits"), [("int8", 8), ("int4", 4)])
def test_bound_is_half_a_step_but_where_the_range_ends(text, bits):
    codec = Codec.parse(text)
    x = np.random.default_rng(1).standard_normal(codec.block).astype(np.float32)
    x[:2] = 4, -4  # the extreme, -4, takes the lowest code; +4 is one step beyond the highest
    step = 4 / 2 ** (bits - 1)
    bound = codec.error_bound(x)
    within = np.abs(x) <= (2 ** (bits - 1) - 1.5) * step
    assert (bound[within] == step / 2 * SLACK).all()
    assert bound[0] == step * SLACK
    assert bound[1] == step / 2 * SLACK


@pytest.mark.parametrize(
    ("text", "largest"), [("int8:rounding=stochastic", 127), ("int4:rounding=stochastic", 7)]
)
def test_bound_of_stochastic_rounding_is_a_step(text, largest):
    x = np.array([3 * largest, -1.4, 0.001], np.float32)
    assert Codec.parse(text).error_bound(x).tolist() == [3 * SLACK] * 3
    to_half = Codec.parse(text).error_bound(x, "float16") - 3 * SLACK
    largest_decoded = np.abs(x.astype(np.float64)) + 3 * SLACK
    assert np.allclose(to_half, 2.0**-11 * largest_decoded + 2.0**-25, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("text", "largest", "relative", "absolute"),
    [("fp8_e4m3", 448, 2.0**-4, 2.0**-10), ("fp8_e5m2", 57344, 2.0**-3, 2.0**-17)],
)
def test_bound_of_fp8_follows_the_value(text, largest, relative, absolute):
    x = np.array([4 * largest, -3, 2.0**-20, 0], np.float32)
    expected = [4 * largest * relative, 3 * relative, 4 * absolute, 4 * absolute]
    bound = Codec.parse(text).error_bound(x)
    assert np.allclose(bound, np.array(expected) * SLACK, rtol=1e-15, atol=0)


@pytest.mark.parametrize("numel", [1, 3, 32, 43, 64])
def test_bound_of_a_transform_is_the_sum_of_the_coefficients(numel):
    """All ones have one coefficient for each group, √g; the scale is that of the largest."""
    codec = Codec.parse("int8:block=64,transform=hadamard")
    sizes = {1: [1], 3: [2], 32: [32], 43: [32, 8], 64: [32, 32]}[numel]
    step = float(oracle.value32((oracle.pattern32(max(sizes) ** 0.5 / 128) + 0xFFFF) >> 16 << 16))
    expected = [step / 2 * SLACK * size / size**0.5 * (1 + 2.0**-16) for size in sizes]
    rest = numel - sum(sizes)
    left = np.concatenate([np.repeat(expected, sizes), np.full(rest, step / 2 * SLACK)])
    assert np.allclose(codec.error_bound(np.ones(numel, np.float32)), left, rtol=1e-12, atol=0)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8_e4m3", "fp8_e5m2"])
def test_what_a_transform_counts_as_zero_is_in_the_bound(format):
    codec = Codec.parse(f"{format}:block=64,transform=hadamard")
    small = np.float32(2.0**-102 * (1 - 2.0**-24))
    x = np.full(64, small)
    assert codec.error_bound(x).tolist() == [small] * 64
    x[:32] = 2.0**-90  # the other group of the block is alive
    error = np.abs(coded(codec, x.view(np.uint8), "float32", "float32", 0) - x)
    assert (error[32:] == small).all()
    assert (error <= codec.error_bound(x)).all()


def test_coefficients_that_the_inverse_counts_as_zero_are_in_the_bound():
    """The second group's coefficients, 2^-103.5, have codes that stand for less than 2^-102."""
    codec = Codec.parse("fp8_e5m2:block=64,transform=hadamard")
    x = np.zeros(64, np.float32)
    x[0], x[32] = 57344 * 2.0**-100 * 32**0.5, 2.0**-101
    error = np.abs(coded(codec, x.view(np.uint8), "float32", "float32", 0) - x)
    bound = codec.error_bound(x)
    assert error[32] == 2.0**-101
    assert error[32] <= bound[32] < 1.2 * 2.0**-101


def test_no_bound_where_a_transform_overflows():
    codec = Codec.parse("int8:transform=hadamard")
    x = np.zeros(64, np.float32)
    x[0], x[32] = 2.0**125, 2.0**126  # coefficients of 2^123.5, 32 of which are beyond 2^128
    decoded = decoded_of(codec, x)
    bound = codec.error_bound(x)
    assert np.isfinite(decoded[:32]).all()
    assert np.isinf(decoded[32])
    assert (np.abs(decoded - x)[:32] <= bound[:32]).all()
    assert np.isinf(bound[32:]).all()
    x[:] = 2.0**124  # the sum of 32 is no float32
    assert np.isnan(decoded_of(codec, x)).all()
    assert np.isnan(codec.error_bound(x)).all()


def decoded_of(codec, x):
    return coded(codec, x.view(np.uint8), "float32", "float32", 0)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("as_array", [np.asarray, torch.from_numpy])
def test_bound_of_float64_counts_what_float32_loses(text, as_array):
    codec, rng = Codec.parse(text), np.random.default_rng(9)
    x = rng.standard_normal(3000) * 2.0 ** rng.integers(-160, -40, 3000)
    x[::256] *= 2.0**100
    x[5], x[6] = 2.0**-1074, 1e-46
    for dtype in ("float32", "float16"):
        if text == "none" and dtype == "float16":
            continue  # a wire of float32, which is no wire of float16
        decoded = codec.decode(codec.encode(x, seed=3), x.size, dtype).astype(np.float64)
        bound = codec.error_bound(as_array(x), dtype)
        assert (np.abs(decoded - x) <= bound).all()
        rounded = x.astype(np.float32)
        lost = np.abs(x - rounded.astype(np.float64))
        assert (bound == codec.error_bound(rounded, dtype) + lost).all()


def test_bound_of_float64_beyond_float32():
    x = np.array([1e300, -3.5e38, 1.1, np.nan, np.inf])
    with np.errstate(invalid="ignore"):
        for text in ("none", "bf16", "fp16"):
            bound = Codec(text).error_bound(x)
            assert np.isinf(bound[[0, 1, 4]]).all()
            assert np.isnan(bound[3])
            assert 0 < bound[2] < 0.01
    assert np.isnan(Codec("int8").error_bound(x)).all()


@pytest.mark.parametrize(
    ("text", "x", "bound"),
    [
        ("bf16", 3.0, 3 * 2**-8 + 2**-134),
        ("fp16", 3.0, 3 * 2**-11 + 2**-25),
        ("none", 3.0, 0.0),
        ("int8", 2.0**-101, 2.0**-101),
        ("int4:rounding=stochastic", 2.0**-101, 2.0**-101),
        ("fp8_e5m2", 2.0**-90, 2.0**-90),
        ("fp8_e4m3", 0.0, 0.0),
        ("int8:transform=hadamard", 0.0, 0.0),
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


@pytest.mark.parametrize("text", TEXTS)
def test_flush_to_zero_changes_no_bound(text):
    codec = Codec.parse(text)
    rng = np.random.default_rng(3)
    for kind in ("wide", "subnormal", "edge_hadamard"):
        x = drawn(rng, kind, 500, "float32").view(np.float32)
        expected = [codec.error_bound(x, dtype).tobytes() for dtype in ("float32", "float16")]
        try:
            assert torch.set_flush_denormal(True)
            bounds = [codec.error_bound(x, dtype).tobytes() for dtype in ("float32", "float16")]
        finally:
            torch.set_flush_denormal(False)
        assert bounds == expected


@pytest.mark.parametrize(("text", "expected"), [("int4", 0.0107), ("int8", 4.8e-5)])
def test_reference_points_of_the_relative_error(text, expected):
    codec = Codec.parse(text)
    x = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    decoded = codec.decode(codec.encode(x), x.size, "float32").astype(np.float64)
    error = ((decoded - x) ** 2).sum() / (x.astype(np.float64) ** 2).sum()
    digits = 4 if text == "int4" else 6
    assert round(error, digits) == expected
