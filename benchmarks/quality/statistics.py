"""Paired differences: their mean, standard error and 95 % interval, and what may be claimed.

Every pair is one number, so the interval is Student's with n - 1 degrees of freedom. What all seeds
share (text, model, learning rate) is in no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.quality.train import Run

CONFIDENCE = 0.95
LEAST_LIMIT = 0.002
"""A smaller loss than 0.2 % is not claimed to be absent, nor looked for."""


@dataclass(frozen=True)
class Interval:
    """A mean, its standard error and its 95 % interval."""

    mean: float
    error: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """The end that is farther from zero."""
        return max(abs(self.low), abs(self.high))

    def inside(self, limit: float) -> bool:
        """Tell whether the whole interval lies within ± ``limit``."""
        return self.reach <= limit


def interval(values: Sequence[float]) -> Interval:
    """Return the interval of the mean of independent values.

    Raises:
        ValueError: fewer than two values.
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"{count} values have no interval: at least 2")
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    error = math.sqrt(variance / count)
    half = quantile((1 + CONFIDENCE) / 2, count - 1) * error
    return Interval(mean, error, mean - half, mean + half)


def quantile(probability: float, degrees: int) -> float:
    """Return the value that Student's t exceeds with probability 1 - ``probability``.

    Args:
        probability: more than one half.
        degrees: of freedom.
    """
    low, high = 0.0, 1.0
    while _central(high, degrees) < 2 * probability - 1:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if _central(middle, degrees) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return high


def _central(value: float, degrees: int) -> float:
    """Return the probability of [-value, value] (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(value / math.sqrt(degrees))
    cosine, odd = math.cos(angle), degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(odd, degrees - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * cosine**2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def differences(
    runs: Mapping[tuple[str, int], Run], name: str, reference: str, evaluation: int = -1
) -> dict[int, float]:
    """Return by seed how far a setting's validation loss lies above the reference's, relatively.

    Only seeds that both have.
    """
    seeds = sorted(seed for setting, seed in runs if setting == name)
    return {
        seed: runs[name, seed].validation[evaluation] / runs[reference, seed].validation[evaluation]
        - 1
        for seed in seeds
        if (reference, seed) in runs
    }


def limit_of(floor: Interval) -> float:
    """Return the limit: 0.2 %, or what another order of summation cannot be told from."""
    return max(LEAST_LIMIT, floor.reach)


def verdict(found: Interval, limit: float) -> str:
    """Return what may be claimed of a setting."""
    if found.inside(limit):
        return "no loss"
    if found.low > limit:
        return "a loss"
    return "open"
