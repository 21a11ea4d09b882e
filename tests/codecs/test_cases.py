"""Situations that broke comparable systems (Q1, Q3, Q9 to Q14), on codecs alone."""

import numpy as np
import pytest
import torch

from tests.codecs import oracle
from tests.codecs.inputs import drawn, memory
from zcomm import Codec
from zcomm.codecs import kernels

EXACT = ["int8", "int4", "int8:block=32", "int4:block=512"]
NEAREST = [
    *EXACT,
    "fp8_e4m3",
    "fp8_e5m2:block=64",
    "int8:transform=hadamard",
    "int4:block=64,transform=hadamard",
    "fp8_e4m3:transform=hadamard",
    "fp8_e5m2:block=512,transform=hadamard",
]
STOCHASTIC = [
    "int8:rounding=stochastic",
    "int4:block=32,rounding=stochastic",
    "int8:rounding=stochastic,transform=hadamard",
    "int4:rounding=stochastic,transform=hadamard",
]
QUANTISED = [*NEAREST, *STOCHASTIC]
W = [2, 3, 8, 41, 47, 55, 64]
SEED = 0x0123456789ABCDEF


@pytest.fixture(params=["numpy", "native"])
def chosen(request, monkeypatch):
    """One implementation of the kernels, which ``Codec`` uses too."""
    monkeypatch.setenv("ZCOMM_CODEC_BACKEND", request.param)
    return kernels()


def round_trip(codec, x, dtype=torch.float32):
    return codec.decode(codec.encode(x, seed=SEED), x.numel(), dtype)


def mean(chosen, codec, wires, numel, dtype="float32"):
    """The mean of messages, as memory of ``dtype``."""
    out = memory(numel * oracle.ITEMSIZE[dtype])
    starts, lengths = np.zeros(1, np.int64), np.array([numel])
    chosen.decode_reduce(codec, wires, starts, lengths, out, dtype, len(wires))
    return out


