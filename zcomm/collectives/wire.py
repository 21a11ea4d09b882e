"""Between elements and wire chunks: pack, unpack, reduce, and reduce-and-pack one shard's segments.

Floating point goes through the codec kernels, exact or quantised alike; float64, integers, booleans
and complex numbers, and the operations other than sum and avg, go through NumPy: for device arrays
these are copied to the host, which waits. A *carrier* is the codec whose wire bytes are the plain
elements of a dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from topology import Topology
from zcomm.arrays import HALF, ITEMSIZE, DeviceMemory, HostMemory, Memory, View
from zcomm.codecs import Codec
from zcomm.codecs.backend import Kernels, kernels
from zcomm.device import copy, from_host, on_host, scratch
from zcomm.layout import Indices
from zcomm.plan import WireFormat

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


class Place(NamedTuple):
    """Segments of an array: where the elements of a chunk come from or go to."""

    view: View
    starts: Indices
    lengths: Indices


@dataclass(frozen=True)
class Reduction:
    """What is done with the terms of a sum: ``op``, and one division at the very end."""

    op: str
    divisor: int = 1

    def carrier(self, wire: WireFormat) -> Codec | None:
        """Return the codec whose kernels reduce chunks of this format, None where NumPy does."""
        if wire.codec is not None:
            return wire.codec
        return CARRIER.get(wire.dtype) if self.op in ("sum", "avg") else None


class _Chosen(threading.local):
    """The kernels for host memory of the operation that this thread runs."""

    kernels: Kernels | None = None


_chosen = _Chosen()


@contextmanager
def host_kernels() -> Iterator[Kernels]:
    """Choose the kernels for host memory once for everything inside, not at every call."""
    _chosen.kernels = chosen = kernels()
    try:
        yield chosen
    finally:
        _chosen.kernels = None


def _kernels_of(memory: Memory) -> Any:
    if isinstance(memory, DeviceMemory):
        return memory.device.kernels()
    return _chosen.kernels or kernels()


def pack(wire: WireFormat, source: Place, out: Memory, seed: int) -> None:
    """Write the wire chunk of ``source``; ``seed`` is that of a codec that rounds at random."""
    view = source.view
    codec = encoder(wire, view.dtype)
    if codec is None:
        at = 0
        for run in _runs(source):
            copy(out[at : at + run.size], run)
            at += run.size
    else:
        place = view.memory, view.dtype, source.starts, source.lengths
        _kernels_of(view.memory).encode(codec, *place, out, seed)


class Packing(NamedTuple):
    """A chunk yet to be written: what :func:`pack` is given."""

    wire: WireFormat
    source: Place
    out: Memory
    seed: int


def pack_all(packings: Iterable[Packing]) -> None:
    """Write several wire chunks; on a device all those of one array are one launch."""
    waiting = list(packings)
    if len(waiting) == 1:
        pack(*waiting[0])
        return
    batches: dict[tuple[Codec, int], list[Packing]] = {}
    for one in waiting:
        codec = encoder(one.wire, one.source.view.dtype)
        if codec is None or not isinstance(one.source.view.memory, DeviceMemory):
            pack(one.wire, one.source, one.out, one.seed)
        else:
            batches.setdefault((codec, id(one.source.view)), []).append(one)
    for (codec, _), batch in batches.items():
        view = batch[0].source.view
        messages = [(one.source.starts, one.source.lengths, one.out, one.seed) for one in batch]
        _kernels_of(view.memory).encode_batch(codec, view.memory, view.dtype, messages)


def unpack(wire: WireFormat, chunk: Memory, target: Place) -> None:
    """Write the elements of a wire chunk to ``target``."""
    view = target.view
    codec = encoder(wire, view.dtype)
    if codec is None:
        at = 0
        for run in _runs(target):
            copy(run, chunk[at : at + run.size])
            at += run.size
    else:
        place = target.starts, target.lengths, view.memory, view.dtype
        _kernels_of(view.memory).decode(codec, chunk, *place)


class Unpacking(NamedTuple):
    """A chunk yet to be read: what :func:`unpack` is given."""

    wire: WireFormat
    chunk: Memory
    target: Place


def unpack_all(unpackings: Iterable[Unpacking]) -> None:
    """Write the elements of several chunks; on a device all those of one array are one launch."""
    batches: dict[tuple[Codec, int], list[Unpacking]] = {}
    for one in unpackings:
        codec = encoder(one.wire, one.target.view.dtype)
        if codec is None or not isinstance(one.chunk, DeviceMemory):
            unpack(one.wire, one.chunk, one.target)
        else:
            batches.setdefault((codec, id(one.target.view)), []).append(one)
    for (codec, _), batch in batches.items():
        view = batch[0].target.view
        messages = [(one.chunk, one.target.starts, one.target.lengths) for one in batch]
        _kernels_of(view.memory).decode_batch(codec, messages, view.memory, view.dtype)


def reduce(wire: WireFormat, chunks: Sequence[Memory], target: Place, reduction: Reduction) -> None:
    """Combine wire chunks in the order given and write the result, divided, to ``target``."""
    view, divisor = target.view, reduction.divisor
    codec = reduction.carrier(wire)
    if codec is not None:
        place = target.starts, target.lengths, view.memory, view.dtype
        _kernels_of(view.memory).decode_reduce(codec, list(chunks), *place, divisor)
        return
    total = _combine(wire.dtype, chunks, reduction.op)
    if divisor != 1:
        total = total / np.asarray(divisor, total.dtype)
    rounded = scratch(total.size * ITEMSIZE[view.dtype], view.memory)
    _round(total, view.dtype, rounded)
    unpack(WireFormat(view.dtype), rounded, target)


def reduce_pack(
    wire: WireFormat,
    chunks: Sequence[Memory],
    into: WireFormat,
    lengths: Indices,
    reduction: Reduction,
    out: Memory,
    seed: int,
) -> None:
    """Combine wire chunks in the order given; write the sum as a wire chunk of another format."""
    source = reduction.carrier(wire)
    if source is not None:
        target = into.codec or CARRIER[into.dtype]
        _kernels_of(out).decode_reduce_encode(source, list(chunks), target, lengths, out, seed)
    else:
        assert into.codec is None
        _round(_combine(wire.dtype, chunks, reduction.op), into.dtype, out)


class Recoding(NamedTuple):
    """Chunks yet to be reduced and packed: what :func:`reduce_pack` is given."""

    wire: WireFormat
    chunks: Sequence[Memory]
    into: WireFormat
    lengths: Indices
    out: Memory
    seed: int


def reduce_pack_all(recodings: Iterable[Recoding], reduction: Reduction) -> None:
    """Reduce and pack several times; on a device all of one format are one launch, if possible."""
    batches: dict[tuple[Codec, Codec], list[Recoding]] = {}
    for one in recodings:
        source = reduction.carrier(one.wire)
        if source is None or not isinstance(one.out, DeviceMemory):
            how = one.into, one.lengths, reduction, one.out, one.seed
            reduce_pack(one.wire, one.chunks, *how)
        else:
            target = one.into.codec or CARRIER[one.into.dtype]
            batches.setdefault((source, target), []).append(one)
    for (source, target), batch in batches.items():
        parts = [(one.chunks, one.lengths, one.out, one.seed) for one in batch]
        _kernels_of(batch[0].out).decode_reduce_encode_batch(source, target, parts)


def nested_reduce(
    nesting: Topology,
    formats: tuple[WireFormat, WireFormat],
    chunks: Sequence[Memory],
    target: Place,
    reduction: Reduction,
) -> None:
    """Reduce the plain chunks of all ranks as the levels nest.

    Inside out, ascending, every partial sum rounded: ``formats`` are those of the chunks and of the
    partial sums. This is the definition of an exact result; the hierarchical algorithm computes the
    same, spread over the ranks.
    """
    wire, partial = formats
    parts = list(enumerate(chunks))
    for level in nesting.levels:
        if len(level.groups) in (1, len(parts)):
            continue
        sums = []
        for group in level.groups:
            members = [part for first, part in parts if first in group]
            sums.append((group[0], _partial(wire, members, partial, target.lengths, reduction)))
        parts, wire = sums, partial
    reduce(wire, [part for _, part in parts], target, reduction)


def _partial(
    wire: WireFormat,
    parts: list[Memory],
    partial: WireFormat,
    lengths: Indices,
    reduction: Reduction,
) -> Memory:
    out = scratch(partial.wire_nbytes(tuple(lengths.tolist())), parts[0])
    reduce_pack(wire, parts, partial, lengths, reduction, out, seed=0)
    return out


def is_one_sum(nesting: Topology) -> bool:
    """Tell whether no level of ``nesting`` has sums of its own: all chunks are one sum."""
    return all(len(level.groups) in (1, nesting.size) for level in nesting.levels)


def encoder(wire: WireFormat, dtype: str) -> Codec | None:
    """Return the codec between elements and their chunks, None where they are the same bytes."""
    if wire.codec is None and dtype == wire.dtype:
        return None
    return wire.codec or CARRIER[wire.dtype]


def _runs(place: Place) -> Iterator[Memory]:
    for start, length in zip(place.starts.tolist(), place.lengths.tolist(), strict=True):
        yield place.view.elements(start, length)


def _combine(dtype: str, chunks: Sequence[Memory], op: str) -> npt.NDArray[Any]:
    total = _elements(chunks[0], dtype).copy()
    for chunk in chunks[1:]:
        _UFUNC[op](total, _elements(chunk, dtype), out=total)
    return total


def _elements(chunk: Memory, dtype: str) -> npt.NDArray[Any]:
    if dtype not in HALF:
        return on_host(chunk).view(np.dtype(dtype))
    numel = chunk.size // 2
    wide = scratch(numel * ITEMSIZE["float32"], chunk)
    _kernels_of(chunk).decode(CARRIER[dtype], chunk, *_whole(numel), wide, "float32")
    return on_host(wide).view(np.float32)


def _round(total: npt.NDArray[Any], dtype: str, out: Memory) -> None:
    if dtype in HALF:
        wide = _placed(total.view(np.uint8), out)
        _kernels_of(out).encode(CARRIER[dtype], wide, "float32", *_whole(total.size), out)
    else:
        from_host(out, total.astype(np.dtype(dtype), copy=False).view(np.uint8))


def _placed(values: HostMemory, like: Memory) -> Memory:
    """Return bytes in the place where ``like`` lies."""
    if not isinstance(like, DeviceMemory):
        return values
    memory = scratch(values.size, like)
    from_host(memory, values)
    return memory


def _whole(numel: int) -> tuple[Indices, Indices]:
    return np.array([0], np.int64), np.array([numel], np.int64)
