"""The parameters of a launch of the CUDA kernels: rows, wires and options, as structures.

A *row* is a segment of a message: where its codes, scales and values are, its number of elements,
its share of the grid. The structures are those of csrc/cuda_rows.h, and small enough that all of
them are passed by value: no table lies in the memory of a device. Do not assume that an address is
one: where several wires are read, it is a distance from the start of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from zcomm.device import DeviceMemory

from .codec import Codec
from .wire import Lengths, Message

MAX_ROWS, MAX_WIRES = 56, 96  # with these, parameters stay below the 4096 bytes of every device
THREADS = 256
BLOCKS_PER_MULTIPROCESSOR = 8
WARP, ELEMENTS_OF_WARP = 32, 512  # about what a warp does at once
UNIT_ONE = 0x4B000000  # 2^23 as float32; what it is for, add_nibbles in csrc/cuda_decode.h says
WHOLE = 16  # bytes that a lane reads at once

Addresses = npt.NDArray[np.uint64]
Rows = npt.NDArray[Any]

ROW = np.dtype(
    [
        ("codes", np.uint64),
        ("scales", np.uint64),
        ("values", np.uint64),
        ("carry", np.uint64),
        ("seed", np.uint64),
        ("numel", np.int64),
        ("first", np.uint32),
        ("code_padding", np.uint8),
        ("scale_padding", np.uint8),
    ],
    align=True,
)
PASSED_ROW = np.dtype(
    [
        ("codes", np.uint64),
        ("scales", np.uint64),
        ("out_codes", np.uint64),
        ("out_scales", np.uint64),
        ("seed", np.uint64),
        ("numel", np.int64),
        ("first", np.uint32),
        ("code_padding", np.uint8),
        ("scale_padding", np.uint8),
        ("out_code_padding", np.uint8),
        ("out_scale_padding", np.uint8),
    ],
    align=True,
)
WIRES = np.dtype([("address", np.uint64, MAX_WIRES), ("count", np.int32)], align=True)
OPTIONS = np.dtype(
    [
        ("complaint", np.uint64),
        ("divisor", np.float32),
        ("log_block", np.int32),
        ("stochastic", np.int32),
        ("transformed", np.int32),
        ("saturate", np.int32),
        ("misalignment", np.int32),
        ("unit_one", np.uint32),
    ],
    align=True,
)

LISTS = {
    kind: np.dtype([("row", kind, MAX_ROWS), ("count", np.int32)], align=True)
    for kind in (ROW, PASSED_ROW)
}


def rows_of(kind: np.dtype[Any], message: Message, lengths: Lengths, address: int = 0) -> Rows:
    """Return the rows of a message; the last one with elements has its padding."""
    rows = np.zeros(len(lengths), kind)
    rows["numel"] = lengths
    rows["codes"] = message.codes[:-1].astype(np.uint64) + np.uint64(address)
    rows["scales"] = message.scales[:-1].astype(np.uint64) + np.uint64(address)
    filled = np.flatnonzero(lengths)
    if len(filled):
        rows["code_padding"][filled[-1]] = message.scales[0] - message.codes[-1]
        rows["scale_padding"][filled[-1]] = message.nbytes - message.scales[-1]
    return rows


def launches(rows: Rows, num_multiprocessors: int) -> Iterator[tuple[int, Any]]:
    """Give the grid and the first parameter of each launch that rows need."""
    rows = rows[rows["numel"] > 0]
    for i in range(0, len(rows), MAX_ROWS):
        some = rows[i : i + MAX_ROWS].copy()
        grid = _share_grid(some, BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors)
        parameter = np.zeros((), LISTS[rows.dtype])
        parameter["row"][: len(some)] = some
        parameter["count"] = len(some)
        yield grid, parameter


def addresses_of(wires: Sequence[DeviceMemory]) -> Any:
    """Return the parameter that holds the addresses of wires."""
    result = np.zeros((), WIRES)
    result["address"][: len(wires)] = [wire.pointer for wire in wires]
    result["count"] = len(wires)
    return result


def at_zero() -> Any:
    """Return the one wire of rows whose addresses are absolute."""
    result = np.zeros((), WIRES)
    result["count"] = 1
    return result


def options_of(
    codec: Codec | None,
    complaint: int,
    *,
    wires: Sequence[DeviceMemory] = (),
    divisor: int = 1,
    saturate: bool = False,
) -> Any:
    """Return the parameter of all the rest; ``complaint``: the address of a word to complain in."""
    result = np.zeros((), OPTIONS)
    result["complaint"] = complaint
    result["divisor"] = divisor
    result["saturate"] = saturate
    result["unit_one"] = UNIT_ONE
    for wire in wires:
        result["misalignment"] |= wire.pointer % WHOLE
    if codec is not None and codec.quantised:
        result["log_block"] = codec.block.bit_length() - 1
        result["stochastic"] = codec.rounding == "stochastic"
        result["transformed"] = codec.transform == "hadamard"
    return result


def _share_grid(rows: Rows, most: int) -> int:
    """Give each row a share of a grid, at least one block; return the size of the grid."""
    per_block = THREADS // WARP * ELEMENTS_OF_WARP
    shares = -(-rows["numel"] // per_block)
    total = int(shares.sum())
    if total > most:
        shares = np.maximum(shares * most // total, 1)
    ends = np.cumsum(shares)
    rows["first"] = ends - shares
    return int(ends[-1])
