"""Zero-copy views of the caller's arrays, and the scratch memory of the collectives.

A *view* is what the rest of zcomm works on: the bytes of a contiguous torch, NumPy or CuPy array,
with the name of its dtype. The view borrows the memory: it is valid as long as the array is.
bfloat16, which NumPy lacks, is a name like any other here; arithmetic on it is the codecs'
business. Memory is host memory (a NumPy array of bytes) or device memory: a reader must not index
bytes, only cut and copy them (``zcomm.device``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zcomm.device import DeviceMemory, HostMemory, Memory
from zcomm.kinds import kind_of, on_device

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})
HALF = frozenset({"float16", "bfloat16"})


@dataclass(frozen=True)
class View:
    """The bytes of one contiguous array and its element dtype.

    ``array`` is that array, one-dimensional; None for scratch memory.
    """

    memory: Memory
    dtype: str
    array: Any = field(default=None, repr=False, compare=False)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.memory.size // ITEMSIZE[self.dtype]

    def elements(self, start: int, numel: int) -> Memory:
        """Return the bytes of ``numel`` elements from element ``start``."""
        size = ITEMSIZE[self.dtype]
        return self.memory[start * size : (start + numel) * size]


def is_torch(x: object) -> bool:
    """Tell whether ``x`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def dtype_name(x: Any) -> str:
    """Return the dtype of an array by its NumPy name (``"bfloat16"`` included).

    Raises:
        TypeError: for anything but an array of a known kind and a supported dtype.
    """
    return _known(kind_of(x).dtype(x))


def _known(name: str) -> str:
    if name not in ITEMSIZE:
        raise TypeError(f"dtype {name} cannot be sent; possible: {', '.join(ITEMSIZE)}")
    return name


def contiguous(x: Any) -> Any:
    """Return ``x`` itself where it is contiguous, else a contiguous copy of the same kind."""
    return kind_of(x).contiguous(x)


def is_contiguous(x: Any) -> bool:
    """Tell whether the elements of ``x`` lie one after the other in row-major order."""
    return kind_of(x).is_contiguous(x)


def view(x: Any) -> View:
    """Return the view of a contiguous array."""
    kind = kind_of(x)
    name = _known(kind.dtype(x))
    if not kind.is_contiguous(x):
        raise ValueError(
            f"array of shape {tuple(x.shape)} is not contiguous: it cannot be written in place"
        )
    flat = kind.flat(x)
    return View(kind.memory(flat), name, flat)


def address(memory: Memory) -> int:
    """Return where memory begins."""
    return memory.pointer if isinstance(memory, DeviceMemory) else int(memory.ctypes.data)


def overlap(a: Memory, b: Memory) -> bool:
    """Tell whether two memories, both on the host or on one device, have a byte in common."""
    start, other = address(a), address(b)
    return min(a.size, b.size) > 0 and start < other + b.size and other < start + a.size


def copied(x: Any) -> Any:
    """Return a contiguous copy of an array."""
    made = empty(x, x.shape)
    assign(made, x)
    return made


def empty(like: Any, shape: Sequence[int], dtype: str | None = None) -> Any:
    """Allocate an array of the kind, in the place and, unless named, of the dtype of ``like``."""
    return kind_of(like).empty(like, tuple(shape), dtype)


def zeros(like: Any, shape: Sequence[int], dtype: str) -> Any:
    """Allocate an array of zeros of the kind and in the place of ``like``."""
    made = empty(like, shape, dtype)
    kind_of(made).fill(made, 0)
    return made


def cast(x: Any, dtype: str) -> Any:
    """Return a copy of an array in another dtype of NumPy's."""
    return kind_of(x).cast(x, dtype)


def assign(target: Any, source: Any) -> None:
    """Copy ``source`` into ``target``, converting and broadcasting nothing but the dtype."""
    kind_of(target).assign(target, source)


class BufferPool:
    """Scratch memory that is page-touched once and used again, by one thread at a time.

    Device memory is not kept: the allocators of torch and CuPy are pools that know streams.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[HostMemory]] = {}

    def take(self, nbytes: int, like: Memory) -> Memory:
        """Return ``nbytes`` bytes of undefined content in the place where ``like`` lies.

        Give them back with :meth:`give`.
        """
        if isinstance(like, DeviceMemory):
            return like.device.empty(nbytes)
        size = 1 << max(12, (nbytes - 1).bit_length())
        stack = self._free.get(size)
        return (stack.pop() if stack else np.empty(size, np.uint8))[:nbytes]

    def give(self, *memories: Memory) -> None:
        """Take back what :meth:`take` returned."""
        for memory in memories:
            if isinstance(memory, DeviceMemory):
                continue
            base = memory.base
            assert isinstance(base, np.ndarray)
            self._free.setdefault(base.size, []).append(base)

    def clear(self) -> None:
        """Release all memory that nobody holds."""
        self._free.clear()


__all__ = [
    "BufferPool",
    "DeviceMemory",
    "HostMemory",
    "Memory",
    "View",
    "assign",
    "cast",
    "contiguous",
    "dtype_name",
    "empty",
    "is_contiguous",
    "is_torch",
    "on_device",
    "view",
    "zeros",
]
