"""The kernels in NumPy: the definition of the codec in code, message by message.

Written to be read next to docs/numerics.md, with ``quantise``, ``fp8``, ``hadamard``, ``philox``
and ``floats``, which hold the arithmetic; ``native`` gives the same bits faster. *Values* are
float32 throughout, a *row* is a block. Do not assume that the processor's setting for subnormal
numbers matters: it is set aside for the time of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from zcomm.subnormals import exact_subnormals

from .codec import Codec
from .floats import Floats, from_float32, to_float32, typed
from .quantise import Codes, decode_rows, encode_rows
from .wire import (
    CAST_DTYPE,
    Bytes,
    Lengths,
    Message,
    check_decode,
    check_encode,
    check_out,
    check_wires,
)

CHUNK = 1 << 16  # elements computed at once, so that temporaries stay in the cache


@exact_subnormals()
def encode(
    codec: Codec,
    x: Bytes,
    dtype: str,
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
    seed: int = 0,
) -> None:
    """Write to ``out`` the message of the segments of ``x``; every byte of it is written.

    ``seed`` (0 <= seed < 2^64) draws the random numbers of stochastic rounding.

    Raises:
        ValueError: segments leave the memory, or ``out`` is not exactly as long as the message.
    """
    message = check_encode(codec, x, dtype, starts, lengths, out)
    memory = typed(x, dtype)
    segments = (
        to_float32(memory[start : start + length], dtype)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    )
    _write(codec, segments, message, out, seed)


@exact_subnormals()
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


@exact_subnormals()
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


def prepare_reduce(
    codec: Codec,
    wires: list[Bytes],
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
    dtype: str,
    divisor: int,
) -> Callable[[], object]:
    """Return what does :func:`decode_reduce` with these arguments, whatever memory holds then.

    For codecs whose messages have no padding: nothing else can be wrong later.
    """
    return partial(decode_reduce, codec, wires, starts, lengths, out, dtype, divisor)


@exact_subnormals()
def decode_reduce_encode(
    codec_in: Codec,
    wires: list[Bytes],
    codec_out: Codec,
    lengths: Lengths,
    out: Bytes,
    seed: int = 0,
) -> None:
    """Write to ``out`` the message, in ``codec_out``, of the float32 sum of ``wires``.

    ``seed`` (0 <= seed < 2^64) draws the random numbers of stochastic rounding.

    Raises:
        ValueError: a wire or ``out`` has a wrong length.
        CodecError: padding of a message is not zero.
    """
    message_in = check_wires(codec_in, wires, lengths)
    message_out = check_out(codec_out, lengths, out)
    segments = (
        _sum(codec_in, wires, message_in, i, length) for i, length in enumerate(lengths.tolist())
    )
    _write(codec_out, segments, message_out, out, seed)


def blocks(codec: Codec, numel: int) -> Iterator[tuple[slice, int]]:
    """Yield the blocks of a segment: where some of equal length lie, and that length.

    The short last block comes by itself.
    """
    full = numel // codec.block * codec.block
    step = max(CHUNK, codec.block)
    for first in range(0, full, step):
        yield slice(first, min(first + step, full)), codec.block
    if full < numel:
        yield slice(full, numel), numel - full


def _write(
    codec: Codec, segments: Iterator[Floats], message: Message, out: Bytes, seed: int
) -> None:
    out[int(message.codes[-1]) : int(message.scales[0])] = 0
    out[int(message.scales[-1]) : message.nbytes] = 0
    for i, values in enumerate(segments):
        codes = out[message.codes[i] : message.codes[i + 1]]
        if codec.quantised:
            scales = out[message.scales[i] : message.scales[i + 1]]
            _encode_segment(codec, values, codes, scales, seed)
        else:
            dtype = CAST_DTYPE[codec.format]
            typed(codes, dtype)[:] = from_float32(values, dtype, saturate=False)


def _encode_segment(codec: Codec, values: Floats, codes: Bytes, scales: Bytes, seed: int) -> None:
    code, scale = 0, 0
    for place, length in blocks(codec, values.size):
        rows = values[place].reshape(-1, length)
        quantised, row_scales = encode_rows(codec, rows, first=place.start, seed=seed)
        packed = _pack(quantised, codec.bits)
        codes[code : code + packed.size] = packed.reshape(-1)
        scales[scale : scale + row_scales.nbytes] = row_scales.view(np.uint8)
        code, scale = code + packed.size, scale + row_scales.nbytes


def _pack(codes: Codes, bits: int) -> Bytes:
    if bits == 8:
        return codes
    half = (codes.shape[1] + 1) // 2
    packed: Bytes = codes[:, :half] & np.uint8(15)
    packed[:, : codes.shape[1] - half] |= codes[:, half:] << np.uint8(4)
    return packed


def _unpack(packed: Bytes, length: int, bits: int) -> Codes:
    if bits == 8:
        return packed
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)[:, :length]


def _read(codec: Codec, wire: Bytes, message: Message, i: int, numel: int) -> Floats:
    """Return the values of segment ``i``; NaN in any form."""
    codes = wire[message.codes[i] : message.codes[i + 1]]
    if not codec.quantised:
        dtype = CAST_DTYPE[codec.format]
        return to_float32(typed(codes, dtype), dtype)
    scales = wire[message.scales[i] : message.scales[i + 1]].view(np.uint16)
    values = np.empty(numel, np.float32)
    code, scale = 0, 0
    for place, length in blocks(codec, numel):
        rows = values[place].reshape(-1, length)
        count, row_nbytes = len(rows), length if codec.bits == 8 else (length + 1) // 2
        packed = codes[code : code + count * row_nbytes].reshape(count, row_nbytes)
        unpacked = _unpack(packed, length, codec.bits)
        rows[:] = decode_rows(codec, unpacked, scales[scale : scale + count])
        code, scale = code + packed.size, scale + count
    return values


def _sum(codec: Codec, wires: list[Bytes], message: Message, i: int, numel: int) -> Floats:
    total = _read(codec, wires[0], message, i, numel)
    for wire in wires[1:]:
        with np.errstate(all="ignore"):
            total = total + _read(codec, wire, message, i, numel)
    return total