@pytest.mark.parametrize("text", QUANTISED)
@pytest.mark.parametrize("numel", [1, 3, 2305, 8191])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_q1_odd_sizes_and_storage_offsets(chosen, text, numel, offset):
    codec, whole = Codec.parse(text), torch.randn(numel + offset, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        x = whole.to(dtype)[offset:]
        decoded = round_trip(codec, x, dtype)
        error = (decoded.double() - x.double()).abs().numpy()
        assert (error <= codec.error_bound(x, dtype)).all()


@pytest.mark.parametrize("text", QUANTISED)
def test_q3_bfloat16_in_and_out(chosen, text):
    codec, x = Codec.parse(text), torch.randn(40, 77).to(torch.bfloat16)
    decoded = round_trip(codec, x, torch.bfloat16)
    assert decoded.dtype == torch.bfloat16
    error = (decoded.double().view(40, 77) - x.double()).abs().numpy()
    assert (error <= codec.error_bound(x, torch.bfloat16)).all()


@pytest.mark.parametrize("text", [*EXACT, "bf16", "fp16", "none"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_q9_ones_have_a_mean_of_one(chosen, text, sign):
    codec, x = Codec.parse(text), np.full(1000, sign, np.float32)
    for num_ranks in W:
        out = mean(chosen, codec, [codec.encode(x)] * num_ranks, 1000)
        assert set(oracle.load(out, "float32")) == {sign}


@pytest.mark.parametrize("text", [text for text in QUANTISED if text not in EXACT])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_q9_the_mean_of_ones_is_inside_the_bound(chosen, text, sign):
    codec, x = Codec.parse(text), np.full(1000, sign, np.float32)
    for num_ranks in W:
        wires = [codec.encode(x, seed=rank) for rank in range(num_ranks)]
        out = np.array(oracle.load(mean(chosen, codec, wires, 1000), "float32"))
        bound = codec.error_bound(x)
        sums = 2.0**-23 * num_ranks * (1 + bound)
        assert (np.abs(out - sign) <= bound + sums).all()


@pytest.mark.parametrize("text", NEAREST)
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *((dtype, "normal") for dtype in ("float32", "float16", "bfloat16")),
        *((dtype, kind) for dtype in ("float32", "bfloat16") for kind in ("wide", "tiny", "huge")),
    ],
)
def test_q9_encode_mirrors(chosen, text, dtype, kind):
    codec, numel = Codec.parse(text), 3000
    x = drawn(np.random.default_rng(4), kind, numel, dtype)
    pattern = x.view(np.uint32 if dtype == "float32" else np.uint16)
    sign = np.array(1 << (8 * pattern.itemsize - 1), pattern.dtype)
    starts, lengths, decoded = np.zeros(1, np.int64), np.array([numel]), []
    for mirrored in (pattern, pattern ^ sign):
        wire, out = memory(codec.wire_nbytes(numel)), memory(4 * numel)
        chosen.encode(codec, mirrored.view(np.uint8), dtype, starts, lengths, wire)
        chosen.decode(codec, wire, starts, lengths, out, "float32")
        decoded.append(out.view(np.float32))
    both = [has_both_extremes(codec, row) for row in blocks(oracle.load(x, dtype), codec.block)]
    usable = ~np.repeat(both, codec.block)[:numel]
    assert usable.any()
    assert np.array_equal(decoded[0][usable], -decoded[1][usable], equal_nan=True)


def blocks(values, block):
    return [values[i : i + block] for i in range(0, len(values), block)]


def has_both_extremes(codec, row):
    """Whether codes of both signs have the largest magnitude, of which one sign has no code."""
    if codec.format.startswith("fp8"):
        return False
    if codec.transform == "hadamard":
        row = oracle.hadamard(row)
    extreme = max(map(abs, row))
    return extreme > 0 and extreme in row and -extreme in row


@pytest.mark.parametrize("text", QUANTISED)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_q10_one_bad_value_on_one_rank_is_seen(chosen, text, bad):
    codec, rng = Codec.parse(text), np.random.default_rng(2)
    x = rng.standard_normal((3, 5 * codec.block + 7)).astype(np.float32)
    poisoned = np.zeros(x.shape[1], bool)
    poisoned[codec.block : 2 * codec.block] = True
    x[1, codec.block + 3] = bad
    with np.errstate(invalid="ignore"):
        wires = [codec.encode(row, seed=SEED) for row in x]
    for dtype in ("float32", "float16", "bfloat16"):
        pattern = mean(chosen, codec, wires, x.shape[1], dtype)
        values = np.array(oracle.load(pattern, dtype))
        assert np.isnan(values[poisoned]).all()
        assert np.isfinite(values[~poisoned]).all()
        bits = pattern.view(np.uint32 if dtype == "float32" else np.uint16)
        assert set(bits[poisoned].tolist()) == {oracle.NAN[dtype]}


@pytest.mark.parametrize("text", QUANTISED)
@pytest.mark.parametrize("numel", [1, 300, 5003])
def test_q11_codes_do_not_depend_on_neighbours(chosen, text, numel):
    codec, rng = Codec.parse(text), np.random.default_rng(3)
    x = rng.standard_normal(numel).astype(np.float32)
    others = [rng.standard_normal(n).astype(np.float32) * 1e6 for n in (0, 17, 4099)]
    alone = codec.decode(codec.encode(x, seed=SEED), numel, "float32")
    for position in range(4):
        parts = [*others[:position], x, *others[position:]]
        segments = [part.size for part in parts]
        wire = codec.encode(np.concatenate(parts), segments=segments, seed=SEED)
        decoded = codec.decode(wire, sum(segments), "float32", segments=segments)
        first = sum(segments[:position])
        assert decoded[first : first + numel].tobytes() == alone.tobytes()


def check_nothing_is_unwritten(chosen, text, shape):
    """All of the message and of the result is written, and nothing beside it."""
    codec, numel = Codec.parse(text), int(np.prod(shape))
    x = np.random.default_rng(7).standard_normal(shape, np.float32)
    starts, lengths = np.array([5]), np.array([numel])
    wires = [np.full(codec.wire_nbytes(numel), fill, np.uint8) for fill in (0, 255)]
    for wire in wires:
        chosen.encode(codec, x.view(np.uint8).reshape(-1), "float32", starts - 5, lengths, wire)
    assert np.array_equal(*wires)
    out = np.full(numel + 12, np.nan, np.float32)
    chosen.decode(codec, wires[0], starts, lengths, out.view(np.uint8), "float32")
    inside = out[5 : 5 + numel].reshape(shape)
    assert (np.abs(inside.astype(np.float64) - x) <= codec.error_bound(x)).all()
    assert np.isnan(out[:5]).all()
    assert np.isnan(out[5 + numel :]).all()


@pytest.mark.parametrize("text", QUANTISED)
def test_q12_nothing_is_unwritten(chosen, text):
    check_nothing_is_unwritten(chosen, text, (2, 3, 50000))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["int8", "int4:rounding=stochastic,transform=hadamard"])
def test_q12_nothing_is_unwritten_in_many_elements(chosen, text):
    check_nothing_is_unwritten(chosen, text, (8, 512, 4096))


