"""What one row of the table asks: an operation, a data type, a size, and how many elements that is.

The rules are those of the NCCL tests. Operations that cut a buffer among the ranks have a *chunk*
per rank, rounded down to 16 bytes, so the size of a row may be smaller than the size that was asked
for, and zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_ALIGNMENT_NBYTES = 16


@dataclass(frozen=True)
class DataType:
    """A data type under its NCCL name.

    ``carrier`` is the NumPy type in which the oracles hold its values: itself, or float32 for
    bfloat16. Integers up to ``exact_limit`` in magnitude are represented exactly.
    """

    name: str
    torch: torch.dtype
    carrier: np.dtype
    exact_limit: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory."""
        return self.torch.itemsize

    @property
    def floating(self) -> bool:
        """Whether values may be fractions."""
        return self.torch.is_floating_point

    @property
    def signed(self) -> bool:
        """Whether values may be negative."""
        return self.torch.is_signed


def _integer(name: str) -> DataType:
    return DataType(name, getattr(torch, name), np.dtype(name), int(np.iinfo(name).max))


DATA_TYPES = {
    item.name: item
    for item in (
        *map(_integer, ("int8", "uint8", "int32", "uint32", "int64", "uint64")),
        DataType("half", torch.float16, np.dtype(np.float16), 2**11),
        DataType("bfloat16", torch.bfloat16, np.dtype(np.float32), 2**8),
        DataType("float", torch.float32, np.dtype(np.float32), 2**24),
        DataType("double", torch.float64, np.dtype(np.float64), 2**53),
    )
}

# The names that users of the NCCL tests type, and zcomm's.
REDUCTIONS = {"sum": "sum", "prod": "product", "min": "min", "max": "max", "avg": "avg"}


@dataclass(frozen=True)
class Operation:
    """A collective as the benchmark sees it.

    ``chunked``: its buffer is cut among the ranks. ``in_place``: the API works in place, else into
    another buffer.
    """

    name: str
    chunked: bool
    in_place: bool
    reduces: bool
    rooted: bool
    takes_codec: bool

    def factor(self, num_ranks: int) -> float:
        """Return busbw / algbw: how much of the buffer each rank must at least send or receive."""
        if self.name == "broadcast":
            return 1.0
        share = (num_ranks - 1) / num_ranks
        return 2 * share if self.name == "all_reduce" else share


OPERATIONS = {
    item.name: item
    for item in (
        Operation("all_gather", True, False, False, False, True),
        Operation("reduce_scatter", True, False, True, False, True),
        Operation("all_reduce", False, True, True, False, True),
        Operation("all_to_all", True, False, False, False, False),
        Operation("broadcast", False, True, False, True, False),
    )
}


@dataclass(frozen=True)
class Case:
    """One row's question; ``count`` is a rank's chunk, or the whole buffer where nothing is cut."""

    operation: Operation
    dtype: DataType
    count: int
    num_ranks: int
    op: str | None = None
    root: int | None = None
    codec: str | tuple[str, ...] | None = None
    algorithm: str = "auto"

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.count * self.num_ranks if self.operation.chunked else self.count

    @property
    def size(self) -> int:
        """Bytes of the whole buffer: the first column."""
        return self.numel * self.dtype.itemsize

    def busbw(self, algbw: float) -> float:
        """Return the bus bandwidth that belongs to an algorithm bandwidth."""
        return algbw * self.operation.factor(self.num_ranks)


def count_of(operation: Operation, dtype: DataType, nbytes: int, num_ranks: int) -> int:
    """Return the ``count`` of a case for a buffer of at most ``nbytes`` bytes in all."""
    total = nbytes // dtype.itemsize
    if not operation.chunked:
        return total
    multiple = _ALIGNMENT_NBYTES // dtype.itemsize
    return total // num_ranks // multiple * multiple


def sweep(minimum: int, maximum: int, *, factor: int | None, step: int) -> list[int]:
    """Return the sizes from ``minimum`` to ``maximum`` bytes, by a ``factor`` or a ``step``."""
    sizes = []
    size = minimum
    while size <= maximum:
        sizes.append(size)
        size = size * factor if factor else size + step
    return sizes
