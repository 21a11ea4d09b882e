"""Sizes and rates on command lines: ``1.5GiB``, ``24GB``, ``2.1GB/s``, and how they are printed."""

from __future__ import annotations

import argparse
import math
import re

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d+\.?\d*|\.\d+)(e\d+)?\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)


def size_nbytes(text: str) -> float:
    """Return the bytes of ``1.5GiB`` (units of 1024), ``24GB`` (of 1000) or ``2e9``.

    Raises:
        argparse.ArgumentTypeError: the text is no size, or not more than 0.
    """
    value, _ = _parsed(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"'{text}' is no size: write 1.5GiB, 24GB or 2e9")
    return value


def rate_nbytes(text: str) -> float:
    """Return the bytes per second of ``2.1GB/s``, ``2.1GB`` or ``2e9``.

    Raises:
        argparse.ArgumentTypeError: the text is no rate, not more than 0, or may be in bits: ``Gb``.
    """
    value, unit = _parsed(text.strip().removesuffix("/s"))
    if not (math.isfinite(value) and value > 0) or unit == "b":
        raise argparse.ArgumentTypeError(
            f"'{text}' is no rate in bytes per second: write 2.1GB/s or 2e9"
        )
    return value


def _parsed(text: str) -> tuple[float, str]:
    """Return the value, 0 where there is none, and the letter for bytes or bits."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return 0.0, ""
    number, exponent, unit, binary, letter = match.groups()
    scale: float = (1024 if binary else 1000) ** _UNITS[unit.lower()]
    return float(number + (exponent or "")) * scale, letter


def gigabytes(nbytes: float) -> str:
    """Return GB as the ZeRO paper prints them: 120, 41.3 (of 41.25), 1.88."""
    value = nbytes / 1e9 * (1 + 1e-12)
    if value >= 100:
        return f"{value:.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"
