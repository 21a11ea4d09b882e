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


class Tally:
    """Calls that are alike: ``calls`` of them so far, each counting what ``per_call`` says."""

    __slots__ = ("calls", "per_call")

    def __init__(self, per_call: dict[tuple[str, int], Counter]) -> None:
        self.per_call = per_call
        self.calls = 0


class Traffic:
    """Counters of one process, shared by a communicator and its sub-communicators."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, int], list[int]] = {}
        self._tallies: list[Tally] = []

    def tally(self, per_call: dict[tuple[str, int], Counter]) -> Tally:
        """Return a tally that counts here, for calls that are made often."""
        made = Tally(per_call)
        self._tallies.append(made)
        return made

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
        return {key: Counter(*values) for key, values in sorted(self._totals().items())}

    def _totals(self) -> dict[tuple[str, int], list[int]]:
        totals = {key: list(values) for key, values in self._counters.items()}
        for tally in self._tallies:
            for key, each in tally.per_call.items() if tally.calls else ():
                total = totals.setdefault(key, [0, 0, 0])
                total[0] += tally.calls * each.calls
                total[1] += tally.calls * each.logical_nbytes
                total[2] += tally.calls * each.wire_nbytes
        return totals

    def wire_nbytes(self, level: int | None = None, operation: str | None = None) -> int:
        """Sum the wire bytes sent by this rank: over one level or all, of one operation or all.

        Level 0 is the innermost. The guard's handshakes are the operation ``"guard"``; they count
        where no operation is named.
        """
        return sum(
            counter[2]
            for (name, at), counter in self._totals().items()
            if (level is None or at == level) and (operation is None or name == operation)
        )

    def reset(self) -> None:
        """Start again from zero."""
        self._counters.clear()
        for tally in self._tallies:
            tally.calls = 0


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

    def add(self, phase: str, seconds: float) -> None:
        """Add a duration to ``phase``."""
        self._seconds[phase] += seconds

    def snapshot(self) -> dict[str, float]:
        """Return ``{"encode": s, "comm": s, "decode": s}``."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Start again from zero."""
        self._seconds.update(dict.fromkeys(self._seconds, 0.0))
