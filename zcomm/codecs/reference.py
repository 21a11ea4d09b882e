"""The kernels in NumPy: the definition of the codec in code, block by block.

Written to be read next to docs/numerics.md; ``native`` gives the same bits faster. *Values* are
float32 throughout, a *row* is a block. NaN is written in one form only, by a select. Do not assume
that a sum of subnormal numbers comes out as documented while the processor is set to flush them to
zero: this module uses NumPy's arithmetic, which obeys that setting; ``native`` undoes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .codec import Codec
from .wire import (
    CAST_DTYPE,
    ITEMSIZE,
    Bytes,
    Lengths,
    Message,
    check_decode,
    check_encode,
    check_out,
    check_wires,
)

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]
Scales = npt.NDArray[np.uint16]

NAN_FLOAT32, NAN_BFLOAT16, NAN_FLOAT16 = 0x7FC00000, 0x7FC0, 0x7E00
INFINITY_BITS = 0x7F800000
SIGN_BIT = 0x80000000
LARGEST_ROUNDED_UP = 0x7F7F0000
FLUSHED_BELOW = (127 - 100) << 23  # 2^-100
FLOAT16_MAX = np.float32(65504)


def encode(
    codec: Codec, x: Bytes, dtype: str, starts: Lengths, lengths: Lengths, out: Bytes
) -> None:
    """Write to ``out`` the message of the segments of ``x``; every byte of it is written.

    Raises:
        ValueError: segments leave the memory, or ``out`` is not exactly as long as the message.
    """
    message = check_encode(codec, x, dtype, starts, lengths, out)
    memory = typed(x, dtype)
    segments = (
        to_float32(memory[start : start + length], dtype)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    )
    _write(codec, segments, message, out)


def decode(
    codec: Codec, wire: Bytes, starts: Lengths, lengths: Lengths, out: Bytes, dtype: str
) -> None:
    """Write to the segments of ``out`` the values of a message; the rest of it stays untouched.

    A finite value beyond the range of float16 is stored as its largest finite value.

    Raises:
        ValueError: segments leave the memory, or ``wire`` has a wrong length.
        CodecError: padding of the message is not zero.
    """
    message = check_decode(codec, [wire], starts, lengths, out, dtype)
    memory = typed(out, dtype)
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        values = _read(codec, wire, message, i, length)
        memory[start : start + length] = from_float32(values, dtype, saturate=True)


def decode_reduce(
    codec: Codec,
    wires: list[Bytes],
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
    dtype: str,
    divisor: int,
) -> None:
    """Write to the segments of ``out`` the sum of ``wires``, divided by ``divisor``.

    Sums are float32, in the order given, starting as the first; one division, one rounding to
    ``dtype`` at the end. A sum beyond the range of ``dtype`` becomes infinite.

    Raises:
        ValueError: segments leave the memory, a wire has a wrong length, or ``divisor`` < 1.
        CodecError: padding of a message is not zero.
    """
    message = check_decode(codec, wires, starts, lengths, out, dtype, divisor)
    memory = typed(out, dtype)
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        total = _sum(codec, wires, message, i, length)
        if divisor > 1:
            with np.errstate(all="ignore"):
                total = total / np.float32(divisor)
        memory[start : start + length] = from_float32(total, dtype, saturate=False)


def decode_reduce_encode(
    codec_in: Codec, wires: list[Bytes], codec_out: Codec, lengths: Lengths, out: Bytes
) -> None:
    """Write to ``out`` the message, in ``codec_out``, of the float32 sum of ``wires``.

    Raises:
        ValueError: a wire or ``out`` has a wrong length.
        CodecError: padding of a message is not zero.
    """
    message_in = check_wires(codec_in, wires, lengths)
    message_out = check_out(codec_out, lengths, out)
    segments = (
        _sum(codec_in, wires, message_in, i, length) for i, length in enumerate(lengths.tolist())
    )
    _write(codec_out, segments, message_out, out)


def encode_rows(rows: Floats, bits: int) -> tuple[Codes, Scales]:
    """Return the codes, of the shape of ``rows``, and the scales (bfloat16 bits) of blocks.

    ``rows`` is (blocks, elements), with at least one element in a block.
    """
    with np.errstate(all="ignore"):
        scales, live = _scales(rows, bits)
        inverse = np.where(live, np.float32(1) / from_bfloat16(scales), np.float32(0))
        scaled = np.where(live[:, None], rows * inverse[:, None], np.float32(0))
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return np.rint(np.clip(scaled, low, high)).astype(np.int8), scales


def _scales(rows: Floats, bits: int) -> tuple[Scales, npt.NDArray[np.bool_]]:
    """Return the scale of every row, and whether its codes are not all zero by rule."""
    pattern = rows.view(np.uint32)
    key = ((pattern << 1) | (pattern >> 31)).max(axis=1)
    extreme = (key >> 1) | (key << 31)
    scale = extreme.view(np.float32) * np.float32(-1 / (1 << (bits - 1)))
    up, magnitude = scale.view(np.uint32), extreme & ~np.uint32(SIGN_BIT)
    rounded = np.where(magnitude > LARGEST_ROUNDED_UP, up, up + np.uint32(0xFFFF))
    result = (rounded >> 16).astype(np.uint16)
    size = (rounded & ~np.uint32(SIGN_BIT)) & np.uint32(0xFFFF0000)
    result[size < FLUSHED_BELOW] = 0
    result[magnitude > INFINITY_BITS] = NAN_BFLOAT16
    return result, (size >= FLUSHED_BELOW) & (magnitude < INFINITY_BITS)


def _write(codec: Codec, segments: Iterator[Floats], message: Message, out: Bytes) -> None:
    out[int(message.codes[-1]) : int(message.scales[0])] = 0
    out[int(message.scales[-1]) : message.nbytes] = 0
    for i, values in enumerate(segments):
        codes = out[message.codes[i] : message.codes[i + 1]]
        if codec.quantised:
            scales = out[message.scales[i] : message.scales[i + 1]]
            _encode_segment(codec, values, codes, scales)
        else:
            dtype = CAST_DTYPE[codec.format]
            typed(codes, dtype)[:] = from_float32(values, dtype, saturate=False)


def _encode_segment(codec: Codec, values: Floats, codes: Bytes, scales: Bytes) -> None:
    code, scale = 0, 0
    for rows in blocks(codec, values):
        quantised, row_scales = encode_rows(rows, codec.bits)
        packed = _pack(quantised, codec.bits)
        codes[code : code + packed.size] = packed.reshape(-1)
        scales[scale : scale + row_scales.nbytes] = row_scales.view(np.uint8)
        code, scale = code + packed.size, scale + row_scales.nbytes


def blocks(codec: Codec, values: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yield the full blocks as one 2-D array, then the short last block as another."""
    full = len(values) // codec.block * codec.block
    if full:
        yield values[:full].reshape(-1, codec.block)
    if full < len(values):
        yield values[full:].reshape(1, -1)


