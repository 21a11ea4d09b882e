"""Blocks in memory, for as long as a step works on them.

Words defined here:

- **opened** block: its pieces as tensors that an optimizer can step, with their states.
- **kept** states: those that are not one value per element, such as step counts. They stay in
  ``optimizer.state`` of the master.

States that a step makes or keeps are noted in a ledger, and put in place when all blocks are done:
all pieces of a master start from the same.

A reader must not assume that a piece's tensor is the tensor in the optimizer's groups.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from zero.offload.blocks import Block, Piece
from zero.offload.disk import STATE, VALUE, Columns, Loading
from zero.offload.drive import Watched
from zero.offload.stepping import States
from zero.unit import Buffer, Master


@dataclass(eq=False)
class Ledger:
    """What a step makes of states: by master those in memory, and the names of those on disk."""

    states: dict[Tensor, States] = field(default_factory=dict)
    names: dict[tuple[Columns, int], tuple[str, ...]] = field(default_factory=dict)

    def commit(self, states: MutableMapping[Tensor, States]) -> None:
        """Put everything in place: the step is done."""
        for master, found in self.states.items():
            states.setdefault(master, {}).update(found)
        for (columns, index), names in self.names.items():
            columns.states[index] = names


class Opened(Protocol):
    """A block on its way: ``open``, step the tensors, ``close``, ``finish``."""

    block: Block

    def open(self) -> list[tuple[Tensor, States]]:
        """Return for every piece its values, float32, and a state of its own."""

    def close(self, states: Sequence[States]) -> None:
        """Take the states after a step, empty ones for what has none; begin to write."""

    def finish(self) -> None:
        """Wait until everything is where it stays."""


def per_element(value: object, numel: int) -> bool:
    """Tell whether a state of the optimizer has one value for each of a piece's elements."""
    return isinstance(value, Tensor) and value.shape == (numel,)


def on_disk(
    columns: Columns, index: int, master: Master, states: Mapping[Tensor, States]
) -> tuple[str, ...]:
    """Return the names of a master's states on disk: none where the user dropped its state.

    ``optimizer.state.clear()`` takes what is kept away, and with it what is on disk.
    """
    return columns.states[index] if master.tensor in states else ()


def cloned(value: Any) -> Any:
    """Copy a kept state: a step changes it once for each piece."""
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


class InMemory:
    """A block of masters and states that are in host memory: pieces are views of them."""

    def __init__(
        self, buffer: Buffer, block: Block, states: Mapping[Tensor, States], ledger: Ledger
    ) -> None:
        self.block = block
        self._masters = buffer.masters
        self._states = states
        self._ledger = ledger

    def open(self) -> list[tuple[Tensor, States]]:
        """See :class:`Opened`."""
        return [self._piece(piece) for piece in self.block.pieces]

    def _piece(self, piece: Piece) -> tuple[Tensor, States]:
        master = self._masters[piece.master].tensor
        states = {
            key: part(value, piece) if per_element(value, master.numel()) else cloned(value)
            for key, value in self._states.get(master, {}).items()
        }
        return part(master, piece), states

    def close(self, states: Sequence[States]) -> None:
        """See :class:`Opened`."""
        for piece, found in zip(self.block.pieces, states, strict=True):
            if found:
                master = self._masters[piece.master].tensor
                whole = self._ledger.states.setdefault(master, {})
                before = self._states.get(master, {})
                for key, value in found.items():
                    if not per_element(value, piece.numel) or piece.numel == master.numel():
                        whole[key] = value
                    else:
                        place = part(self._whole(key, value, master, before, whole), piece)
                        if place.data_ptr() != value.data_ptr():
                            place.copy_(value)

    def _whole(
        self, key: str, value: Tensor, master: Tensor, before: States, new: States
    ) -> Tensor:
        """Return the state of a whole master; it is made for its first piece."""
        if key not in new:
            old = before.get(key)
            kept = per_element(old, master.numel())
            new[key] = old if kept else torch.empty_like(master, dtype=value.dtype)
        whole: Tensor = new[key]
        return whole

    def finish(self) -> None:
        """See :class:`Opened`."""


class OnDisk:
    """A block of masters and states that are on disk; it is read from when it is made."""

    def __init__(
        self,
        buffer: Buffer,
        index: int,
        states: Mapping[Tensor, States],
        ledger: Ledger,
        *,
        values_only: bool,
    ) -> None:
        columns = buffer.columns
        assert columns is not None
        self.block = columns.blocks[index]
        self._columns = columns
        self._index = index
        self._masters = buffer.masters
        self._states = states
        self._ledger = ledger
        names = (VALUE,) if values_only else columns.names(index)
        self._loadings = {name: columns.read(index, name) for name in names}
        self._writing: list[Watched] = []

    def open(self) -> list[tuple[Tensor, States]]:
        """See :class:`Opened`."""
        for loading in self._loadings.values():
            loading.wait()
        return [self._piece(piece) for piece in self.block.pieces]

    def _piece(self, piece: Piece) -> tuple[Tensor, States]:
        master = self._masters[piece.master]
        states = {
            name.removeprefix(STATE): self._place(self._loadings[name], piece)
            for name in on_disk(self._columns, piece.master, master, self._states)
            if name in self._loadings
        }
        for key, value in self._states.get(master.tensor, {}).items():
            states[key] = cloned(value)
        return self._place(self._loadings[VALUE], piece), states

    def _place(self, loading: Loading, piece: Piece) -> Tensor:
        return loading.tensor[piece.start : piece.start + piece.numel]

    def close(self, states: Sequence[States]) -> None:
        """See :class:`Opened`."""
        for piece, found in zip(self.block.pieces, states, strict=True):
            if found:
                kept = {key: v for key, v in found.items() if not per_element(v, piece.numel)}
                names = tuple(
                    self._take(piece, key, found[key]) for key in found if key not in kept
                )
                self._ledger.states[self._masters[piece.master].tensor] = kept
                self._ledger.names[self._columns, piece.master] = names
        for name, loading in self._loadings.items():
            self._writing.append(self._columns.write(self._index, name, loading.tensor))

    def _take(self, piece: Piece, key: str, value: Tensor) -> str:
        """Bring a state into the memory of its column; return the column's name."""
        name = STATE + key
        if name not in self._loadings:
            self._loadings[name] = self._columns.empty(self._index, value.dtype)
        place = self._place(self._loadings[name], piece)
        if place.dtype != value.dtype:
            raise TypeError(f"optimizer state {key} was {place.dtype} and is {value.dtype} now")
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)
        return name

    def finish(self) -> None:
        """See :class:`Opened`."""
        for writing in self._writing:
            writing.wait()
        for loading in self._loadings.values():
            loading.release()


def part(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece's elements of a master, or of a state of one."""
    return tensor[piece.offset : piece.offset + piece.numel]


def gradient(master: Master, piece: Piece, inverse: float) -> Tensor | None:
    """Return a piece's gradient, float32 and multiplied by ``inverse``; None where there is none.

    One that is float32 is changed in place, as it is without offload.
    """
    if master.tensor.grad is None:
        return None
    grad = part(master.tensor.grad, piece).to(torch.float32)
    return grad if inverse == 1 else grad.mul_(inverse)
