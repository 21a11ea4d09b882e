"""The kinds of arrays that callers have (NumPy, torch, CuPy), each behind the same few functions.

A *kind* is asked what an array is and where its bytes lie, and makes arrays of its own. torch and
CuPy are never imported here: an array of theirs cannot exist otherwise. A reader must not assume
that the memory of a torch tensor is host memory.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Protocol

import numpy as np

from zcomm.device import DeviceMemory, Memory
from zcomm.subnormals import exact_subnormals


class ArrayKind(Protocol):
    """One library's arrays."""

    def matches(self, x: object) -> bool:
        """Tell whether ``x`` is an array of this kind."""

    def on_device(self, x: Any) -> bool:
        """Tell whether the host cannot read its memory."""

    def dtype(self, x: Any) -> str:
        """Return the name of the dtype, as NumPy would say it."""

    def is_contiguous(self, x: Any) -> bool:
        """Tell whether the elements lie one after the other in row-major order."""

    def contiguous(self, x: Any) -> Any:
        """Return ``x`` itself, or a contiguous copy."""

    def flat(self, x: Any) -> Any:
        """Return a contiguous array as a one-dimensional one of the same memory."""

    def memory(self, flat: Any) -> Memory:
        """Return the bytes of a one-dimensional contiguous array."""

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
        """Allocate an array in the place of ``like``, of its dtype unless one is named."""

    def cast(self, x: Any, dtype: str) -> Any:
        """Return a copy in another dtype of NumPy's; subnormal numbers stay what they are."""

    def fill(self, x: Any, value: int) -> None:
        """Write one value everywhere."""

    def assign(self, target: Any, source: Any) -> None:
        """Copy ``source`` into ``target``, converting nothing but the dtype."""


class NumpyKind:
    """NumPy arrays: host memory."""

    def matches(self, x: object) -> bool:
        """See :class:`ArrayKind`."""
        return isinstance(x, np.ndarray)

    def on_device(self, x: Any) -> bool:
        """See :class:`ArrayKind`."""
        return False

    def dtype(self, x: Any) -> str:
        """See :class:`ArrayKind`."""
        return _name(x.dtype)

    def is_contiguous(self, x: Any) -> bool:
        """See :class:`ArrayKind`."""
        return bool(x.flags.c_contiguous)

    def contiguous(self, x: Any) -> Any:
        """See :class:`ArrayKind`."""
        return x if x.flags.c_contiguous else np.ascontiguousarray(x)

    def flat(self, x: Any) -> Any:
        """See :class:`ArrayKind`."""
        return x.reshape(-1)

    def memory(self, flat: Any) -> Memory:
        """See :class:`ArrayKind`."""
        return flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
        """See :class:`ArrayKind`."""
        return np.empty(shape, dtype=like.dtype if dtype is None else np.dtype(dtype))

    def cast(self, x: Any, dtype: str) -> Any:
        """See :class:`ArrayKind`."""
        with exact_subnormals(), np.errstate(over="ignore", invalid="ignore"):
            return x.astype(dtype)

    def fill(self, x: Any, value: int) -> None:
        """See :class:`ArrayKind`."""
        x.fill(value)

    def assign(self, target: Any, source: Any) -> None:
        """See :class:`ArrayKind`."""
        if target.dtype != source.dtype:
            source = self.cast(source, str(target.dtype))
        np.copyto(target, source)