def _pack(codes: Codes, bits: int) -> Bytes:
    pattern: Bytes = codes.view(np.uint8)
    if bits == 8:
        return pattern
    half = (codes.shape[1] + 1) // 2
    packed: Bytes = pattern[:, :half] & np.uint8(15)
    packed[:, : codes.shape[1] - half] |= pattern[:, half:] << np.uint8(4)
    return packed


def _unpack(packed: Bytes, numel: int, bits: int) -> Codes:
    if bits == 8:
        return packed.view(np.int8)
    low = (packed << np.uint8(4)).view(np.int8) >> np.int8(4)
    high = packed.view(np.int8) >> np.int8(4)
    return np.concatenate([low, high], axis=1)[:, :numel]


def _read(codec: Codec, wire: Bytes, message: Message, i: int, numel: int) -> Floats:
    """Return the values of segment ``i``; NaN in any form."""
    codes = wire[message.codes[i] : message.codes[i + 1]]
    if not codec.quantised:
        dtype = CAST_DTYPE[codec.format]
        return to_float32(typed(codes, dtype), dtype)
    pattern = wire[message.scales[i] : message.scales[i + 1]].view(np.uint16)
    scales = from_bfloat16(pattern)
    scales = np.where(np.isfinite(scales), scales, np.float32(np.nan))
    values = np.empty(numel, np.float32)
    code, scale = 0, 0
    for rows in blocks(codec, values):
        count, length = rows.shape
        row_nbytes = length if codec.bits == 8 else (length + 1) // 2
        packed = codes[code : code + count * row_nbytes].reshape(count, row_nbytes)
        with np.errstate(all="ignore"):
            quantised = _unpack(packed, length, codec.bits).astype(np.float32)
            rows[:] = quantised * scales[scale : scale + count, None]
        code, scale = code + packed.size, scale + count
    return values


def _sum(codec: Codec, wires: list[Bytes], message: Message, i: int, numel: int) -> Floats:
    total = _read(codec, wires[0], message, i, numel)
    for wire in wires[1:]:
        with np.errstate(all="ignore"):
            total = total + _read(codec, wire, message, i, numel)
    return total


def typed(memory: Bytes, dtype: str) -> npt.NDArray[Any]:
    """View memory as elements of ``dtype``; bfloat16 as its bits."""
    whole = memory[: memory.nbytes // ITEMSIZE[dtype] * ITEMSIZE[dtype]]
    return whole.view({"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype])


def from_bfloat16(pattern: npt.NDArray[np.uint16]) -> Floats:
    """Return the values whose bfloat16 bits are given."""
    return (pattern.astype(np.uint32) << 16).view(np.float32)


def to_float32(values: npt.NDArray[Any], dtype: str) -> Floats:
    """Return the elements of an array of ``dtype`` (bfloat16: of its bits) as float32, exactly."""
    if dtype == "bfloat16":
        return from_bfloat16(values)
    with np.errstate(invalid="ignore"):
        return values.astype(np.float32)


def from_float32(values: Floats, dtype: str, *, saturate: bool) -> npt.NDArray[Any]:
    """Return values rounded to ``dtype`` (bfloat16: its bits), half to even; NaN in its one form.

    ``saturate``: a finite value that float16 would make infinite becomes its largest one.
    """
    pattern = values.view(np.uint32)
    nan = (pattern & ~np.uint32(SIGN_BIT)) > INFINITY_BITS
    if dtype == "float32":
        return np.where(nan, np.uint32(NAN_FLOAT32), pattern).view(np.float32)
    if dtype == "bfloat16":
        odd = (pattern >> 16) & np.uint32(1)
        rounded = (pattern + np.uint32(0x7FFF) + odd) >> 16
        return np.where(nan, NAN_BFLOAT16, rounded).astype(np.uint16)
    if saturate:
        bounded = np.clip(values, -FLOAT16_MAX, FLOAT16_MAX)
        values = np.where(np.isfinite(values), bounded, values)
    with np.errstate(all="ignore"):
        half = values.astype(np.float16).view(np.uint16)
    return np.where(nan, np.uint16(NAN_FLOAT16), half).view(np.float16)