@pytest.mark.parametrize(("text", "bits"), [("int8", 8), ("int4", 4), ("int4:block=64", 4)])
@pytest.mark.parametrize("step", [2.0**-99, 0.75, 1.9921875, 2.0**100])
def test_q13_values_on_the_grid_have_no_error(chosen, text, bits, step):
    codec, rng = Codec.parse(text), np.random.default_rng(6)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    grid = rng.integers(low, high + 1, 2003)
    grid[:: codec.block] = low
    for sign in (1, -1):
        x = (sign * step * grid).astype(np.float32)
        assert (codec.decode(codec.encode(x), x.size, "float32") == x).all()


@pytest.mark.parametrize("text", ["fp8_e4m3", "fp8_e5m2:block=64"])
@pytest.mark.parametrize("step", [2.0**-99, 0.75, 1.9921875, 2.0**100])
def test_q13_all_values_of_fp8_have_no_error(chosen, text, step):
    codec = Codec.parse(text)
    values = [value for value in oracle.FP8[codec.format] if np.isfinite(value)]
    x = np.array(values * 8, np.float64)
    x[:: codec.block] = max(values)
    for sign in (1, -1):
        scaled = (sign * step * x).astype(np.float32)
        assert (codec.decode(codec.encode(scaled), x.size, "float32") == scaled).all()


@pytest.mark.parametrize(("text", "largest"), [(STOCHASTIC[0], 127), (STOCHASTIC[1], 7)])
@pytest.mark.parametrize("step", [2.0**-99, 0.75, 1.3125, 2.0**100])
def test_q13_values_on_the_grid_are_not_rounded_at_random(chosen, text, largest, step):
    """With these steps; where x · (1/s) is not the code, one in 2^17 may be its neighbour's."""
    codec, rng = Codec.parse(text), np.random.default_rng(6)
    grid = rng.integers(-largest, largest + 1, 20003)
    grid[:: codec.block] = largest
    x = (step * grid).astype(np.float32)
    for seed in (0, SEED, 2**64 - 1):
        assert (codec.decode(codec.encode(x, seed=seed), x.size, "float32") == x).all()


@pytest.mark.parametrize(
    ("text", "extreme"),
    [
        ("int8:transform=hadamard", -32),
        ("int4:transform=hadamard", 32),
        ("int8:rounding=stochastic,transform=hadamard", -4 * 127),
        ("int4:rounding=stochastic,transform=hadamard", 28),
        ("fp8_e4m3:transform=hadamard", 28),
        ("fp8_e5m2:transform=hadamard", -28),
    ],
)
def test_q13_coefficients_on_the_grid_have_no_error(chosen, text, extreme):
    """A group of 16: the factor, 1/4, rounds nothing, nor do sums of 16 small integers."""
    coefficients = 4 * np.random.default_rng(5).integers(-1, 2, 16)
    coefficients[3] = extreme
    signs = np.array([[1 - 2 * ((i & j).bit_count() % 2) for i in range(16)] for j in range(16)])
    x = (signs @ coefficients / 4).astype(np.float32)
    codec = Codec.parse(text)
    assert (codec.decode(codec.encode(x, seed=SEED), 16, "float32") == x).all()


@pytest.mark.parametrize("text", QUANTISED)
def test_q14_large_values_stay_finite(chosen, text):
    codec, rng = Codec.parse(text), np.random.default_rng(8)
    halves = (65504 - 32 * rng.integers(0, 8, 3000)).astype(np.float16)
    halves[1::2] *= -1
    largest = (3.4028235e38 * (1 - 1e-4 * rng.random(3000))).astype(np.float32)
    if codec.transform == "hadamard":
        largest /= 64  # sums of 32 have to be finite, in both directions
    starts, lengths = np.zeros(1, np.int64), np.array([3000])
    for x in (halves, largest):
        out = memory(x.nbytes)
        chosen.decode(codec, codec.encode(x, seed=SEED), starts, lengths, out, x.dtype.name)
        decoded = out.view(x.dtype).astype(np.float64)
        assert np.isfinite(decoded).all()
        assert (np.abs(decoded - x.astype(np.float64)) <= codec.error_bound(x, x.dtype)).all()


@pytest.mark.parametrize("text", [*QUANTISED, "none"])
def test_q14_a_sum_that_overflows_is_infinite(chosen, text):
    codec, starts, lengths = Codec.parse(text), np.zeros(1, np.int64), np.array([600])
    sums = [(60000.0, "float16"), (3e38, "float32")]
    for value, dtype in sums[:1] if codec.transform == "hadamard" else sums:
        wire, out = codec.encode(np.full(600, value, np.float32), seed=SEED), memory(2400)
        chosen.decode_reduce(codec, [wire, wire], starts, lengths, out, dtype, 1)
        used = 600 * oracle.ITEMSIZE[dtype]
        assert set(oracle.load(out[:used], dtype)) == {np.inf}
