"""Which parts of a file are in use: offsets and lengths, all multiples of one alignment.

A *hole* is a part that was freed. Holes that touch are one. A part is cut from the smallest hole
that holds it, else the file grows: its end moves, and never back.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class Space:
    """Parts of one file, from 0 to ``end``."""

    def __init__(self) -> None:
        self.end = 0
        self._by_size: list[tuple[int, int]] = []  # (length, start), sorted
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}

    def take(self, length: int) -> int | None:
        """Return the start of a part cut from a hole, or None where no hole is large enough."""
        index = bisect_left(self._by_size, (length, 0))
        if index == len(self._by_size):
            return None
        size, start = self._by_size[index]
        self._forget(start, size)
        if size > length:
            self._remember(start + length, size - length)
        return start

    def grow(self, length: int) -> int:
        """Return the start of a part at the end, which moves."""
        start = self.end
        self.end += length
        return start

    def give(self, start: int, length: int) -> None:
        """Make a part that was in use a hole."""
        before = self._by_end.get(start)
        if before is not None:
            size = start - before
            self._forget(before, size)
            start, length = before, length + size
        after = self._by_start.get(start + length)
        if after is not None:
            self._forget(start + length, after)
            length += after
        self._remember(start, length)

    @property
    def free(self) -> int:
        """Bytes in holes."""
        return sum(self._by_start.values())

    def _remember(self, start: int, length: int) -> None:
        insort(self._by_size, (length, start))
        self._by_start[start] = length
        self._by_end[start + length] = start

    def _forget(self, start: int, length: int) -> None:
        del self._by_size[bisect_left(self._by_size, (length, start))]
        del self._by_start[start]
        del self._by_end[start + length]
