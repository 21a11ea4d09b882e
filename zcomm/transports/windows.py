"""Memory that the ranks of one node share: a window per rank, written by it and read by the others.

A window has a fixed size, whatever the messages. Every operation cuts it into *slots*, 4 or 8; both
sides know how many. For every slot and every reader there are two counters: how often the owner has
*published* the slot for this reader, and how often this reader has *released* it. They are equal
when the reader is done with all that was written for it; a slot whose counters are equal for all
readers is free. Counters are never reset, so that no reader takes an old message for a new one.

Both sides must use the slots in the same order. Do not assume that a reader runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from zcomm.device import HostMemory
from zcomm.transports.remote import RemoteMemory, available, probe

if TYPE_CHECKING:
    from mpi4py import MPI

SLOTS_NBYTES = 4 * 1024 * 1024
"""Bytes of all slots of a window: those of a node's ranks should fit its cache together."""

MOST_SLOTS = 8
_LINE = 64
_PAGE = 4096


def window_nbytes(num_ranks: int) -> int:
    """Return the bytes of one rank's window on a node of so many ranks."""
    return 2 * _counters_nbytes(num_ranks) + SLOTS_NBYTES


def _row(num_ranks: int) -> int:
    """Return the counters of one slot, a whole number of cache lines."""
    return -(-num_ranks * 8 // _LINE) * _LINE // 8


def _counters_nbytes(num_ranks: int) -> int:
    return -(-MOST_SLOTS * _row(num_ranks) * 8 // _PAGE) * _PAGE


class _Window:
    """The parts of one rank's window."""

    def __init__(self, memory: HostMemory, num_ranks: int) -> None:
        nbytes, row = _counters_nbytes(num_ranks), _row(num_ranks)
        self.published = memory[:nbytes].view(np.uint64)
        self.released = memory[nbytes : 2 * nbytes].view(np.uint64)
        self.slots = memory[2 * nbytes :][:SLOTS_NBYTES]
        self.readers = [self.released[slot * row :][:num_ranks] for slot in range(MOST_SLOTS)]


class Windows:
    """The windows of a node's ranks, as one of them sees them.

    ``memories[i]`` is the window of the rank ``ranks[i]`` of the transport, all zero at first;
    ``ranks[me]`` is this one.
    """

    def __init__(self, memories: Sequence[HostMemory], ranks: Sequence[int], me: int) -> None:
        self._native: Any = import_module("zcomm._native")
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._me = me
        self._row = _row(len(ranks))
        self._windows = [_Window(memory, len(ranks)) for memory in memories]
        self._published = [np.zeros(len(ranks), np.uint64) for _ in range(MOST_SLOTS)]
        self._read = [[0] * MOST_SLOTS for _ in ranks]
        self._num_slots = MOST_SLOTS
        self.ranks = frozenset(ranks)
        self.remote: RemoteMemory | None = None
        """What reads the memory of these ranks where it lies; None: nothing does."""
        self.reading = ""
        """The same in words, and why."""

    def slot(self, rank: int, slot: int, num_slots: int) -> HostMemory:
        """Return a slot of a rank's window, which is cut into ``num_slots``."""
        nbytes = SLOTS_NBYTES // num_slots
        return self._windows[self._index[rank]].slots[slot * nbytes : (slot + 1) * nbytes]

    def free(self, slot: int, num_slots: int) -> bool:
        """Tell whether this rank may write a slot: all readers have released what was there.

        Where the window was cut otherwise before, all slots must be free.
        """
        readers = self._windows[self._me].readers
        if num_slots == self._num_slots:
            return bool(self._native.equal_counters(readers[slot], self._published[slot]))
        if not all(map(self._native.equal_counters, readers, self._published)):
            return False
        self._num_slots = num_slots
        return True

    def readers(self) -> list[int]:
        """Return the ranks that have not released all slots of this rank."""
        late: set[int] = set()
        for released, published in zip(
            self._windows[self._me].readers, self._published, strict=True
        ):
            late |= set(np.flatnonzero(released != published).tolist())
        return [rank for rank, index in self._index.items() if index in late]

    def publish(self, slot: int, reader: int) -> None:
        """Let a rank read a slot of this rank, which has been written."""
        index = self._index[reader]
        self._published[slot][index] += 1
        where = slot * self._row + index
        count = int(self._published[slot][index])
        self._native.store_counter(self._windows[self._me].published, where, count)

    def arrived(self, rank: int, slot: int) -> bool:
        """Tell whether another rank has published a slot for this one."""
        index = self._index[rank]
        where = slot * self._row + self._me
        count: int = self._native.load_counter(self._windows[index].published, where)
        return count > self._read[index][slot]

    def release(self, rank: int, slot: int) -> None:
        """Let another rank write its slot again: this one has read it."""
        index = self._index[rank]
        self._read[index][slot] += 1
        where = slot * self._row + self._me
        self._native.store_counter(self._windows[index].released, where, self._read[index][slot])


class SharedWindows:
    """The MPI side of :class:`Windows`: what is allocated and freed by all ranks of a node."""

    def __init__(self, world: MPI.Intracomm) -> None:
        from mpi4py import MPI

        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        assert isinstance(node, MPI.Intracomm)
        self._node = node
        self._window: MPI.Win | None = None
        self.windows: Windows | None = None
        size = self._node.Get_size()
        if size > 1 and self._possible():
            self._window = MPI.Win.Allocate_shared(window_nbytes(size), 1, comm=self._node)
            self.windows = self._open(world.Get_rank(), self._window)

    def _possible(self) -> bool:
        """Tell whether all ranks of the node have the native module, and room for windows."""
        size = self._node.Get_size()
        own = int(available() and shared_nbytes() > 2 * size * window_nbytes(size))
        rows = np.empty(size, np.uint8)
        self._node.Allgather(np.array([own], np.uint8), rows)
        return bool(rows.all())

    def _open(self, rank: int, window: MPI.Win) -> Windows:
        ranks = np.empty(self._node.Get_size(), np.int64)
        self._node.Allgather(np.array([rank], np.int64), ranks)
        memories = []
        for index in range(len(ranks)):
            buffer, _ = window.Shared_query(index)
            memories.append(np.frombuffer(memoryview(cast(Any, buffer)), np.uint8))
        me = self._node.Get_rank()
        memories[me][: 2 * _counters_nbytes(len(ranks))] = 0
        made = Windows(memories, ranks.tolist(), me)
        made.remote, reason = probe(self._node, ranks.tolist())  # a barrier, too
        way = "through shared windows" if made.remote is None else "where they lie"
        made.reading = f"ranks of a node read arrays {way} (process_vm_readv: {reason})"
        return made

    def close(self) -> None:
        """Free the windows; all ranks of the node call it."""
        self.windows = None
        if self._window is not None:
            self._window.Free()
        self._node.Free()


def shared_nbytes() -> float:
    """Return the bytes that are free for shared memory, as far as that is known."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return math.inf
    return found.f_bavail * found.f_frsize
