"""The option transform=hadamard: groups, tails, exactness, and what a bad value does.

The matrix used here, entry (i, j) the sign of popcount(i & j), knows no butterflies. Small integers
pass the transform without rounding but for the last multiplication, so decoded bits are predicted.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs import oracle, single
from zcomm import Codec

FORMATS = ["int8", "int4", "fp8_e4m3", "fp8_e5m2"]
EACH = pytest.mark.parametrize("format", FORMATS)
ONE = 0x3F80
FLOAT32_MAX = np.finfo(np.float32).max


def sylvester(size):
    indices = np.arange(size)
    return np.array([[(-1) ** int(i & j).bit_count() for j in indices] for i in indices])


def transformed(whole):
    """The float32 transform of one segment of small integers, exact but for one rounding."""
    result = np.array(whole, np.float64)
    for first in range(0, len(whole), 32):
        size = 2 ** (min(32, len(whole) - first).bit_length() - 1)
        group = slice(first, first + size)
        factor = float(np.float32(size**-0.5))
        result[group] = (sylvester(size) @ np.array(whole)[group]) * factor
    return result.astype(np.float32)


def small_codes(rng, codec, numel):
    """Random codes with small integers as values, and these values."""
    if "fp8" not in codec.format:
        high = 2 ** (codec.bits - 1)
        codes = rng.integers(-high, high, numel)
        return codes, codes
    table = np.array(oracle.FP8[codec.format])
    whole = np.flatnonzero((table == np.floor(table)) & (np.abs(table) <= 448))
    codes = rng.choice(whole[whole != 0x80], numel)
    return codes, table[codes].astype(int)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=70))
def test_the_oracle_is_the_matrix(values):
    exact = np.array(values)
    for first in range(0, len(values), 32):
        size = 2 ** (min(32, len(values) - first).bit_length() - 1)
        group = slice(first, first + size)
        exact[group] = sylvester(size) @ exact[group] / np.sqrt(size)
    largest = np.abs(values).max()
    assert np.abs(np.array(oracle.hadamard(values)) - exact).max() <= 2.0**-18 * largest + 2.0**-99


@EACH
def test_integers_decode_to_the_matrix_times_them(any_kernels, format):
    codec = Codec(format, block=128, transform="hadamard")
    for numel in (*range(1, 71), 95, 127, 128, 129, 160, 1000):
        codes, whole = small_codes(np.random.default_rng(numel), codec, numel)
        wire = single.message(codec, codes, [ONE] * -(-numel // 128))
        found = single.decode(any_kernels, codec, wire, numel)
        assert found.tobytes() == transformed(whole).tobytes(), numel


@pytest.mark.parametrize(
    "text", [*FORMATS, "int8:block=32", "int4:rounding=stochastic", "int8:rounding=stochastic"]
)
def test_integers_are_encoded_as_the_matrix_times_them(any_kernels, text):
    plain = Codec.parse(text)
    codec = dataclasses.replace(plain, transform="hadamard")
    for numel in (*range(1, 71), 1000):
        whole = np.random.default_rng(numel).integers(-1000, 1000, numel)
        wire = single.encode(any_kernels, codec, whole, 5)
        wanted = single.encode(any_kernels, plain, transformed(whole), 5)
        assert wire.tobytes() == wanted.tobytes(), numel


@EACH
def test_a_single_value_spreads_with_the_signs_of_its_row(any_kernels, format):
    codec = Codec(format, block=32, transform="hadamard")
    for position, row in enumerate(sylvester(32)):
        wire = single.encode(any_kernels, codec, 3.0 * (np.arange(32) == position))
        (scale,) = oracle.load(single.scales(codec, wire, 32).tobytes(), "bfloat16")
        values = np.array(oracle.values_of(wire.tobytes()[: 4 * codec.bits], 32, format)) * scale
        assert np.sign(values).tolist() == row.tolist()
        assert np.allclose(np.abs(values), 3 * 32**-0.5, rtol=2**-3, atol=0)


@EACH
def test_every_segment_starts_a_group(any_kernels, format):
    codec, lengths = Codec(format, block=64, transform="hadamard"), np.array([33, 5, 64, 100, 1])
    rng, starts = np.random.default_rng(1), np.cumsum(lengths) - lengths
    segments = [rng.standard_normal(n).astype(np.float32) for n in lengths]
    wire = np.zeros(codec.wire_nbytes(int(lengths.sum()), segments=lengths.tolist()), np.uint8)
    values = np.concatenate(segments).view(np.uint8)
    any_kernels.encode(codec, values, "float32", starts, lengths, wire, 0)
    out = np.zeros(values.size, np.uint8)
    any_kernels.decode(codec, wire, starts, lengths, out, "float32")
    alone = [single.round_trip(any_kernels, codec, each) for each in segments]
    assert out.tobytes() == np.concatenate(alone).tobytes()


@EACH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [64, 97, 127])
def test_a_bad_value_makes_its_block_nan_and_no_other(any_kernels, format, bad, position):
    codec = Codec(format, block=64, transform="hadamard")
    x = np.random.default_rng(2).standard_normal(200).astype(np.float32)
    sound = single.round_trip(any_kernels, codec, x)
    x[position] = bad
    wire = single.encode(any_kernels, codec, x)
    assert (single.codes(codec, wire, 200)[64:128] == 0).all()
    found = single.decode(any_kernels, codec, wire, 200)
    assert set(found[64:128].view(np.uint32).tolist()) == {0x7FC00000}
    others = np.r_[:64, 128:200]
    assert found[others].tobytes() == sound[others].tobytes()


@EACH
def test_an_overflow_of_the_transform_is_seen(any_kernels, format):
    codec = Codec(format, block=32, transform="hadamard")
    x = np.full(96, FLOAT32_MAX)
    x[32:64] *= np.where(np.arange(32) % 3, 1, -1)
    x[64:] /= np.float32(40)
    found = single.round_trip(any_kernels, codec, x)
    assert np.isnan(found[:64]).all()
    assert np.isfinite(found[64:]).all()


@EACH
def test_only_what_is_transformed_of_a_tail_can_overflow(any_kernels, format):
    codec = Codec(format, block=32, transform="hadamard")
    for numel, finite in ((1, True), (2, False), (3, False)):
        found = single.round_trip(any_kernels, codec, np.full(numel, FLOAT32_MAX))
        assert np.isfinite(found).all() == finite
    x = np.array([1.0, 1.0, FLOAT32_MAX])
    assert np.isfinite(single.round_trip(any_kernels, codec, x)).all()
