"""Seeds of stochastic rounding: a pure function of what is rounded, where and when.

Every call has a seed of its own, made from (base seed, rank in the job, number of the call); every
chunk that a call encodes has one made from that and (hop, shard, item). So draws are independent,
and a job that is run again gives the same bits. A reader must not assume that ranks draw alike:
each encodes what it alone encodes, and replicas are equal because all of them decode it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from zcomm.codecs import Codec
from zcomm.codecs.codec import check_seed

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, odd


def derive(base: int, *numbers: int) -> int:
    """Return a 64-bit seed made from a base seed and any numbers, taken modulo 2^64.

    ``h = mix(base + step)``, then for each number ``h = mix((h xor number) + step)``, modulo 2^64,
    with the finalizer of SplitMix64 as ``mix`` (Steele, Lea, Flood: Fast splittable pseudorandom
    number generators, 2014). It is a bijection in each argument while the others stay.
    """
    state = _mix((base + _STEP) & _MASK)
    for number in numbers:
        state = _mix(((state ^ (number & _MASK)) + _STEP) & _MASK)
    return state


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True)
class Draws:
    """The seeds of one call, made from ``numbers``; derived when a codec asks for one.

    ``fixed``: the caller gave the one seed of all that the call encodes.
    """

    base: int
    numbers: tuple[int, ...] = ()
    fixed: bool = False

    def of(self, codec: Codec | None, *where: int) -> int:
        """Return the seed of one chunk, 0 where the codec draws nothing."""
        if codec is None or codec.rounding != "stochastic":
            return 0
        return self.base if self.fixed else derive(self.base, *self.numbers, *where)

    def stage(self, number: int) -> Draws:
        """Return the seeds of one part of a call that has several."""
        return Draws(self.base, (*self.numbers, number))


class Calls:
    """Counts the calls of one rank, all its communicators together."""

    def __init__(self, base: int, rank: int) -> None:
        self._base = base
        self._rank = rank
        self._numbers = itertools.count()

    def draws(self) -> Draws:
        """Return the seeds of the next call."""
        return Draws(self._base, (self._rank, next(self._numbers)))

    def skip(self) -> None:
        """Count a call that draws nothing."""
        next(self._numbers)

    def given(self, seed: int) -> Draws:
        """Return the seeds of a call of this rank where the caller gave a seed."""
        return Draws(seed, (self._rank,))


__all__ = ["Calls", "Draws", "check_seed", "derive"]
