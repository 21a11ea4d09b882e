"""Zero-copy views of the caller's arrays, and the scratch memory of the collectives.

A *view* is what the rest of zcomm works on: the bytes of a contiguous torch or NumPy array, with
the name of its dtype. The view borrows the memory: it is valid as long as the array is. bfloat16,
which NumPy lacks, is a name like any other here; arithmetic on it is the codecs' business.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]

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
    """The bytes of one contiguous array (uint8, one-dimensional) and its element dtype."""

    memory: Memory
    dtype: str

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
        TypeError: for anything but a CPU torch tensor or a NumPy array of a supported dtype.
    """
    if is_torch(x):
        if x.device.type != "cpu":
            raise TypeError(
                f"array on device {str(x.device)!r}: possible are host arrays (torch, NumPy)"
            )
    elif not isinstance(x, np.ndarray):
        raise TypeError(f"expected a torch tensor or a NumPy array, got a {type(x).__qualname__}")
    name = str(x.dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise TypeError(f"dtype {name} cannot be sent; possible: {', '.join(ITEMSIZE)}")
    return name


def contiguous(x: Any) -> Any:
    """Return ``x`` itself where it is contiguous, else a contiguous copy of the same kind."""
    if is_torch(x):
        return x.detach().contiguous()
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)


def is_contiguous(x: Any) -> bool:
    """Tell whether the elements of ``x`` lie one after the other in row-major order."""
    return bool(x.is_contiguous() if is_torch(x) else x.flags.c_contiguous)


def view(x: Any) -> View:
    """Return the view of a contiguous array."""
    name = dtype_name(x)
    if not is_contiguous(x):
        raise ValueError(
            f"array of shape {tuple(x.shape)} is not contiguous: it cannot be written in place"
        )
    if is_torch(x):
        torch = sys.modules["torch"]
        # A contiguous tensor may still have odd strides, where an extent is 0 or 1.
        flat = torch.as_strided(x.detach(), (x.numel(),), (1,))
        return View(flat.view(torch.uint8).numpy(), name)
    if x.size == 0:
        return View(np.empty(0, np.uint8), name)
    return View(x.reshape(-1).view(np.uint8), name)


def empty(like: Any, shape: Sequence[int], dtype: str | None = None) -> Any:
    """Allocate an array of the kind (torch or NumPy) and, unless named, the dtype of ``like``."""
    if is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(
            tuple(shape), dtype=like.dtype if dtype is None else getattr(torch, dtype)
        )
    return np.empty(tuple(shape), dtype=like.dtype if dtype is None else np.dtype(dtype))


def assign(target: Any, source: Any) -> None:
    """Copy ``source`` into ``target``, converting and broadcasting nothing but the dtype."""
    if is_torch(target):
        target.detach().copy_(source)
    else:
        np.copyto(target, source, casting="unsafe")


class BufferPool:
    """Scratch memory that is page-touched once and used again, by one thread at a time."""

    def __init__(self) -> None:
        self._free: dict[int, list[Memory]] = {}

    def take(self, nbytes: int) -> Memory:
        """Return ``nbytes`` bytes of undefined content; give them back with :meth:`give`."""
        size = 1 << max(12, (nbytes - 1).bit_length())
        stack = self._free.get(size)
        return (stack.pop() if stack else np.empty(size, np.uint8))[:nbytes]

    def give(self, *memories: Memory) -> None:
        """Take back what :meth:`take` returned."""
        for memory in memories:
            base = memory.base
            assert isinstance(base, np.ndarray)
            self._free.setdefault(base.size, []).append(base)

    def clear(self) -> None:
        """Release all memory that nobody holds."""
        self._free.clear()