class TorchKind:
    """torch tensors on the CPU or on a CUDA device."""

    def matches(self, x: object) -> bool:
        """See :class:`ArrayKind`."""
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(x, torch.Tensor)

    def on_device(self, x: Any) -> bool:
        """See :class:`ArrayKind`."""
        return bool(x.device.type != "cpu")

    def dtype(self, x: Any) -> str:
        """See :class:`ArrayKind`.

        Raises:
            TypeError: the tensor lies on a device that is neither the CPU nor CUDA, or is sparse.
        """
        if x.device.type not in ("cpu", "cuda"):
            raise TypeError(
                f"array on device {str(x.device)!r}: possible are host arrays (torch, NumPy) and "
                "CUDA arrays (torch, CuPy)"
            )
        if x.layout is not sys.modules["torch"].strided:
            raise TypeError(
                f"tensor of layout {x.layout}: possible are dense ones, as to_dense() returns"
            )
        return _name(x.dtype)

    def is_contiguous(self, x: Any) -> bool:
        """See :class:`ArrayKind`."""
        return bool(x.is_contiguous() and not x.is_neg() and not x.is_conj())

    def contiguous(self, x: Any) -> Any:
        """See :class:`ArrayKind`."""
        # A negated or conjugated view differs from its memory: torch keeps a bit that says so.
        return x.detach().resolve_conj().resolve_neg().contiguous()

    def flat(self, x: Any) -> Any:
        """See :class:`ArrayKind`."""
        # A contiguous tensor may still have odd strides, where an extent is 0 or 1.
        return sys.modules["torch"].as_strided(x.detach(), (x.numel(),), (1,))

    def memory(self, flat: Any) -> Memory:
        """See :class:`ArrayKind`."""
        if flat.device.type == "cpu":
            memory: Memory = flat.view(sys.modules["torch"].uint8).numpy()
            return memory
        from zcomm.cuda import cuda_device

        nbytes = flat.numel() * flat.element_size()
        return DeviceMemory(flat.data_ptr(), nbytes, cuda_device(flat.device.index), flat)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
        """See :class:`ArrayKind`."""
        torch = sys.modules["torch"]
        chosen = like.dtype if dtype is None else getattr(torch, dtype)
        return torch.empty(shape, dtype=chosen, device=like.device)

    def cast(self, x: Any, dtype: str) -> Any:
        """See :class:`ArrayKind`."""
        torch = sys.modules["torch"]
        if self.on_device(x):
            return x.detach().to(getattr(torch, dtype))
        # Not by torch, whose threads may flush subnormal numbers whatever this one does.
        return torch.from_numpy(NumpyKind().cast(self.contiguous(x).numpy(), dtype))

    def fill(self, x: Any, value: int) -> None:
        """See :class:`ArrayKind`."""
        x.fill_(value)

    def assign(self, target: Any, source: Any) -> None:
        """See :class:`ArrayKind`."""
        if self.dtype(target) == "float64" != self.dtype(source) and not self.on_device(source):
            source = self.cast(source, "float64")
        target.detach().copy_(source)


class CupyKind:
    """CuPy arrays, with or without torch: nothing here needs it."""

    def matches(self, x: object) -> bool:
        """See :class:`ArrayKind`."""
        cupy = sys.modules.get("cupy")
        return cupy is not None and isinstance(x, cupy.ndarray)

    def on_device(self, x: Any) -> bool:
        """See :class:`ArrayKind`."""
        return True

    def dtype(self, x: Any) -> str:
        """See :class:`ArrayKind`."""
        return _name(x.dtype)

    def is_contiguous(self, x: Any) -> bool:
        """See :class:`ArrayKind`."""
        return bool(x.flags.c_contiguous)

    def contiguous(self, x: Any) -> Any:
        """See :class:`ArrayKind`."""
        if x.flags.c_contiguous:
            return x
        with x.device:
            return sys.modules["cupy"].ascontiguousarray(x)

    def flat(self, x: Any) -> Any:
        """See :class:`ArrayKind`."""
        return x.reshape(-1)

    def memory(self, flat: Any) -> Memory:
        """See :class:`ArrayKind`."""
        from zcomm.cuda import cuda_device

        return DeviceMemory(flat.data.ptr, flat.nbytes, cuda_device(flat.device.id), flat)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
        """See :class:`ArrayKind`."""
        with like.device:
            return sys.modules["cupy"].empty(shape, dtype=like.dtype if dtype is None else dtype)

    def cast(self, x: Any, dtype: str) -> Any:
        """See :class:`ArrayKind`."""
        with x.device:
            return x.astype(dtype)

    def fill(self, x: Any, value: int) -> None:
        """See :class:`ArrayKind`."""
        with x.device:
            x.fill(value)

    def assign(self, target: Any, source: Any) -> None:
        """See :class:`ArrayKind`."""
        with target.device:
            sys.modules["cupy"].copyto(target, source, casting="unsafe")


@functools.cache
def _name(dtype: Any) -> str:
    """Return the name of a dtype; NumPy takes longer to say it than a small call may last."""
    return str(dtype).removeprefix("torch.")


KINDS: list[ArrayKind] = [TorchKind(), NumpyKind(), CupyKind()]
"""In the order in which they are asked; tests add one of their own."""


def on_device(x: object) -> bool:
    """Tell whether ``x`` is an array whose memory the host cannot read."""
    return any(kind.matches(x) and kind.on_device(x) for kind in KINDS)


def kind_of(x: object) -> ArrayKind:
    """Return the kind of an array.

    Raises:
        TypeError: it is an array of no known kind.
    """
    found = _OF_TYPE.get(type(x))
    if found is not None:
        return found
    for kind in KINDS:
        if kind.matches(x):
            _OF_TYPE[type(x)] = kind
            return kind
    raise TypeError(
        f"expected a torch tensor, a NumPy array or a CuPy array, got a {type(x).__qualname__}"
    )


_OF_TYPE: dict[type, ArrayKind] = {}
