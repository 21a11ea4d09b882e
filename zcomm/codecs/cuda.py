"""The kernels on a device: the functions of ``reference`` for device memory, with the same bits.

Rows and the addresses of wires travel in the parameters of a launch, never through memory; what
does not fit becomes several launches that carry float32 sums. Everything is enqueued on the
device's current stream, and nothing here waits for it. So the host cannot look at the padding of a
message: a device notes where it is not zero, and the next call here, or ``check``, raises. Do not
assume that results are there when a function returns.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from zcomm.device import Device, DeviceMemory
from zcomm.errors import CodecError

from . import instances
from .codec import Codec
from .parameters import (
    MAX_WIRES,
    PASSED_ROW,
    ROW,
    THREADS,
    WHOLE,
    Addresses,
    Rows,
    addresses_of,
    at_zero,
    launches,
    options_of,
    rows_of,
)
from .wire import (
    CAST_DTYPE,
    ITEMSIZE,
    Lengths,
    check_decode,
    check_encode,
    check_out,
    check_wires,
    layout,
)

_COMPLAINTS: weakref.WeakKeyDictionary[Device, npt.NDArray[np.uint32]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def encode(
    codec: Codec,
    x: DeviceMemory,
    dtype: str,
    starts: Lengths,
    lengths: Lengths,
    out: DeviceMemory,
    seed: int = 0,
) -> None:
    """Do what ``reference.encode`` does."""
    encode_batch(codec, x, dtype, [(starts, lengths, out, seed)])


def encode_batch(
    codec: Codec,
    x: DeviceMemory,
    dtype: str,
    messages: Sequence[tuple[Lengths, Lengths, DeviceMemory, int]],
) -> None:
    """Encode several messages at once: (starts, lengths, out, seed) of each, as for ``encode``.

    Raises:
        ValueError: as ``encode``.
        CodecError: as ``check``.
    """
    rows = []
    for starts, lengths, out, seed in messages:
        message = check_encode(codec, _sized(x), dtype, starts, lengths, _sized(out))
        of_message = rows_of(ROW, message, lengths, out.pointer)
        of_message["values"] = _addresses(x, dtype, starts)
        of_message["seed"] = seed
        rows.append(of_message)
    check(x.device)
    _encode(x.device, codec, dtype, np.concatenate(rows))


def decode(
    codec: Codec,
    wire: DeviceMemory,
    starts: Lengths,
    lengths: Lengths,
    out: DeviceMemory,
    dtype: str,
) -> None:
    """Do what ``reference.decode`` does; padding that is not zero shows later."""
    decode_batch(codec, [(wire, starts, lengths)], out, dtype)


def decode_batch(
    codec: Codec,
    messages: Sequence[tuple[DeviceMemory, Lengths, Lengths]],
    out: DeviceMemory,
    dtype: str,
) -> None:
    """Decode several messages at once: (wire, starts, lengths) of each, as for ``decode``.

    Raises:
        ValueError: as ``decode``.
        CodecError: as ``check``.
    """
    rows = []
    for wire, starts, lengths in messages:
        message = check_decode(
            codec, [_sized(wire)], starts, lengths, _sized(out), dtype, padding=False
        )
        of_message = rows_of(ROW, message, lengths, wire.pointer)
        of_message["values"] = _addresses(out, dtype, starts)
        rows.append(of_message)
    check(out.device)
    all_rows = np.concatenate(rows)
    if codec.quantised:
        options = _options(out.device, codec, saturate=True)
        _launch(out.device, instances.decode(codec, dtype), all_rows, options)
    else:
        _cast(out.device, CAST_DTYPE[codec.format], dtype, all_rows, saturate=True)


def decode_reduce(
    codec: Codec,
    wires: Sequence[DeviceMemory],
    starts: Lengths,
    lengths: Lengths,
    out: DeviceMemory,
    dtype: str,
    divisor: int,
) -> None:
    """Do what ``reference.decode_reduce`` does; padding that is not zero shows later."""
    sized = list(map(_sized, wires))
    check_decode(codec, sized, starts, lengths, _sized(out), dtype, divisor, padding=False)
    check(out.device)
    _sum(out.device, codec, wires, lengths, _addresses(out, dtype, starts), dtype, divisor)


def decode_reduce_encode(
    codec_in: Codec,
    wires: Sequence[DeviceMemory],
    codec_out: Codec,
    lengths: Lengths,
    out: DeviceMemory,
    seed: int = 0,
) -> None:
    """Do what ``reference.decode_reduce_encode`` does; padding that is not zero shows later."""
    decode_reduce_encode_batch(codec_in, codec_out, [(wires, lengths, out, seed)])


Part = tuple[Sequence[DeviceMemory], Lengths, DeviceMemory, int]


def decode_reduce_encode_batch(codec_in: Codec, codec_out: Codec, parts: Sequence[Part]) -> None:
    """Pass several parts on: (wires, lengths, out, seed) of each, as for ``decode_reduce_encode``.

    At once where there is an instance for it and the wires of every part lie in the same messages,
    one after the other: those of the first part, moved by the same number of bytes.

    Raises:
        ValueError: as ``decode_reduce_encode``.
        CodecError: as ``check``.
    """
    device = parts[0][2].device
    kernel = codec_in.quantised and instances.decode_reduce_encode(codec_in, codec_out)
    first = parts[0][0]
    if not kernel or len(first) > MAX_WIRES or not all(_moved(first, part[0]) for part in parts):
        for part in parts:
            _decode_reduce_encode(codec_in, codec_out, *part)
        return
    rows = [_passed(codec_in, codec_out, first, *part) for part in parts]
    check(device)
    options = _options(device, codec_in, wires=[wire for part in parts for wire in part[0]])
    _launch(device, kernel, np.concatenate(rows), addresses_of(first), options)


def _moved(first: Sequence[DeviceMemory], wires: Sequence[DeviceMemory]) -> bool:
    """Tell whether wires are the first ones, all moved by the same number of bytes."""
    if len(wires) != len(first):
        return False
    moves = {wire.pointer - origin.pointer for wire, origin in zip(wires, first, strict=True)}
    return len(moves) == 1 and min(moves) >= 0


def _passed(
    codec_in: Codec,
    codec_out: Codec,
    first: Sequence[DeviceMemory],
    wires: Sequence[DeviceMemory],
    lengths: Lengths,
    out: DeviceMemory,
    seed: int,
) -> Rows:
    """Return the rows of one part, relative to the wires of the first."""
    message_in = check_wires(codec_in, list(map(_sized, wires)), lengths, padding=False)
    message_out = check_out(codec_out, lengths, _sized(out))
    rows = rows_of(PASSED_ROW, message_in, lengths, wires[0].pointer - first[0].pointer)
    rows_out = rows_of(ROW, message_out, lengths, out.pointer)
    for name in ("codes", "scales", "code_padding", "scale_padding"):
        rows[f"out_{name}"] = rows_out[name]
    rows["seed"] = seed
    return rows


def _decode_reduce_encode(
    codec_in: Codec,
    codec_out: Codec,
    wires: Sequence[DeviceMemory],
    lengths: Lengths,
    out: DeviceMemory,
    seed: int,
) -> None:
    """Sum the wires of one part, then encode the sum."""
    check_wires(codec_in, list(map(_sized, wires)), lengths, padding=False)
    message_out = check_out(codec_out, lengths, _sized(out))
    check(out.device)
    rows_out = rows_of(ROW, message_out, lengths, out.pointer)
    if not codec_out.quantised:
        dtype = CAST_DTYPE[codec_out.format]
        _sum(out.device, codec_in, wires, lengths, rows_out["codes"], dtype)
        return
    sums, rows_out["values"] = _sums(out.device, lengths)
    rows_out["seed"] = seed
    _sum(out.device, codec_in, wires, lengths, rows_out["values"], "float32")
    _encode(out.device, codec_out, "float32", rows_out)
    del sums


def check(device: Device) -> None:
    """Raise where a message that was decoded on this device turned out to be none.

    Raises:
        CodecError: its padding was not zero; raised once.
    """
    complaint = _complaint(device)
    if complaint[0]:
        complaint[0] = 0
        raise CodecError(
            f"a message that was decoded on {device.name} before this call is not what its codec"
            " wrote: its padding is not zero"
        )


def _encode(device: Device, codec: Codec, dtype: str, rows: Rows) -> None:
    if not codec.quantised:
        rows["codes"], rows["values"] = rows["values"].copy(), rows["codes"].copy()
        _cast(device, dtype, CAST_DTYPE[codec.format], rows, saturate=False)
        return
    _launch(device, instances.encode(codec, dtype), rows, _options(device, codec))


def _cast(device: Device, source: str, target: str, rows: Rows, *, saturate: bool) -> None:
    """Convert elements at ``codes`` of each row, absolute addresses, to those at ``values``."""
    options = _options(device, None, saturate=saturate)
    _launch(device, instances.reduce_casts(source, target), rows, at_zero(), options)


def _sum(
    device: Device,
    codec: Codec,
    wires: Sequence[DeviceMemory],
    lengths: Lengths,
    values: Addresses,
    dtype: str,
    divisor: int = 1,
) -> None:
    """Sum wires, as many at once as parameters hold, to ``values``, an address per segment."""
    rows = rows_of(ROW, layout(codec, lengths), lengths)
    parts = [wires[i : i + MAX_WIRES] for i in range(0, len(wires), MAX_WIRES)]
    sums, carried = _sums(device, lengths) if len(parts) > 1 else (None, values)
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        rows["carry"] = carried if i else 0
        rows["values"] = values if last else carried
        to = dtype if last else "float32"
        if codec.quantised:
            kernel = instances.decode_reduce(codec, to)
        else:
            kernel = instances.reduce_casts(CAST_DTYPE[codec.format], to)
        options = _options(device, codec, wires=part, divisor=divisor if last else 1)
        _launch(device, kernel, rows, addresses_of(part), options)
    del sums


def _addresses(memory: DeviceMemory, dtype: str, starts: Lengths) -> Addresses:
    return (starts * ITEMSIZE[dtype]).astype(np.uint64) + np.uint64(memory.pointer)


def _sums(device: Device, lengths: Lengths) -> tuple[DeviceMemory, Addresses]:
    """Return new memory for float32 sums, and where those of each segment start, aligned."""
    nbytes = -(-lengths * ITEMSIZE["float32"] // WHOLE) * WHOLE
    ends = np.cumsum(nbytes)
    memory = device.empty(int(nbytes.sum()) + WHOLE)
    first = -(-memory.pointer // WHOLE) * WHOLE
    return memory, (ends - nbytes).astype(np.uint64) + np.uint64(first)


def _launch(device: Device, kernel: str, rows: Rows, *arguments: Any) -> None:
    for grid, parameter in launches(rows, device.num_multiprocessors):
        device.launch(kernel, grid, THREADS, (parameter, *arguments))


def _options(device: Device, codec: Codec | None, **rest: Any) -> Any:
    return options_of(codec, _complaint(device).ctypes.data, **rest)


def _complaint(device: Device) -> npt.NDArray[np.uint32]:
    """Return the word, in memory that both host and device reach, where a device complains."""
    # Kernels hold the address of the word, so there is one, also where ranks are threads.
    with _LOCK:
        if device not in _COMPLAINTS:
            word = device.pinned(4).view(np.uint32)
            word[0] = 0
            _COMPLAINTS[device] = word
        return _COMPLAINTS[device]


def _sized(memory: DeviceMemory) -> Any:
    """Return memory as what checks of sizes take: they ask for its ``nbytes`` only."""
    return memory
