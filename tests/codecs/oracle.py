"""The codec, one number at a time, written from docs/numerics.md and from nothing else.

A value is a Python float that float32 can hold, so products, sums and quotients of two of them are
exact in float64, or rounded there so finely that rounding once more to float32 is correct. Blocks
are lists, a codec is anything with ``format``, ``block``, ``rounding`` and ``transform``. Slow on
purpose: no bit trick of the kernels is repeated here.
"""

import bisect
import functools
import math
import struct
from fractions import Fraction

BITS = {"int8": 8, "int4": 4, "fp8_e4m3": 8, "fp8_e5m2": 8}
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
WEYL = (0x9E3779B9, 0xBB67AE85)
CAST = {"none": "float32", "bf16": "bfloat16", "fp16": "float16"}
NAN = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}


def float32(value):
    """Round a float64 to float32, half to even."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def pattern32(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def value32(pattern):
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


def load(memory, dtype):
    """The values in memory that holds ``dtype``."""
    memory = bytes(memory)
    if dtype == "bfloat16":
        halves = struct.unpack(f"<{len(memory) // 2}H", memory)
        return [value32(half << 16) for half in halves]
    letter, size = ("f", 4) if dtype == "float32" else ("e", 2)
    return list(struct.unpack(f"<{len(memory) // size}{letter}", memory))


def store(values, dtype, *, saturate=False):
    """The bytes of values rounded once to ``dtype``."""
    return b"".join(_store(value, dtype, saturate) for value in values)


def _store(value, dtype, saturate):
    size = ITEMSIZE[dtype]
    if math.isnan(value):
        return NAN[dtype].to_bytes(size, "little")
    if dtype == "float32":
        return struct.pack("<f", value)
    if dtype == "bfloat16":
        return _nearest_bfloat16(value).to_bytes(2, "little")
    if saturate and math.isfinite(value):
        value = max(-65504.0, min(65504.0, value))
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", math.copysign(math.inf, value))


def _nearest_bfloat16(value):
    """The nearer of the two neighbours, the even one in a tie."""
    if math.isinf(value):
        return pattern32(value) >> 16
    sign, size = pattern32(value) >> 31 << 15, abs(value)
    below = pattern32(size) >> 16
    above = below + 1
    low = value32(below << 16)
    high = 2.0**128 if above == 0x7F80 else value32(above << 16)
    down, up = size - low, high - size
    return sign | (above if up < down or (up == down and above % 2 == 0) else below)


def fp8_value(code, format):
    """The value of a code by the OCP definition of the format."""
    exponent_bits, bias = (4, 7) if format == "fp8_e4m3" else (5, 15)
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if code >= 128 else 1.0
    exponent, mantissa = divmod(code % 128, 2**mantissa_bits)
    if format == "fp8_e4m3" and code % 128 == 127:
        return math.nan
    if format == "fp8_e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


FP8 = {name: [fp8_value(code, name) for code in range(256)] for name in BITS if "fp8" in name}
FP8_LARGEST = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}
FP8_EXACT = {name: list(map(Fraction, FP8[name][: FP8_LARGEST[name] + 1])) for name in FP8}


def fp8_code(value, format):
    """The code nearest to a finite value, the even one in a tie, the largest beyond the range."""
    sign, size, exact = 128 * (math.copysign(1, value) < 0), Fraction(abs(value)), FP8_EXACT[format]
    above = bisect.bisect_left(exact, size)
    if above == len(exact):
        return sign + FP8_LARGEST[format]
    neighbours = (max(above - 1, 0), above)
    return sign + min(neighbours, key=lambda code: (abs(size - exact[code]), code % 2))


@functools.lru_cache(8)
def philox(counter, key):
    """Philox4x32-10 (Salmon et al., SC 2011) of four counter words and two key words."""
    a, b, c, d = counter
    for i in range(10):
        first, second = [(k + i * w) % 2**32 for k, w in zip(key, WEYL, strict=True)]
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            right // 2**32 ^ b ^ first,
            right % 2**32,
            left // 2**32 ^ d ^ second,
            left % 2**32,
        )
    return a, b, c, d


def uniform(index, seed):
    """The random number of the element ``index`` of a segment, above 0 and below 1."""
    high, low = divmod(index // 4, 2**32)
    word = philox((low, high, 0, 0), (seed % 2**32, seed // 2**32))[index % 4]
    return (2 * (word // 2**9) + 1) * 2.0**-24


def hadamard(values):
    """A segment with its groups of 32 transformed; of a shorter tail the first power of two."""
    transformed = []
    for group in _rows(values, 32):
        size = 2 ** (len(group).bit_length() - 1)
        transformed += _butterflies(group[:size]) + group[size:]
    return transformed


def _butterflies(values):
    values = [0.0 if abs(value) < 2.0**-102 else value for value in values]
    distance = 1
    while distance < len(values):
        values = [
            float32(values[i - distance] - values[i])
            if i // distance % 2
            else float32(values[i] + values[i + distance])
            for i in range(len(values))
        ]
        distance *= 2
    factor = float32(len(values) ** -0.5)
    return [float32(value * factor) for value in values]


def largest_code(codec):
    """What a positive extreme is divided by to give the scale."""
    if codec.format in FP8:
        return FP8[codec.format][FP8_LARGEST[codec.format]]
    half = 2.0 ** (BITS[codec.format] - 1)
    return half - 1 if codec.rounding == "stochastic" else -half


def scale_of(values, codec):
    """The scale of a block as a float: 0 where it is flushed, infinite or NaN as its values."""
    if any(math.isnan(value) for value in values):
        return math.nan
    extreme = max(values, key=lambda value: (abs(value), value < 0))
    largest = largest_code(codec)
    exact = float32((extreme if largest < 0 else abs(extreme)) / largest)
    if math.isinf(exact):
        return exact
    mantissa, exponent = math.frexp(abs(exact))
    size = math.ldexp(math.ceil(mantissa * 256), exponent - 8)
    if size * abs(largest) >= 2.0**128:
        size = math.ldexp(math.floor(mantissa * 256), exponent - 8)
    return 0.0 if size < 2.0**-100 else math.copysign(size, exact)


def codes_of(values, scale, codec, first=0, seed=0):
    """The codes of a block whose first element is element ``first`` of its segment."""
    if scale == 0 or not math.isfinite(scale):
        return [0] * len(values)
    inverse = float32(1 / scale)
    scaled = [float32(value * inverse) for value in values]
    if codec.format in FP8:
        return [fp8_code(value, codec.format) for value in scaled]
    half = 2 ** (BITS[codec.format] - 1)
    if codec.rounding == "nearest":
        return [round(max(-half, min(half - 1, value))) for value in scaled]
    rounded = [_drawn(value, uniform(first + i, seed)) for i, value in enumerate(scaled)]
    return [max(1 - half, min(half - 1, code)) for code in rounded]


def _drawn(value, u):
    below = math.floor(value)
    return below + (u < float32(value - below))


def encode(codec, segments, seed=0):
    """The message of lists of values."""
    if codec.format in CAST:
        return b"".join(store(values, CAST[codec.format]) for values in segments)
    bits, codes, scales = BITS[codec.format], b"", b""
    for values in segments:
        coefficients = hadamard(values) if codec.transform == "hadamard" else values
        for i, row in enumerate(_rows(coefficients, codec.block)):
            scale = scale_of(row, codec)
            codes += packed(codes_of(row, scale, codec, i * codec.block, seed), bits)
            scales += store([scale], "bfloat16")
    return padded(codes) + padded(scales)


def decode(codec, wire, lengths):
    """The values of a message, a list for every segment."""
    if codec.format in CAST:
        return _split(load(wire, CAST[codec.format]), lengths)
    bits = BITS[codec.format]
    rows = [len(row) for length in lengths for row in _rows(range(length), codec.block)]
    sizes = [n if bits == 8 else (n + 1) // 2 for n in rows]
    start = -(-sum(sizes) // 16) * 16
    scales = load(bytes(wire)[start : start + 2 * len(rows)], "bfloat16")
    at, decoded = 0, []
    for n, size, scale in zip(rows, sizes, scales, strict=True):
        codes = values_of(bytes(wire)[at : at + size], n, codec.format)
        usable = scale if math.isfinite(scale) else math.nan
        decoded += [float32(code * usable) for code in codes]
        at += size
    segments = _split(decoded, lengths)
    return [hadamard(each) for each in segments] if codec.transform == "hadamard" else segments


def _split(values, lengths):
    values = iter(values)
    return [[next(values) for _ in range(length)] for length in lengths]


def values_of(packed, numel, format):
    if format in FP8:
        return [FP8[format][code] for code in packed]
    return unpacked(packed, numel, BITS[format])


def reduced(messages, divisor=1):
    """The float32 sums of decoded messages, in the order given, divided at the end."""
    total = messages[0]
    for message in messages[1:]:
        total = [
            [float32(a + b) for a, b in zip(mine, other, strict=True)]
            for mine, other in zip(total, message, strict=True)
        ]
    if divisor == 1:
        return total
    return [[float32(value / float32(divisor)) for value in values] for values in total]


def _rows(values, block):
    return [values[i : i + block] for i in range(0, len(values), block)]


def packed(codes, bits):
    if bits == 8:
        return bytes(code % 256 for code in codes)
    half = (len(codes) + 1) // 2
    high = [*codes[half:], 0][:half]
    return bytes(a % 16 + 16 * (b % 16) for a, b in zip(codes[:half], high, strict=True))


def unpacked(packed, numel, bits):
    if bits == 8:
        return [byte - 256 * (byte > 127) for byte in packed]
    nibbles = [byte % 16 for byte in packed] + [byte // 16 for byte in packed]
    return [nibble - 16 * (nibble > 7) for nibble in nibbles][:numel]


def padded(data):
    return data + bytes(-len(data) % 16)
