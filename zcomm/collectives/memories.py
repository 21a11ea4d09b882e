"""The memories that one piece works on, by number, and regions of them.

A collective works out once what it does with a piece, for whatever arrays it is given later. So its
memories have numbers: the arrays of the call come first, then the slot of the window that this rank
writes, scratch memory, and the slots of near peers. A *region* is a run of bytes of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zcomm.arrays import ITEMSIZE, Memory, View
from zcomm.collectives.wire import Place
from zcomm.layout import Indices

LINE_NBYTES = 64
"""Messages in a slot, and regions of scratch memory, start at multiples of this many bytes."""

Rows = npt.NDArray[np.int64]
"""Where memories lie, for native programs: (address, bytes) of each."""

Bind = Callable[[Rows, int, Any], None]
"""Writes where a memory lies to a row, see :func:`zcomm.codecs.native.bind`."""


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

    __slots__ = ("_all", "_views", "rows")

    def __init__(self, views: Sequence[View], memories: list[Memory], rows: Rows | None) -> None:
        self._views = views
        self._all = memories
        self.rows = rows

    @staticmethod
    def of_call(views: Sequence[View], bind: Bind | None) -> Memories:
        """Return the memories of the caller's arrays; ``bind`` is that of the native kernels."""
        memories = [view.memory for view in views]
        if bind is None:
            return Memories(views, memories, None)
        rows = np.empty((len(memories), 2), np.int64)
        for row, memory in enumerate(memories):
            bind(rows, row, memory)
        return Memories(views, memories, rows)

    def of_piece(self, own: Sequence[Memory], bind: Bind | None) -> Memories:
        """Return these memories, followed by those of one piece."""
        memories = [*self._all, *own]
        if bind is None or self.rows is None:
            return Memories(self._views, memories, None)
        first = len(self.rows)
        rows = np.empty((len(memories), 2), np.int64)
        rows[:first] = self.rows
        for row, memory in enumerate(own, first):
            bind(rows, row, memory)
        return Memories(self._views, memories, rows)

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
