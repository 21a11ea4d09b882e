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
from zcomm.kinds import kind_of

from .wire import ITEMSIZE


def dtype_name(dtype: Any) -> str:
    """Return the name of a NumPy or torch dtype, or of one given by name.

    Raises:
        TypeError: it is none of float32, float16, bfloat16.
    """
    name = _name(dtype)
    if name not in ITEMSIZE:
        raise TypeError(f"dtype {name}: possible are {', '.join(ITEMSIZE)}")
    return name


def encoded_dtype(dtype: Any) -> str:
    """Return the name of the dtype that arrays of ``dtype`` are encoded from.

    Raises:
        TypeError: it is none of float64, which becomes float32, float32, float16, bfloat16.
    """
    return "float32" if _name(dtype) == "float64" else dtype_name(dtype)


def _name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    return str(np.dtype(dtype) if isinstance(dtype, type) else dtype).removeprefix("torch.")


def view(x: Any) -> tuple[Memory, str]:
    """Return the memory of an array of any kind; float64 becomes float32.

    Raises:
        TypeError: it is none, or its dtype is none of float64, float32, float16, bfloat16.
    """
    if arrays.dtype_name(x) == "float64":
        x = arrays.cast(x, "float32")
    return arrays.view(arrays.contiguous(x)).memory, dtype_name(x.dtype)


def float64(x: Any) -> Memory | None:
    """Return the memory of an array of float64, None for any other."""
    return arrays.view(arrays.contiguous(x)).memory if arrays.dtype_name(x) == "float64" else None


def message(nbytes: int, x: Any) -> tuple[Any, Memory]:
    """Return a new array for the message of ``x`` and its memory, in the place where ``x`` lies."""
    if not arrays.on_device(x):
        wire = np.empty(nbytes, np.uint8)
        return wire, wire
    made = arrays.empty(x, (nbytes,), "uint8")
    return made, arrays.view(made).memory


def received(wire: Any) -> Memory:
    """Return the memory of a message: an array of uint8, or bytes.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(wire, bytes | bytearray | memoryview):
        held = memoryview(wire)
        return np.frombuffer(held if held.c_contiguous else held.tobytes(), np.uint8)
    name = kind_of(wire).dtype(wire)
    if name != "uint8":
        raise TypeError(f"wire of {name}: expected uint8, as encode returns it")
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
        tensor = torch.empty(numel, dtype=dtype, device="cpu")
        return tensor, view(tensor)[0]
    if dtype_name(dtype) == "bfloat16" and isinstance(dtype, str):
        raise TypeError("NumPy has no dtype bfloat16: give torch.bfloat16")
    array = np.empty(numel, dtype)
    return array, array.view(np.uint8)
