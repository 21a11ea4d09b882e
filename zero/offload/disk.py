"""What one buffer has on disk: columns of its masters and states, and the shard of parameters.

Words defined here:

- **column**: one float of every element of a block, or one state of the optimizer: what is read
  and written as one. ``VALUE`` is the masters themselves, ``state.NAME`` the optimizer's.
- **loading**: a tensor that is being read; ``wait`` returns it, ``release`` gives its memory back.

A reader must not assume that a column has values for a master whose state does not exist yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero.offload.blocks import Block
from zero.offload.drive import Drive, Watched
from zero.offload.memory import rounded
from zero.offload.swap import Extent

_IN_FLIGHT = 2

VALUE = "value"
STATE = "state."


@dataclass(frozen=True, eq=False)
class Column:
    """The place of a block's column, and the dtype of what lies there."""

    dtype: torch.dtype
    extent: Extent
    nbytes: int


class Loading:
    """Memory of the pool that is being read into, or was made to be written."""

    def __init__(
        self, drive: Drive, memory: Tensor, dtype: torch.dtype, pending: Watched | None
    ) -> None:
        self._drive = drive
        self._memory = memory
        self._pending = pending
        self.tensor = memory.view(dtype)

    def wait(self, *, noted: bool = True) -> Tensor:
        """Return the tensor when it has been read, and its checksum is right."""
        if self._pending is not None:
            self._pending.wait(noted=noted)
            self._pending = None
        return self.tensor

    def release(self) -> None:
        """Give the memory back; the tensor is used no more."""
        self._drive.give_back(self._memory)


class Columns:
    """The columns of all blocks of one buffer."""

    def __init__(
        self, drive: Drive, name: str, numels: Sequence[int], blocks: Sequence[Block]
    ) -> None:
        self._drive = drive
        self._name = name
        self._numels = numels
        self._columns: list[dict[str, Column]] = [{} for _ in blocks]
        self.blocks = tuple(blocks)
        self.states: list[tuple[str, ...]] = [() for _ in numels]
        """For each master the names of its states that are on disk."""

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(column.nbytes for columns in self._columns for column in columns.values())

    def all_names(self) -> dict[str, torch.dtype]:
        """Return the columns that any block has, and their dtypes."""
        return {n: column.dtype for columns in self._columns for n, column in columns.items()}

    def names(self, index: int) -> tuple[str, ...]:
        """Return the columns that a block has."""
        return tuple(self._columns[index])

    def nbytes_to_come(self, states: Sequence[Mapping[str, torch.dtype]]) -> int:
        """Return the disk space of columns that a step will make.

        Args:
            states: for each master those per element that it will have, and their dtypes.
        """
        nbytes = 0
        for index, block in enumerate(self.blocks):
            coming = {k: v for piece in block.pieces for k, v in states[piece.master].items()}
            for name, dtype in coming.items():
                if STATE + name not in self._columns[index]:
                    nbytes += rounded(block.numel * dtype.itemsize)
        return nbytes

    def read(self, index: int, name: str) -> Loading:
        """Begin to read a block's column."""
        column = self._columns[index][name]
        memory = self._drive.buffer(column.nbytes)
        return Loading(self._drive, memory, column.dtype, self._drive.read(column.extent, memory))

    def empty(self, index: int, dtype: torch.dtype) -> Loading:
        """Return memory for a block's column, all zeros."""
        memory = self._drive.buffer(self.blocks[index].numel * dtype.itemsize)
        return Loading(self._drive, memory.zero_(), dtype, None)

    def write(self, index: int, name: str, values: Tensor) -> Watched:
        """Begin to write a block's column, which is made where there is none of the dtype."""
        column = self._columns[index].get(name)
        if column is None or column.dtype != values.dtype:
            if column is not None:
                self._drive.free(column.extent)
            extent = self._drive.allocate(f"{self._name}.{index}.{name}", values.nbytes)
            column = self._columns[index][name] = Column(values.dtype, extent, values.nbytes)
        return self._drive.write(column.extent, values)

    def load(self, name: str) -> list[Tensor]:
        """Read a column of all masters into new memory: one tensor each, without history.

        What lies there for a master without such a state is zero.
        """
        dtypes = {c[name].dtype for c in self._columns if name in c}
        (dtype,) = dtypes or {torch.float32}
        whole = torch.zeros(sum(self._numels), dtype=dtype, device="cpu")
        reading: deque[tuple[Block, Loading]] = deque()

        def take() -> None:
            block, loading = reading.popleft()
            whole[block.first : block.first + block.numel].copy_(loading.wait())
            loading.release()

        for index, block in enumerate(self.blocks):
            if name in self._columns[index]:
                reading.append((block, self.read(index, name)))
            if len(reading) == _IN_FLIGHT:
                take()
        while reading:
            take()
        return list(torch.split(whole, list(self._numels)))

    def store(self, name: str, parts: Sequence[Tensor | None]) -> None:
        """Write a column of all masters; None is zero."""
        dtype = next(part.dtype for part in parts if part is not None)
        writing: deque[tuple[Watched, Loading]] = deque()
        for index, block in enumerate(self.blocks):
            memory = self.empty(index, dtype)
            for piece in block.pieces:
                part = parts[piece.master]
                if part is not None:
                    place = memory.tensor[piece.start : piece.start + piece.numel]
                    place.copy_(part[piece.offset : piece.offset + piece.numel])
            writing.append((self.write(index, name, memory.tensor), memory))
            if len(writing) == _IN_FLIGHT:
                _settle(*writing.popleft())
        while writing:
            _settle(*writing.popleft())

    def forget_states(self) -> None:
        """Free the columns of all states."""
        for columns in self._columns:
            for name in [name for name in columns if name != VALUE]:
                self._drive.free(columns.pop(name).extent)
        self.states = [() for _ in self._numels]


class StoredShard:
    """A shard of parameters on disk; of no elements it is nowhere."""

    def __init__(self, drive: Drive, name: str, shard: Tensor) -> None:
        self._drive = drive
        self._dtype = shard.dtype
        self._writing: tuple[Watched, Loading] | None = None
        self.nbytes = shard.nbytes
        self._extent = drive.allocate(name, shard.nbytes) if shard.nbytes else None
        self.store(shard)

    def begin(self) -> Loading:
        """Begin to read the shard into memory of the pool."""
        self.settle()
        memory = self._drive.buffer(self.nbytes)
        pending = None if self._extent is None else self._drive.read(self._extent, memory)
        return Loading(self._drive, memory, self._dtype, pending)

    def empty(self) -> Loading:
        """Return memory of the pool for a new shard."""
        return Loading(self._drive, self._drive.buffer(self.nbytes), self._dtype, None)

    def load(self) -> Tensor:
        """Return the shard in new memory."""
        loading = self.begin()
        shard = loading.wait().clone()
        loading.release()
        return shard

    def store(self, shard: Tensor) -> None:
        """Write a new shard."""
        self.settle()
        if self._extent is not None:
            self._drive.write(self._extent, shard).wait()

    def begin_store(self, loading: Loading) -> None:
        """Begin to write a new shard; its memory is given back by :meth:`settle`."""
        self.settle()
        if self._extent is None:
            loading.release()
        else:
            self._writing = self._drive.write(self._extent, loading.tensor), loading

    def settle(self) -> None:
        """Wait for what is being written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            _settle(*writing)


def _settle(writing: Watched, memory: Loading) -> None:
    """Wait for what is being written, and give its memory back."""
    writing.wait()
    memory.release()
