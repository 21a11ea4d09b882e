"""What autograd keeps of parameters between forward and backward, when they are sharded.

Autograd saves tensors that look into the whole buffer of a unit, and would keep its memory alive.
While a unit's module runs, a pair of saved-tensor hooks replaces each of them by a note of where
it looked; the note becomes a tensor again in backward, in the buffer that is gathered by then (or
is gathered for it). Everything else is passed on to the hooks that were active before, so
activation checkpointing and offloading of activations keep working.

Torch does not check versions of tensors that went through hooks; the notes do, for both kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero.tensor_parallel import is_distributed, pack_distributed, unpack_distributed
from zero.unit import Buffer, Unit

PackHook = Callable[[Tensor], Any]
UnpackHook = Callable[[Any], Tensor]


@dataclass(frozen=True, eq=False)
class SavedWeight:
    """Where a tensor looked into a unit's buffer, in the version of then."""

    unit: Unit
    buffer: Buffer
    version: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class SavedOther:
    """A tensor that belongs to no unit, or what the hooks below ours made of it."""

    value: Any
    version: int
    unpack: UnpackHook | None


@dataclass(frozen=True, eq=False)
class SavedDistributed:
    """A DTensor: what was made of its local part, and its place in the mesh."""

    local: Any
    spec: Any


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile from looking into a hook: it breaks its graph there."""
    hidden: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return hidden


class SavedWeights:
    """The hooks; ``whole`` makes a unit whole for backward."""

    def __init__(self, whole: Callable[[Unit], None]) -> None:
        self._whole = whole
        self._owners: dict[int, tuple[Unit, Buffer]] = {}
        self._pushed: list[PackHook | None] = []
        self._hidden_unpack = untraced(self._unpack)

    def add(self, unit: Unit) -> None:
        """Know the memory of a unit that has become whole."""
        for buffer in unit.buffers:
            if buffer.full is not None and buffer.full.numel():
                self._owners[buffer.full.untyped_storage().data_ptr()] = (unit, buffer)

    def remove(self, unit: Unit) -> None:
        """Forget the memory of a unit, before it is freed and its address used again."""
        for buffer in unit.buffers:
            if buffer.full is not None:
                self._owners.pop(buffer.full.untyped_storage().data_ptr(), None)

    def enter(self) -> None:
        """Activate the hooks, unless they are the active ones."""
        below = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if not torch.is_grad_enabled() or (below and below[0] in self._pushed):
            self._pushed.append(None)
            return
        # torch.compile would look into the hooks, and compile them for each kind of tensor.
        pack = untraced(self._pack_above(below))
        torch._C._autograd._push_saved_tensors_default_hooks(pack, self._hidden_unpack)
        self._pushed.append(pack)

    def leave(self) -> None:
        """Undo the last :meth:`enter`."""
        if self._pushed.pop() is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def _pack_above(self, below: tuple[PackHook, UnpackHook] | None) -> PackHook:
        def pack(tensor: Tensor) -> SavedWeight | SavedOther | SavedDistributed:
            if is_distributed(tensor):
                return SavedDistributed(*pack_distributed(tensor, pack))
            found = self._owners.get(tensor.untyped_storage().data_ptr())
            if found is None:
                if below is not None:
                    return SavedOther(below[0](tensor), 0, below[1])
                return SavedOther(tensor, tensor._version, None)
            unit, buffer = found
            return SavedWeight(
                unit,
                buffer,
                unit.version,
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                int(tensor.storage_offset()),
            )

        return pack

    def _unpack(self, saved: SavedWeight | SavedOther | SavedDistributed) -> Tensor:
        if isinstance(saved, SavedDistributed):
            return unpack_distributed(self._unpack(saved.local), saved.spec)
        if isinstance(saved, SavedOther):
            if saved.unpack is not None:
                return saved.unpack(saved.value)
            if saved.value._version != saved.version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(saved.value.shape)} needed for the backward was"
                    f" changed in place (version {saved.value._version}, saved {saved.version})"
                )
            tensor: Tensor = saved.value
            return tensor
        if saved.version != saved.unit.version:
            raise RuntimeError(
                f"parameters of {saved.unit.name or 'the root unit'} needed for the backward were"
                f" changed since the forward (version {saved.unit.version}, saved {saved.version})"
            )
        self._whole(saved.unit)
        assert saved.buffer.full is not None
        storage = saved.buffer.full.untyped_storage()
        empty = torch.empty(0, dtype=saved.dtype, device=storage.device)
        return empty.set_(storage, saved.offset, saved.shape, saved.stride)
