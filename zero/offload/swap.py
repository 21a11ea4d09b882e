"""Tensors on a disk: extents of one file, checksummed, written and read in the background.

An *extent* is a part of the file, with disk space of its own, for the bytes of one tensor at a
time. A *piece* is what one request moves: of a large tensor worker threads have several in flight.
Each piece has a checksum (XXH3, 64 bits), which the worker makes while others wait for the disk. It
is kept in memory, so that a write that the disk lost is found as a flipped bit is.

Any thread may call; operations on one extent take effect in the order of the calls. The file has no
name (see ``file.py``): nothing is left when the process is gone, however it ended.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor
from xxhash import xxh3_64_intdigest as checksum

from zcomm.errors import OffloadError
from zero.offload.file import SwapFile
from zero.offload.memory import BufferPool, Memory, memory_of, rounded
from zero.offload.pending import Pending, again
from zero.offload.space import Space
from zero.offload.stats import Meter, SwapStats, Waits

logger = logging.getLogger("zcomm")

__all__ = ["Extent", "Pending", "Swap", "SwapStats"]

_GROWTH_NBYTES = 1 << 24


@dataclass(frozen=True, eq=False)
class Extent:
    """Disk space for one tensor.

    Attributes:
        name: for messages.
        nbytes: the most that can be written to it.
        offset: in the file.
        capacity: ``nbytes`` rounded up to the alignment.
    """

    name: str
    nbytes: int
    offset: int
    capacity: int


@dataclass(eq=False)
class _Content:
    """What an extent holds, and who is at it: ``checksums`` of pieces that ``write`` fills in."""

    nbytes: int = 0
    checksums: list[int] = field(default_factory=list)
    write: Pending | None = None
    reads: list[Pending] = field(default_factory=list)

    def settle(self, *, reads: bool) -> None:
        """Return when the last write, and the reads, have ended."""
        if self.write is not None:
            self.write.settle()
        for pending in self.reads if reads else ():
            pending.settle()
        self.reads = [pending for pending in self.reads if not pending.done]


class Swap:
    """Disk space of one rank in a folder, for the bytes of tensors.

    Args:
        directory: an existing folder on the disk.
        rank: for messages.
        buffer_nbytes: of a piece; rounded up to the alignment.
        num_threads: pieces that are in flight at once.

    Raises:
        OffloadError: no file can be made there.
        ValueError: ``buffer_nbytes`` or ``num_threads`` is less than 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int,
        buffer_nbytes: int = 1 << 23,
        num_threads: int = 4,
    ) -> None:
        if buffer_nbytes < 1 or num_threads < 1:
            raise ValueError(
                f"buffer_nbytes={buffer_nbytes}, num_threads={num_threads}: at least 1"
            )
        self.rank = rank
        self._piece_nbytes = rounded(buffer_nbytes)
        self._file: SwapFile | None = SwapFile(directory, self._piece_nbytes)
        if not self._file.direct:
            # Of the ranks of a job one speaks.
            logger.log(
                logging.INFO if rank else logging.WARNING,
                "%s takes no direct I/O (O_DIRECT): what is swapped there passes through the page"
                " cache, which takes memory and time",
                self._file.folder,
            )
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._space = Space()
        self._reserved = 0
        self._contents: dict[Extent, _Content] = {}
        self._pool = BufferPool()
        self._written, self._read, self._waits = Meter(), Meter(), Waits()
        # Workers take it while a caller may hold the other one and wait for them.
        self._ledger = threading.Lock()
        self._failed: list[tuple[Pending, BaseException]] = []
        self._workers = ThreadPoolExecutor(num_threads, thread_name_prefix=f"swap-{rank}")

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> str:
        """The absolute path of the folder."""
        return self._opened().folder

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by."""
        return self._opened().direct

    @property
    def stats(self) -> SwapStats:
        """What was moved until now, and the disk space."""
        with self._lock:
            return SwapStats(
                self._written.nbytes,
                self._read.nbytes,
                self._written.seconds,
                self._read.seconds,
                self._waits.seconds,
                self._reserved,
                self._space.end - self._space.free,
            )

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of the buffers that are lent, or wait to be."""
        return self._pool.lent_nbytes + self._pool.free_nbytes

    def allocate(self, name: str, nbytes: int) -> Extent:
        """Reserve disk space for ``nbytes`` >= 0 bytes; it has no content yet.

        Raises:
            OffloadError: the disk is full, or the folder is gone.
        """
        if nbytes < 0:
            raise ValueError(f"an extent of {nbytes} bytes: at least 0")
        with self._lock:
            file = self._opened()
            file.check()
            capacity = rounded(nbytes)
            extent = Extent(name, nbytes, self._placed(file, capacity), capacity)
            self._contents[extent] = _Content()
            return extent

    def _placed(self, file: SwapFile, capacity: int) -> int:
        if not capacity:
            return 0
        start = self._space.take(capacity)
        if start is not None:
            return start
        missing = self._space.end + capacity - self._reserved
        if missing > 0:
            self._reserve(file, missing)
        return self._space.grow(capacity)

    def _reserve(self, file: SwapFile, missing: int) -> None:
        """Extend the file by what is missing; in large steps as long as the disk has them."""
        for nbytes in (max(missing, _GROWTH_NBYTES), missing):
            try:
                file.reserve(self._reserved, nbytes)
            except OffloadError:
                if nbytes == missing:
                    raise
            else:
                self._reserved += nbytes
                return

    def free(self, extent: Extent) -> None:
        """Make an extent's disk space free for others, once what was started on it has ended.

        Raises:
            ValueError: it is not an extent of this swap, or it is free already.
        """
        with self._lock:
            self._content(extent).settle(reads=True)
            del self._contents[extent]
            if extent.capacity:
                self._space.give(extent.offset, extent.capacity)

    def buffer(self, nbytes: int) -> Tensor:
        """Lend host memory that the disk reads and writes without a copy; not initialised.

        Returns:
            A 1-D uint8 tensor that starts at a page, pinned where there is a GPU.
        """
        return self._pool.take(nbytes)

    def give_back(self, buffer: Tensor) -> None:
        """Take back a buffer, or a view of it; the caller uses none any more.

        Raises:
            ValueError: it is not lent.
        """
        self._pool.give(buffer)

    def write(self, extent: Extent, data: Tensor) -> Pending:
        """Start to write a contiguous tensor in host memory, which stays as it is until ``wait``.

        What the extent held before is lost, also when the write fails.

        Raises:
            ValueError: it is larger than the extent, not contiguous, or on a device.
        """
        memory = memory_of(data)
        if len(memory) > extent.nbytes:
            raise ValueError(
                f"{len(memory)} bytes for {extent.name}, whose extent has {extent.nbytes}"
            )
        with self._lock:
            file, content = self._opened(), self._content(extent)
            content.settle(reads=True)
            pieces = list(self._pieces(memory))
            checksums = [0] * len(pieces)

            def write(index: int, piece: Memory) -> None:
                with self._written.moving(len(piece)):
                    checksums[index] = checksum(piece.data)
                    file.check()
                    file.write(piece, extent.offset + index * self._piece_nbytes)

            content.nbytes, content.checksums = len(memory), checksums
            content.write = self._started(write, pieces)
            return content.write

    def read(self, extent: Extent, into: Tensor) -> Pending:
        """Start to read what was written last, into as many bytes of host memory.

        Raises:
            OffloadError: nothing was written, or the last write failed.
            ValueError: ``into`` has another size, is not contiguous, or is on a device.
        """
        memory = memory_of(into)
        with self._lock:
            file, content = self._opened(), self._content(extent)
            content.settle(reads=False)
            self._check_written(extent, content)
            if len(memory) != content.nbytes:
                raise ValueError(
                    f"{len(memory)} bytes to read {extent.name} into, which has {content.nbytes}"
                )
            checksums = content.checksums

            def read(index: int, piece: Memory) -> None:
                with self._read.moving(len(piece)):
                    offset = extent.offset + index * self._piece_nbytes
                    file.check()
                    file.read(piece, offset)
                    found, wanted = checksum(piece.data), checksums[index]
                if found != wanted:
                    raise OffloadError(
                        f"{extent.name} was damaged on the disk: {len(piece)} bytes at offset"
                        f" {offset} of the swap file in {file.folder} have checksum {found:016x},"
                        f" what was written has {wanted:016x}",
                        path=file.folder,
                        offset=offset,
                    )

            pending = self._started(read, list(self._pieces(memory)))
            content.reads.append(pending)
            return pending

    def check(self) -> None:
        """Make sure that the folder is there, and that nothing failed that nobody waited for.

        Raises:
            OffloadError: which it is.
        """
        self._opened().check()
        for pending, error in self._unreported():
            pending.reported = True
            raise again(error)

    def close(self) -> None:
        """Finish what was started and give the disk space back. Again, it does nothing.

        A failure that nobody waited for is logged.
        """
        with self._lock:
            file, self._file = self._file, None
        if file is None:
            return
        if os.getpid() == self._process:  # a forked child has neither the threads nor the work
            self._workers.shutdown()
            for _, error in self._unreported():
                logger.error("rank %d: nobody waited for this: %s", self.rank, error)
        file.close()
        self._contents.clear()
        self._pool.clear()

    def _pieces(self, memory: Memory) -> Iterator[Memory]:
        for start in range(0, len(memory), self._piece_nbytes):
            yield memory[start : start + self._piece_nbytes]

    def _started(self, move: Callable[[int, Memory], None], pieces: list[Memory]) -> Pending:
        pending = Pending(self._waits.add)

        def run(index: int, piece: Memory) -> None:
            try:
                move(index, piece)
            except BaseException as error:
                with self._ledger:
                    self._failed.append((pending, error))
                raise

        for index, piece in enumerate(pieces):
            pending.add(self._workers.submit(run, index, piece))
        return pending

    def _unreported(self) -> list[tuple[Pending, BaseException]]:
        with self._ledger:
            self._failed = [(p, e) for p, e in self._failed if not p.reported]
            return list(self._failed)

    def _check_written(self, extent: Extent, content: _Content) -> None:
        error = None if content.write is None else content.write.error
        if content.write is None or error is not None:
            why = "nothing was written to it" if error is None else f"its write failed: {error}"
            folder = self._opened().folder
            raise OffloadError(
                f"cannot read {extent.name} at offset {extent.offset} of the swap file in {folder}:"
                f" {why}",
                path=folder,
                offset=extent.offset,
            )

    def _content(self, extent: Extent) -> _Content:
        content = self._contents.get(extent)
        if content is None:
            raise ValueError(f"{extent.name} is no extent of this swap, or was freed")
        return content

    def _opened(self) -> SwapFile:
        if self._file is None:
            raise ValueError("the swap was closed")
        if os.getpid() != self._process:
            raise OffloadError(
                f"process {os.getpid()} was forked from {self._process}, whose swap this is:"
                " it cannot use it",
                path=self._file.folder,
            )
        return self._file
