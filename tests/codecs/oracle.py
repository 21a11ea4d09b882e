"""The codec, one number at a time, written from docs/numerics.md and from nothing else.

A value is a Python float that float32 can hold, so products, sums and quotients of two of them are
exact in float64, or rounded there so finely that rounding once more to float32 is correct. Blocks
are lists. Slow on purpose: no bit trick of the kernels is repeated here.
"""

import math
import struct

BITS = {"int8": 8, "int4": 4}
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
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


def scale_of(values, bits):
    """The scale of a block as a float: 0 where it is flushed, infinite or NaN as its values."""
    if any(math.isnan(value) for value in values):
        return math.nan
    extreme = max(values, key=lambda value: (abs(value), value < 0))
    scale = extreme * -(2.0 ** (1 - bits))
    if math.isinf(scale):
        return scale
    mantissa, exponent = math.frexp(abs(scale))
    size = math.ldexp(math.ceil(mantissa * 256), exponent - 8)
    if size * 2.0 ** (bits - 1) >= 2.0**128:
        size = math.ldexp(math.floor(mantissa * 256), exponent - 8)
    return 0.0 if size < 2.0**-100 else math.copysign(size, scale)


def codes_of(values, scale, bits):
    if scale == 0 or not math.isfinite(scale):
        return [0] * len(values)
    inverse = float32(1 / scale)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return [round(max(low, min(high, float32(value * inverse)))) for value in values]


def encode(format, block, segments):
    """The message of lists of values."""
    if format in CAST:
        return b"".join(store(values, CAST[format]) for values in segments)
    bits, codes, scales = BITS[format], b"", b""
    for values in segments:
        for row in _rows(values, block):
            scale = scale_of(row, bits)
            codes += _packed(codes_of(row, scale, bits), bits)
            scales += store([scale], "bfloat16")
    return _padded(codes) + _padded(scales)


def decode(format, block, wire, lengths):
    """The values of a message, a list for every segment."""
    if format in CAST:
        values = iter(load(wire, CAST[format]))
        return [[next(values) for _ in range(length)] for length in lengths]
    bits = BITS[format]
    rows = [len(row) for length in lengths for row in _rows(range(length), block)]
    sizes = [n if bits == 8 else (n + 1) // 2 for n in rows]
    start = -(-sum(sizes) // 16) * 16
    scales = load(bytes(wire)[start : start + 2 * len(rows)], "bfloat16")
    at, decoded = 0, []
    for n, size, scale in zip(rows, sizes, scales, strict=True):
        codes = _unpacked(bytes(wire)[at : at + size], n, bits)
        usable = scale if math.isfinite(scale) else math.nan
        decoded += [float32(code * usable) for code in codes]
        at += size
    values = iter(decoded)
    return [[next(values) for _ in range(length)] for length in lengths]


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


def _packed(codes, bits):
    if bits == 8:
        return bytes(code % 256 for code in codes)
    half = (len(codes) + 1) // 2
    high = [*codes[half:], 0][:half]
    return bytes(a % 16 + 16 * (b % 16) for a, b in zip(codes[:half], high, strict=True))


def _unpacked(packed, numel, bits):
    if bits == 8:
        return [byte - 256 * (byte > 127) for byte in packed]
    nibbles = [byte % 16 for byte in packed] + [byte // 16 for byte in packed]
    return [nibble - 16 * (nibble > 7) for nibble in nibbles][:numel]


def _padded(data):
    return data + bytes(-len(data) % 16)
