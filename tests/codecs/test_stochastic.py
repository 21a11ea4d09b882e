"""Stochastic rounding: which random number an element gets, and what the rounding is on average.

Seeds are fixed, so a statistical test passes always or never; its limit is five standard deviations
of what exact arithmetic predicts. *Fraction*: how far a value lies above a code, in steps.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs import oracle, single
from zcomm import Codec
from zcomm.codecs import philox

FORMATS = ["int8", "int4"]
SEEDS = [0, 1, 2, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
LARGEST = {"int8": 127, "int4": 7}
LIMIT = 5
ONES = 2**32 - 1
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(counter, key, words):
    """The known answers for philox4x32 of ten rounds that Random123 is distributed with."""
    assert oracle.philox(counter, key) == words
    arrays = philox.philox4x32(tuple(np.array([word], np.uint32) for word in counter), key)
    assert [array.tolist() for array in arrays] == [[word] for word in words]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", [0, 4, 2**32 - 8, 2**34 - 8, 2**34, 2**40 + 4, 2**63])
def test_random_numbers_where_the_counter_needs_two_words(seed, first):
    wanted = [oracle.uniform(first + i, seed) for i in range(19)]
    assert philox.uniform(seed, first, 19).tolist() == wanted


def test_the_random_number_of_an_element_by_hand():
    seed, index = 0x299F31D0A4093822, 4 * (2**32 * 0x85A308D3 + 0x243F6A88) + 2
    word = oracle.philox((0x243F6A88, 0x85A308D3, 0, 0), (0xA4093822, 0x299F31D0))[2]
    assert oracle.uniform(index, seed) == (2 * (word >> 9) + 1) / 2**24


def middle_values(codec, fractions):
    """Values at given fractions above random codes; the extremes of blocks give them scale 1."""
    largest = LARGEST[codec.format]
    whole = np.random.default_rng(1).integers(-largest, largest, len(fractions))
    x = (whole + fractions).astype(np.float32)
    x[:: codec.block] = largest
    return x


def rounded_up(kernels, codec, fractions, seed):
    """Whether each element was rounded up; the first of a block is the extreme and is not."""
    x = middle_values(codec, fractions)
    codes = single.codes(codec, single.encode(kernels, codec, x, seed), len(x))
    return codes > np.floor(x)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("format", FORMATS)
def test_an_element_is_rounded_up_where_its_number_is_below_its_fraction(any_kernels, format, seed):
    codec, numel = Codec(format, block=32, rounding="stochastic"), 333
    numbers = np.array([oracle.uniform(i, seed) for i in range(numel)])
    steps = np.where(np.arange(numel) % 2, 2.0**-24, -(2.0**-24)) * 2.0**8
    coarse = np.round(numbers * 2**16) / 2**16
    for fractions in (coarse + steps, coarse - steps, np.full(numel, 0.5)):
        fractions = np.clip(fractions, 0, 1 - 2.0**-12)
        found = rounded_up(any_kernels, codec, fractions, seed)
        exact = middle_values(codec, fractions)
        exact = exact - np.floor(exact)
        assert found.tolist() == (numbers < exact).tolist()


@pytest.mark.parametrize("format", FORMATS)
def test_a_fraction_equal_to_the_number_is_rounded_down(any_kernels, format):
    codec, numel = Codec(format, block=32, rounding="stochastic"), 320
    for seed in SEEDS:
        numbers = np.array([oracle.uniform(i, seed) for i in range(numel)], np.float32)
        for x, up in ((numbers, 0), (np.nextafter(numbers, np.float32(2)), 1)):
            x[::32] = LARGEST[format]
            codes = encoded_codes(any_kernels, codec, x, seed).reshape(-1, 32)
            assert set(codes[:, 1:].flat) == {up}


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
@pytest.mark.parametrize("text", ["int8:rounding=stochastic", "int4:rounding=stochastic"])
def test_numbers_count_from_the_start_of_a_segment(any_kernels, text, seed):
    """Equal segments get equal codes, at any place of a message."""
    codec, rng = Codec.parse(text), np.random.default_rng(0)
    x = rng.standard_normal(517).astype(np.float32)
    lengths = np.array([517, 3, 517, 517])
    starts, others = np.array([0, 517, 0, 520]), rng.standard_normal(3).astype(np.float32)
    values = np.concatenate([x, others, x]).view(np.uint8)
    wire = np.zeros(codec.wire_nbytes(int(lengths.sum()), segments=lengths.tolist()), np.uint8)
    any_kernels.encode(codec, values, "float32", starts, lengths, wire, seed)
    alone = single.encode(any_kernels, codec, x, seed)
    nbytes = len(alone[: -(-517 * codec.bits // 8)])
    first = wire[:nbytes].tobytes()
    assert first == alone[:nbytes].tobytes()
    between = 3 if codec.bits == 8 else 2
    for start in (nbytes + between, 2 * nbytes + between):
        assert wire[start : start + nbytes].tobytes() == first


@pytest.mark.parametrize("step", [2.0**-100, 2.0**-7, 1.0, 2.0**100])
@pytest.mark.parametrize("format", FORMATS)
def test_values_on_the_grid_have_no_error(any_kernels, format, step):
    """Where the step is a power of two; beside others x · (1/s) may miss its code by a rounding."""
    codec, largest = Codec(format, rounding="stochastic"), LARGEST[format]
    grid = np.random.default_rng(6).integers(-largest, largest + 1, 1003)
    grid[:: codec.block] = largest
    x = (step * grid).astype(np.float32)
    for seed in SEEDS:
        assert single.round_trip(any_kernels, codec, x, seed).tobytes() == (x + 0).tobytes()


@pytest.mark.parametrize("format", FORMATS)
@given(seed=st.integers(0, 2**64 - 1), number=st.integers(0, 2**32 - 1))
def test_the_lowest_code_is_never_used_and_no_value_moves_a_whole_step(
    any_kernels, format, seed, number
):
    codec = Codec(format, block=64, rounding="stochastic")
    x = np.random.default_rng(number).standard_normal(200).astype(np.float32)
    wire = single.encode(any_kernels, codec, x, seed)
    codes = single.codes(codec, wire, 200)
    assert np.abs(codes.astype(int)).max() <= LARGEST[format]
    scales = oracle.load(single.scales(codec, wire, 200).tobytes(), "bfloat16")
    steps = np.repeat(scales, 64)[:200]
    assert (steps > 0).all()
    assert (np.abs(codes * steps - x) < steps * (1 + 2.0**-16)).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_floats_take_the_largest_code(any_kernels, format, sign):
    """Their scale is rounded down, so they lie beyond that code, by up to 2 percent of a step."""
    codec = Codec(format, block=4096, rounding="stochastic")
    x = np.full(4096, sign * np.finfo(np.float32).max)
    for seed in SEEDS:
        assert set(encoded_codes(any_kernels, codec, x, seed)) == {sign * LARGEST[format]}
        assert np.isfinite(single.round_trip(any_kernels, codec, x, seed)).all()


def deviations(errors, variances):
    """Sums of errors in units of their standard deviation."""
    return errors.sum() / np.sqrt(variances.sum())


def bias_by_fraction(kernels, codec, x, seeds):
    """How far off the mean is, in standard deviations, for elements of similar fraction."""
    codes = np.stack([encoded_codes(kernels, codec, x, seed) for seed in seeds])
    wire = single.encode(kernels, codec, x)
    scales = oracle.load(single.scales(codec, wire, len(x)).tobytes(), "bfloat16")
    exact = x.astype(np.float64) / np.repeat(scales, codec.block)[: len(x)]
    fraction = exact - np.floor(exact)
    errors, variances = (codes - exact).sum(axis=0), len(seeds) * fraction * (1 - fraction)
    bins = (16 * fraction).astype(int)
    return [deviations(errors[bins == i], variances[bins == i]) for i in range(16)]


def encoded_codes(kernels, codec, x, seed):
    return single.codes(codec, single.encode(kernels, codec, x, seed), len(x))


@pytest.mark.parametrize("text", ["int8", "int4", "int4:block=32"])
def test_the_mean_of_codes_is_the_value(any_kernels, text):
    codec = Codec.parse(f"{text}{',' if ':' in text else ':'}rounding=stochastic")
    x = np.random.default_rng(2).standard_normal(1 << 13).astype(np.float32)
    seeds = [*range(60), *(2**32 * i + 5 for i in range(1, 5))]
    bias = bias_by_fraction(any_kernels, codec, x, seeds)
    assert max(map(abs, bias)) < LIMIT


def test_the_statistic_sees_a_bias(any_kernels):
    x = np.random.default_rng(2).standard_normal(1 << 13).astype(np.float32)
    codec = Codec("int8", rounding="stochastic")
    bias = bias_by_fraction(any_kernels, codec, x, [0] * 64)
    assert max(map(abs, bias)) > LIMIT, "64 times the same seed is no 64 draws"
    assert max(map(abs, bias_by_fraction(any_kernels, codec, x, range(64)))) < LIMIT


@pytest.mark.parametrize("format", FORMATS)
def test_the_mean_of_decoded_values_is_the_value_through_hadamard(any_kernels, format):
    """Each element's error is a signed sum of its group's 32, so it has their mean variance."""
    codec, seeds = Codec(format, rounding="stochastic", transform="hadamard"), range(256)
    x = np.random.default_rng(3).standard_normal(1 << 12).astype(np.float32)
    wire = single.encode(any_kernels, codec, x)
    coefficients = np.array(oracle.hadamard(x.tolist()))
    scales = oracle.load(single.scales(codec, wire, len(x)).tobytes(), "bfloat16")
    steps = np.repeat(scales, codec.block)[: len(x)]
    fraction = coefficients / steps - np.floor(coefficients / steps)
    of_group = (steps**2 * fraction * (1 - fraction)).reshape(-1, 32).mean(axis=1)
    decoded = [single.round_trip(any_kernels, codec, x, seed) for seed in seeds]
    errors = np.mean(decoded, axis=0, dtype=np.float64) - x
    scores = errors / np.sqrt(np.repeat(of_group, 32) / len(seeds))
    assert np.abs(scores).max() < LIMIT
    assert abs(scores.sum()) < LIMIT * np.sqrt(len(x))
    assert abs((scores**2).mean() - 1) < LIMIT * np.sqrt(2 / len(x))


@pytest.mark.parametrize("format", FORMATS)
def test_draws_of_different_elements_and_seeds_do_not_correlate(any_kernels, format):
    codec, numel = Codec(format, block=4096, rounding="stochastic"), 4096
    seeds = [*range(32), *(2**k for k in range(5, 64)), 2**64 - 1]
    half = np.full(numel, 0.5)
    up = np.stack([rounded_up(any_kernels, codec, half, seed)[1:] for seed in seeds])
    signs = 2.0 * up - 1
    limit = LIMIT * np.sqrt(signs.size)
    for lag in (1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 128, 256, 512, 1024):
        assert abs((signs[:, lag:] * signs[:, :-lag]).sum()) < limit, f"elements {lag} apart"
    between = signs @ signs.T
    np.fill_diagonal(between, 0)
    assert np.abs(between).max() < LIMIT * np.sqrt(signs.shape[1])
    assert abs(signs.sum()) < limit
