"""Arrays of the caller's kind as raw memory, and back.

*Memory* is a 1-D uint8 array, or memory on a device, and the name of the dtype that it holds. torch
is imported only where the caller already has: a torch tensor or dtype cannot exist otherwise. Do
not assume a copy, nor that there is none: memory of a contiguous array is the array's own.
"""

import sys
from typing import Any

import numpy as np

from zcomm import arrays
from zcomm.device import Memory

from .wire import ITEMSIZE


def dtype_name(dtype: Any) -> str:
    """Return the name of a NumPy or torch dtype, or of one given by name.

    Raises:
        TypeError: it is none of float32, float16, bfloat16.
    """
    name = dtype if isinstance(dtype, str) else str(getattr(dtype, "name", dtype))
    if not isinstance(dtype, str) and name not in ITEMSIZE:
        name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE and isinstance(dtype, type):
        name = np.dtype(dtype).name
    if name not in ITEMSIZE:
        raise TypeError(f"dtype {name}: possible are {', '.join(ITEMSIZE)}")
    return name


def view(x: Any) -> tuple[Memory, str]:
    """Return the memory of an array of any kind; float64 becomes float32.

    Raises:
        TypeError: it is none, or its dtype is none of float64, float32, float16, bfloat16.
    """
    if arrays.dtype_name(x) == "float64":
        with np.errstate(over="ignore"):
            x = arrays.cast(x, "float32")
    return arrays.view(arrays.contiguous(x)).memory, dtype_name(x.dtype)


def message(nbytes: int, x: Any) -> tuple[Any, Memory]:
    """Return a new array for the message of ``x`` and its memory, in the place where ``x`` lies."""
    if not arrays.on_device(x):
        wire = np.empty(nbytes, np.uint8)
        return wire, wire
    made = arrays.empty(x, (nbytes,), "uint8")
    return made, arrays.view(made).memory


def received(wire: Any) -> Memory:
    """Return the memory of a message."""
    if not arrays.on_device(wire):
        return np.asarray(wire, dtype=np.uint8).reshape(-1)
    return arrays.view(arrays.contiguous(wire)).memory


def empty(numel: int, dtype: Any, wire: Any) -> tuple[Any, Memory]:
    """Return a new 1-D array of ``numel`` elements and its memory.

    A torch dtype gives a torch tensor, a NumPy dtype or a name a NumPy array; for a message
    ``wire`` on a device the array is of its kind.

    Raises:
        TypeError: bfloat16 is given by name, which NumPy does not have.
    """
    if arrays.on_device(wire):
        made = arrays.empty(wire, (numel,), dtype_name(dtype))
        return made, arrays.view(made).memory
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        tensor = torch.empty(numel, dtype=dtype)
        return tensor, view(tensor)[0]
    if dtype_name(dtype) == "bfloat16" and isinstance(dtype, str):
        raise TypeError("NumPy has no dtype bfloat16: give torch.bfloat16")
    array = np.empty(numel, dtype)
    return array, array.view(np.uint8)
