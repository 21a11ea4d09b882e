"""How much was moved to and from a disk, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class SwapStats:
    """What a swap has moved since it was made.

    Attributes:
        written_nbytes: of tensors, without what alignment adds.
        read_nbytes: likewise.
        write_seconds: in which at least one piece was being written, its checksum included.
        read_seconds: likewise.
        wait_seconds: for which callers were blocked in ``Pending.wait``.
        reserved_nbytes: disk space that the file has now.
        used_nbytes: of it, in extents.
    """

    written_nbytes: int
    read_nbytes: int
    write_seconds: float
    read_seconds: float
    wait_seconds: float
    reserved_nbytes: int
    used_nbytes: int


class Waits:
    """Seconds for which callers were blocked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count some more."""
        with self._lock:
            self.seconds += seconds


class Meter:
    """Bytes of one direction, and the seconds in which some were in flight."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self.nbytes = 0
        self.seconds = 0.0

    @contextmanager
    def moving(self, nbytes: int) -> Iterator[None]:
        """Count bytes that are moved inside, where that does not fail."""
        with self._lock:
            if not self._active:
                self._since = time.perf_counter()
            self._active += 1
        moved = 0
        try:
            yield
            moved = nbytes
        finally:
            with self._lock:
                self._active -= 1
                self.nbytes += moved
                if not self._active:
                    self.seconds += time.perf_counter() - self._since
