"""Between elements and wire chunks: pack, unpack, reduce, and reduce-and-pack one shard's segments.

Floating point goes through the codec kernels, exact or quantised alike; float64, integers, booleans
and complex numbers, and the operations other than sum and avg, go through NumPy. A *carrier* is the
codec whose wire bytes are the plain elements of a dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from zcomm.arrays import HALF, ITEMSIZE, Memory, View
from zcomm.codecs import Codec, kernels
from zcomm.plan import Indices, WireFormat

CARRIER = {
    "float32": Codec.parse("none"),
    "bfloat16": Codec.parse("bf16"),
    "float16": Codec.parse("fp16"),
}

_UFUNC: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
OPS = tuple(_UFUNC)


def pack(wire: WireFormat, source: View, starts: Indices, lengths: Indices, out: Memory) -> None:
    """Write the wire chunk of the named segments of ``source``."""
    if wire.codec is not None:
        kernels().encode(wire.codec, source.memory, source.dtype, starts, lengths, out)
    elif source.dtype == wire.dtype:
        at = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            run = source.elements(start, length)
            out[at : at + run.size] = run
            at += run.size
    else:
        kernels().encode(CARRIER[wire.dtype], source.memory, source.dtype, starts, lengths, out)


def unpack(
    wire: WireFormat, chunk: Memory, target: View, starts: Indices, lengths: Indices
) -> None:
    """Write the elements of a wire chunk to the named segments of ``target``."""
    if wire.codec is not None:
        kernels().decode(wire.codec, chunk, starts, lengths, target.memory, target.dtype)
    elif target.dtype == wire.dtype:
        at = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            run = target.elements(start, length)
            run[...] = chunk[at : at + run.size]
            at += run.size
    else:
        kernels().decode(CARRIER[wire.dtype], chunk, starts, lengths, target.memory, target.dtype)


def reduce(
    wire: WireFormat,
    chunks: Sequence[Memory],
    target: View,
    starts: Indices,
    lengths: Indices,
    op: str,
    divisor: int,
) -> None:
    """Combine wire chunks in the order given; write the result, divided, to named segments."""
    codec = wire.codec or (CARRIER.get(wire.dtype) if op in ("sum", "avg") else None)
    if codec is not None:
        kernels().decode_reduce(
            codec, list(chunks), starts, lengths, target.memory, target.dtype, divisor
        )
        return
    total = _combine(wire.dtype, chunks, op)
    if divisor != 1:
        total = total / np.asarray(divisor, total.dtype)
    if target.dtype in HALF or (wire.dtype in CARRIER and target.dtype != wire.dtype):
        rounded = np.empty(total.size * ITEMSIZE[target.dtype], np.uint8)
        _round(total, target.dtype, rounded)
        unpack(WireFormat(target.dtype), rounded, target, starts, lengths)
    else:
        unpack(WireFormat(target.dtype), total.view(np.uint8), target, starts, lengths)


def reduce_pack(
    wire: WireFormat,
    chunks: Sequence[Memory],
    into: WireFormat,
    lengths: Indices,
    op: str,
    out: Memory,
) -> None:
    """Combine wire chunks in the order given; write the sum as a wire chunk of another format."""
    source = wire.codec or (CARRIER.get(wire.dtype) if op in ("sum", "avg") else None)
    if source is not None:
        target = into.codec or CARRIER[into.dtype]
        kernels().decode_reduce_encode(source, list(chunks), target, lengths, out)
    else:
        assert into.codec is None
        _round(_combine(wire.dtype, chunks, op), into.dtype, out)


def _combine(dtype: str, chunks: Sequence[Memory], op: str) -> npt.NDArray[Any]:
    total = _elements(chunks[0], dtype).copy()
    for chunk in chunks[1:]:
        _UFUNC[op](total, _elements(chunk, dtype), out=total)
    return total


def _elements(chunk: Memory, dtype: str) -> npt.NDArray[Any]:
    if dtype not in HALF:
        return chunk.view(np.dtype(dtype))
    numel = chunk.size // 2
    wide = np.empty(numel, np.float32)
    whole = np.array([0], np.int64), np.array([numel], np.int64)
    kernels().decode(CARRIER[dtype], chunk, *whole, wide.view(np.uint8), "float32")
    return wide


def _round(total: npt.NDArray[Any], dtype: str, out: Memory) -> None:
    if dtype in HALF:
        whole = np.array([0], np.int64), np.array([total.size], np.int64)
        kernels().encode(CARRIER[dtype], total.view(np.uint8), "float32", *whole, out)
    else:
        out.view(np.dtype(dtype))[...] = total
