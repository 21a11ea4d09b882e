"""Arrays of the caller's kind as raw memory, and back.

*Memory* is a 1-D uint8 array and the name of the dtype that it holds. torch is imported only where
the caller already has: a torch tensor or dtype cannot exist otherwise. Do not assume a copy, nor
that there is none: memory of a contiguous array is the array's own.
"""

import sys
from typing import Any

import numpy as np

from .wire import ITEMSIZE, Bytes


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


def view(x: Any) -> tuple[Bytes, str]:
    """Return the memory of a NumPy array or CPU torch tensor; float64 becomes float32.

    Raises:
        TypeError: it is neither, or its dtype is none of float64, float32, float16, bfloat16.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _view_torch(torch, x)
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{type(x).__name__} given: a NumPy array or a torch tensor is expected")
    if x.dtype == np.float64:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
    flat: Bytes = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return flat, dtype_name(x.dtype)


def empty(numel: int, dtype: Any) -> tuple[Any, Bytes]:
    """Return a new 1-D array of ``numel`` elements and its memory.

    A torch dtype gives a torch tensor, a NumPy dtype or a name a NumPy array.

    Raises:
        TypeError: bfloat16 is given by name, which NumPy does not have.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        tensor = torch.empty(numel, dtype=dtype)
        return tensor, view(tensor)[0]
    if dtype_name(dtype) == "bfloat16" and isinstance(dtype, str):
        raise TypeError("NumPy has no dtype bfloat16: give torch.bfloat16")
    array = np.empty(numel, dtype)
    return array, array.view(np.uint8)


def _view_torch(torch: Any, x: Any) -> tuple[Bytes, str]:
    if x.device.type != "cpu":
        raise TypeError(f"tensor on {x.device}: the codec works on the CPU")
    if x.dtype == torch.float64:
        x = x.to(torch.float32)
    name = dtype_name(x.dtype)
    flat: Bytes = x.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return flat, name
