"""Sizes and rates on command lines: ``1.5GiB``, ``24GB``, ``2.1GB/s``, and how they are printed."""

from __future__ import annotations

import argparse
import math
import re

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)(i?)b?(?:/s)?", re.IGNORECASE)


def size_nbytes(text: str) -> float:
    """Return the bytes of ``1.5GiB`` (units of 1024), ``24GB`` (of 1000) or ``2e9``; also a rate.

    Raises:
        argparse.ArgumentTypeError: the text is no size, or not more than 0.
    """
    match = _SIZE.fullmatch(text.strip())
    value = 0.0
    if match is not None:
        number, unit, binary = match.groups()
        value = float(number) * (1024 if binary else 1000) ** _UNITS[unit.lower()]
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"'{text}' is no size: write 1.5GiB, 24GB or 2e9")
    return value


def gigabytes(nbytes: float) -> str:
    """Return GB as the ZeRO paper prints them: 120, 41.3 (of 41.25), 1.88."""
    value = nbytes / 1e9 * (1 + 1e-12)
    if value >= 100:
        return f"{value:.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"
