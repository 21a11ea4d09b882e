"""Who owns which elements of a flat buffer: segments, and layouts of shards made of them.

A *layout* says for every rank which *segments* (runs of elements) of a flat full buffer are its
shard. Shards may be empty, uneven, and in any order; segments must not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

ALIGNMENT = 4096
"""Shards of a cut-up tensor (all_reduce) start at multiples of this many elements: whole blocks of
every codec."""


@dataclass(frozen=True)
class Segment:
    """A run of ``numel`` elements of a flat buffer, from element ``start``.

    Blocks of a codec restart here.
    """

    start: int
    numel: int


@dataclass(frozen=True, eq=False)
class Layout:
    """For every rank, in order, the segments of a flat full buffer that are its shard.

    The *compact* form of a shard is its segments one after the other. Layouts compare by content.
    """

    dtype: str
    shards: tuple[tuple[Segment, ...], ...]

    @staticmethod
    def even(dtype: str, numel: int, size: int) -> Layout:
        """Cut elements, a multiple of ``size``, into equal runs in rank order."""
        return _even(dtype, numel, size)

    @staticmethod
    def cut(dtype: str, numel: int, size: int) -> Layout:
        """Cut any number of elements into runs in rank order, multiples of ``ALIGNMENT``."""
        return _cut(dtype, numel, size)

    @cached_property
    def numel(self) -> int:
        """Elements of all shards."""
        return sum(self.shard_numel(rank) for rank in range(len(self.shards)))

    @cached_property
    def extent(self) -> int:
        """Elements that the full buffer must have."""
        return max(
            (segment.start + segment.numel for shard in self.shards for segment in shard), default=0
        )

    def shard_numel(self, rank: int) -> int:
        """Elements of one rank's shard."""
        return sum(self.lengths(rank))

    def lengths(self, rank: int) -> tuple[int, ...]:
        """Segment lengths of one rank's shard."""
        return tuple(segment.numel for segment in self.shards[rank])

    @cached_property
    def _tables(self) -> tuple[tuple[Indices, Indices, Indices], ...]:
        tables = []
        for shard in self.shards:
            starts = np.array([segment.start for segment in shard], np.int64)
            lengths = np.array([segment.numel for segment in shard], np.int64)
            tables.append((starts, lengths, np.cumsum(lengths) - lengths))
        return tuple(tables)

    def table(self, rank: int, *, compact: bool = False) -> tuple[Indices, Indices]:
        """Return (starts, lengths) of a shard's segments, in the full buffer or compact."""
        starts, lengths, packed = self._tables[rank]
        return (packed if compact else starts), lengths

    def run(self, rank: int, *, compact: bool = False) -> Segment | None:
        """Return the shard as one run of elements, or None where it lies in several."""
        starts, lengths = self.table(rank, compact=compact)
        if len(starts) == 0:
            return Segment(0, 0)
        ends = starts + lengths
        if np.array_equal(starts[1:], ends[:-1]):
            return Segment(int(starts[0]), int(ends[-1] - starts[0]))
        return None

    @cached_property
    def key(self) -> bytes:
        """Digest of the content: layouts with equal keys are equal."""
        digest = blake2b(f"{self.dtype}/{len(self.shards)}".encode(), digest_size=16)
        for starts, lengths, _ in self._tables:
            digest.update(np.int64(len(starts)).tobytes() + starts.tobytes() + lengths.tobytes())
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=1024)
def _even(dtype: str, numel: int, size: int) -> Layout:
    each = numel // size
    return Layout(dtype, tuple((Segment(rank * each, each),) for rank in range(size)))


@lru_cache(maxsize=1024)
def _cut(dtype: str, numel: int, size: int) -> Layout:
    blocks = -(-numel // (size * ALIGNMENT))
    bounds = [min(rank * blocks * ALIGNMENT, numel) for rank in range(size + 1)]
    return Layout(dtype, tuple((Segment(lo, hi - lo),) for lo, hi in pairwise(bounds)))
