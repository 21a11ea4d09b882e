"""What was sent, to the byte, and where the time went.

*Wire bytes* are counted where they are handed to the transport; *logical bytes* are what the same
elements hold in the caller's dtype, so their ratio is the compression. Both are per operation and
per level of the topology: the level of a byte is the smallest one whose group holds sender and
receiver. Only what this rank sent is counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Counter:
    """Calls that touched a level, and the bytes that this rank sent over it."""

    calls: int = 0
    logical_nbytes: int = 0
    wire_nbytes: int = 0


class Traffic:
    """Counters of one process, shared by a communicator and its sub-communicators."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, int], list[int]] = {}

    def record(
        self, operation: str, level: int, *, calls: int = 0, logical: int = 0, wire: int = 0
    ) -> None:
        """Add to the counters of (operation, level)."""
        counter = self._counters.setdefault((operation, level), [0, 0, 0])
        counter[0] += calls
        counter[1] += logical
        counter[2] += wire

    def snapshot(self) -> dict[tuple[str, int], Counter]:
        """Return ``{(operation, level): Counter}`` as of now."""
        return {key: Counter(*values) for key, values in sorted(self._counters.items())}

    def wire_nbytes(self, level: int | None = None, operation: str | None = None) -> int:
        """Sum the wire bytes sent by this rank: over one level or all, of one operation or all.

        Level 0 is the innermost. The guard's handshakes are the operation ``"guard"``; they count
        where no operation is named.
        """
        return sum(
            counter[2]
            for (name, at), counter in self._counters.items()
            if (level is None or at == level) and (operation is None or name == operation)
        )

    def reset(self) -> None:
        """Start again from zero."""
        self._counters.clear()


class Stopwatch:
    """A context that adds its duration to one entry of a table."""

    __slots__ = ("_phase", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds = seconds
        self._phase = phase

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._phase] += time.perf_counter() - self._start


class Clock:
    """Seconds spent encoding, communicating and decoding, summed since the last reset."""

    def __init__(self) -> None:
        self._seconds = {"encode": 0.0, "comm": 0.0, "decode": 0.0}

    def measure(self, phase: str) -> Stopwatch:
        """Return a context that adds the duration of the block to ``phase``."""
        return Stopwatch(self._seconds, phase)

    def snapshot(self) -> dict[str, float]:
        """Return ``{"encode": s, "comm": s, "decode": s}``."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Start again from zero."""
        self._seconds.update(dict.fromkeys(self._seconds, 0.0))
