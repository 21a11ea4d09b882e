"""The memories that one piece works on, by number, and regions of them.

A collective works out once what it does with a piece, for whatever arrays it is given later. So its
memories have numbers: the arrays of the call come first, then the slot of the window that this rank
writes, scratch memory, and the slots of near peers. A *region* is a run of bytes of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zcomm.arrays import ITEMSIZE, DeviceMemory, Memory, View
from zcomm.collectives.wire import Place
from zcomm.layout import Indices

LINE_NBYTES = 64
"""Messages in a slot, and regions of scratch memory, start at multiples of this many bytes."""

Rows = npt.NDArray[np.int64]
"""Where memories lie, for native programs: (address, bytes) of each."""


class Region(NamedTuple):
    """Bytes ``start`` to ``stop`` of the memory with a number."""

    memory: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.stop - self.start

    def part(self, span: slice) -> Region:
        """Return a part, given in bytes from the start of this one."""
        return Region(self.memory, self.start + span.start, self.start + span.stop)


class Run(NamedTuple):
    """Segments of the array with a number: where the elements of a chunk come from or go to."""

    array: int
    dtype: str
    starts: Indices
    lengths: Indices

    def regions(self) -> Iterator[Region]:
        """Return the bytes of every segment."""
        size = ITEMSIZE[self.dtype]
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            yield Region(self.array, start * size, (start + length) * size)


class Numbers(NamedTuple):
    """The numbers of the memories of a piece, the first ``num_arrays`` being the caller's."""

    num_arrays: int

    @property
    def slot(self) -> int:
        """The slot of this rank's window."""
        return self.num_arrays

    @property
    def scratch(self) -> int:
        """Memory whose content is undefined when a piece begins."""
        return self.num_arrays + 1

    def inbox(self, index: int) -> int:
        """Return the number of the slot of a near peer; these are counted from 0."""
        return self.num_arrays + 2 + index


class Layer:
    """Hands out the bytes of one memory, from its start."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.nbytes = 0

    def take(self, nbytes: int) -> Region:
        """Return a region that nothing else was given."""
        region = Region(self._memory, self.nbytes, self.nbytes + nbytes)
        self.nbytes = -(-region.stop // LINE_NBYTES) * LINE_NBYTES
        return region


class Memories:
    """The memories of a call, or, those of one piece included, of a piece.

    ``rows`` is None where the native kernels do not reach them: on a device, or without the module.
    """

    def __init__(self, views: Sequence[View], all_: list[Memory], rows: Rows | None) -> None:
        self._views = views
        self._all = all_
        self.rows = rows

    @staticmethod
    def of_call(views: Sequence[View], *, native: bool) -> Memories:
        """Return the memories of the caller's arrays."""
        memories = [view.memory for view in views]
        return Memories(views, memories, _bound(memories) if native else None)

    def of_piece(self, own: Sequence[Memory]) -> Memories:
        """Return these memories, followed by those of one piece."""
        rows = None if self.rows is None else _bound(own, self.rows)
        return Memories(self._views, [*self._all, *own], rows)

    @property
    def like(self) -> Memory:
        """Memory in the place of the caller's."""
        return self._all[0]

    def at(self, region: Region) -> Memory:
        """Return the bytes of a region."""
        return self._all[region.memory][region.start : region.stop]

    def place(self, run: Run) -> Place:
        """Return the segments of an array."""
        return Place(self._views[run.array], run.starts, run.lengths)


def _bound(memories: Sequence[Memory], before: Rows | None = None) -> Rows:
    from zcomm.codecs import native

    first = 0 if before is None else len(before)
    rows = np.empty((first + len(memories), 2), np.int64)
    if before is not None:
        rows[:first] = before
    for row, memory in enumerate(memories, first):
        assert not isinstance(memory, DeviceMemory)
        native.bind(rows, row, memory)
    return rows
