"""The formats fp8_e4m3 and fp8_e5m2: what each code means, and which code a value gets."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs import oracle, single
from tests.codecs.inputs import KINDS, drawn
from zcomm import Codec

FORMATS = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
EACH = pytest.mark.parametrize("format", FORMATS)
NAN_CODES = {"fp8_e4m3": {0x7F, 0xFF}, "fp8_e5m2": {*range(0x7C, 0x80), *range(0xFC, 0x100)}}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
ONE = 0x3F80
FLOAT32_MAX = np.finfo(np.float32).max


def finite_codes(format):
    """The codes of positive finite values, in the order of their values."""
    return np.arange(oracle.FP8_LARGEST[format] + 1)


def codes_with_scale_one(kernels, codec, values):
    """The codes of values in blocks that the largest value gives the scale 1."""
    rows = np.array_split(values, -(-len(values) // (codec.block - 1)))
    blocks = [np.append(row, LARGEST[codec.format]) for row in rows]
    found = []
    for block in blocks:
        wire = single.encode(kernels, codec, block)
        assert single.scales(codec, wire, len(block)).tolist() == [ONE]
        found += single.codes(codec, wire, len(block)).tolist()[:-1]
    return found


@EACH
def test_the_oracles_table_is_that_of_another_library(format):
    theirs = np.arange(256, dtype=np.uint8).view(FORMATS[format]).astype(np.float64)
    assert np.array_equal(oracle.FP8[format], theirs, equal_nan=True)
    assert max(np.array(oracle.FP8[format])[finite_codes(format)]) == LARGEST[format]


@EACH
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 2.0**-6, 2.0**-14, 448.0]))
def test_the_oracles_codes_are_those_of_another_library(format, seed, unit):
    values = (np.random.default_rng(seed).standard_normal(50) * unit).astype(np.float32)
    table = np.array(oracle.FP8[format], np.float32)[finite_codes(format)]
    values = np.append(values, (table[1:] + table[:-1]) / 2)
    values = np.clip(values, -LARGEST[format], LARGEST[format])
    theirs = values.astype(FORMATS[format]).view(np.uint8)
    assert [oracle.fp8_code(value, format) for value in values.tolist()] == theirs.tolist()


@EACH
def test_every_code_decodes_to_its_value(any_kernels, format):
    codec = Codec(format, block=256)
    decoded = single.decode(
        any_kernels, codec, single.message(codec, np.arange(256, dtype=np.uint8), [ONE]), 256
    )
    theirs = np.arange(256, dtype=np.uint8).view(FORMATS[format]).astype(np.float32)
    theirs[np.isnan(theirs)] = np.array([0x7FC00000], np.uint32).view(np.float32)[0]
    assert decoded.tobytes() == theirs.tobytes()


@EACH
def test_every_finite_code_is_encoded_as_itself(any_kernels, format):
    codes = finite_codes(format)
    values = np.array(oracle.FP8[format])[codes]
    for sign, bit in ((1, 0), (-1, 0x80)):
        signed = np.copysign(values, sign)
        found = codes_with_scale_one(any_kernels, Codec(format, block=256), signed)
        assert found == (codes | bit).tolist()


@EACH
def test_halfway_values_go_to_the_even_code_and_others_to_the_nearer(any_kernels, format):
    codes, codec = finite_codes(format), Codec(format, block=64)
    values = np.array(oracle.FP8[format])[codes]
    halfway = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    lower, upper = codes[:-1], codes[1:]
    even = np.where(lower % 2 == 0, lower, upper)
    for sign, bit in ((1, 0), (-1, 0x80)):
        for wanted, x in (
            (even, halfway),
            (lower, np.nextafter(halfway, np.float32(0))),
            (upper, np.nextafter(halfway, np.float32(np.inf))),
        ):
            assert codes_with_scale_one(any_kernels, codec, sign * x) == (wanted | bit).tolist()


@EACH
def test_the_sign_of_what_rounds_to_zero_is_kept(any_kernels, format):
    x = np.array([0.0, -0.0, 1e-9, -1e-9, 1e-40, -1e-40, -(2.0**-17), -(2.0**-10)], np.float32)
    found = codes_with_scale_one(any_kernels, Codec(format), x)
    tiny = {"fp8_e4m3": [0x80, 0x80], "fp8_e5m2": [0x80, 0x94]}[format]
    assert found == [0, 0x80, 0, 0x80, 0, 0x80, *tiny]


@EACH
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_floats_saturate(any_kernels, format, sign):
    """The scale is rounded down there, so that code times scale stays finite."""
    codec = Codec(format, block=32)
    x = np.full(32, sign * FLOAT32_MAX)
    x[1::2] *= np.float32(0.999)
    wire = single.encode(any_kernels, codec, x)
    largest = oracle.FP8_LARGEST[format]
    assert set(single.codes(codec, wire, 32).tolist()) == {largest | (0x80 if sign < 0 else 0)}
    (scale,) = oracle.load(single.scales(codec, wire, 32).tobytes(), "bfloat16")
    above = scale * (1 + 2.0**-7)
    assert scale * LARGEST[format] < 2.0**128 <= above * LARGEST[format]
    decoded = single.decode(any_kernels, codec, wire, 32)
    assert (decoded == np.float32(sign * scale * LARGEST[format])).all()


@EACH
@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.sampled_from(["float32", "bfloat16"]))
def test_scales_are_positive_and_codes_never_nan(any_kernels, format, kind, seed, dtype):
    values = oracle.load(drawn(np.random.default_rng(seed), kind, 200, dtype), dtype)
    codec, x = Codec(format, block=32), np.array(values, np.float32)
    wire = single.encode(any_kernels, codec, x)
    assert not NAN_CODES[format].intersection(single.codes(codec, wire, 200).tolist())
    scales = single.scales(codec, wire, 200)
    assert (scales <= 0x7FC0).all()
    rows = np.array_split(x, range(32, 200, 32))
    dead = ~np.repeat([np.isfinite(row).all() for row in rows], 32)[:200]
    assert (single.codes(codec, wire, 200)[dead] == 0).all()


@EACH
@pytest.mark.parametrize("kind", ["normal", "wide", "huge", "ties"])
def test_negated_values_differ_in_the_sign_bit_alone(any_kernels, format, kind):
    codec, numel = Codec(format), 1000
    x = drawn(np.random.default_rng(5), kind, numel, "float32").view(np.float32)
    one, other = (single.encode(any_kernels, codec, sign * x) for sign in (1, -1))
    live = np.repeat(single.scales(codec, one, numel) != 0, codec.block)[:numel]
    assert live.any()
    flipped = single.codes(codec, one, numel) ^ np.where(live, 0x80, 0).astype(np.uint8)
    assert flipped.tolist() == single.codes(codec, other, numel).tolist()
    assert one[numel:].tobytes() == other[numel:].tobytes()
