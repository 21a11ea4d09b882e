"""A swap whose failures an engine remembers: what failed once is said by every later call.

After an error states in memory and on disk may be of different steps, so nothing may go on with
them. A reader must not assume that an engine without a disk has no faults: a step in blocks that
ended in its middle is one too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from zcomm.errors import OffloadError
from zero.offload.swap import Extent, Pending, Swap


@dataclass(frozen=True)
class _Fault:
    """What an error said. Not the error: its frames hold the model, which would never be freed."""

    words: str
    path: str
    offset: int | None


class Faults:
    """Whether the states of an engine can still be used."""

    def __init__(self) -> None:
        self._first: _Fault | None = None

    def check(self) -> None:
        """Raise OffloadError where something failed before, saying what."""
        if self._first is not None:
            raise OffloadError(
                "the states of this model cannot be used any more, load the last checkpoint in a"
                f" new process: earlier, {self._first.words}",
                path=self._first.path,
                offset=self._first.offset,
            )

    def note(self, error: BaseException) -> None:
        """Remember an error; the first one counts."""
        if self._first is None:
            self._first = _Fault(
                f"{type(error).__name__}: {error}",
                getattr(error, "path", ""),
                getattr(error, "offset", None),
            )

    @contextmanager
    def watch(self, kind: type[BaseException] = BaseException) -> Iterator[None]:
        """Remember what is raised inside, if it is of a kind."""
        try:
            yield
        except kind as error:
            self.note(error)
            raise


class Watched:
    """Something on its way to or from the disk, whose failure is remembered."""

    def __init__(self, pending: Pending, faults: Faults) -> None:
        self._pending = pending
        self._faults = faults

    def wait(self, *, noted: bool = True) -> None:
        """Wait for it; raises OffloadError where it failed, which is remembered unless told so."""
        if not noted:
            self._pending.wait()
            return
        with self._faults.watch():
            self._pending.wait()


class Drive:
    """The disk of one engine on one rank."""

    def __init__(self, swap: Swap, faults: Faults) -> None:
        self.swap = swap
        self.faults = faults

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of the memory that is lent, or waits to be."""
        return self.swap.buffers_nbytes

    def allocate(self, name: str, nbytes: int) -> Extent:
        """Reserve disk space."""
        with self.faults.watch():
            return self.swap.allocate(name, nbytes)

    def free(self, extent: Extent) -> None:
        """Give disk space back."""
        with self.faults.watch():
            self.swap.free(extent)

    def buffer(self, nbytes: int) -> Tensor:
        """Lend memory that the disk reads and writes without a copy: uint8, 1-D."""
        return self.swap.buffer(nbytes)

    def give_back(self, memory: Tensor) -> None:
        """Take memory back."""
        self.swap.give_back(memory)

    def read(self, extent: Extent, into: Tensor) -> Watched:
        """Begin to read."""
        with self.faults.watch():
            return Watched(self.swap.read(extent, into), self.faults)

    def write(self, extent: Extent, values: Tensor) -> Watched:
        """Begin to write; ``values`` stay as they are until it has ended."""
        with self.faults.watch():
            return Watched(self.swap.write(extent, values), self.faults)
