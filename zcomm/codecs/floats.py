"""Numbers of 16 and 32 bits in memory: as float32, and back with one rounding.

*Pattern* means the bits of a number as an unsigned integer. NumPy has no bfloat16, so arrays of it
hold patterns. NaN is written in one form only, by a select. Do not assume that NumPy's own casts
do that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .wire import ITEMSIZE, Bytes

Floats = npt.NDArray[np.float32]

NAN_FLOAT32, NAN_BFLOAT16, NAN_FLOAT16 = 0x7FC00000, 0x7FC0, 0x7E00
INFINITY_BITS = 0x7F800000
SIGN_BIT = 0x80000000
FLOAT16_MAX = np.float32(65504)


def typed(memory: Bytes, dtype: str) -> npt.NDArray[Any]:
    """View memory as elements of ``dtype``; bfloat16 as its patterns."""
    whole = memory[: memory.nbytes // ITEMSIZE[dtype] * ITEMSIZE[dtype]]
    return whole.view({"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype])


def magnitudes(values: Floats) -> npt.NDArray[np.uint32]:
    """Return the patterns of the absolute values."""
    return values.view(np.uint32) & ~np.uint32(SIGN_BIT)


def from_bfloat16(pattern: npt.NDArray[np.uint16]) -> Floats:
    """Return the values whose bfloat16 patterns are given."""
    return (pattern.astype(np.uint32) << 16).view(np.float32)


def to_float32(values: npt.NDArray[Any], dtype: str) -> Floats:
    """Return elements of ``dtype`` (bfloat16: its patterns) as float32, exactly."""
    if dtype == "bfloat16":
        return from_bfloat16(values)
    with np.errstate(invalid="ignore"):
        return values.astype(np.float32)


def from_float32(values: Floats, dtype: str, *, saturate: bool) -> npt.NDArray[Any]:
    """Return values rounded to ``dtype`` (bfloat16: its patterns), half to even; NaN in one form.

    ``saturate``: a finite value that float16 would make infinite becomes its largest one.
    """
    pattern = values.view(np.uint32)
    nan = magnitudes(values) > INFINITY_BITS
    if dtype == "float32":
        return np.where(nan, np.uint32(NAN_FLOAT32), pattern).view(np.float32)
    if dtype == "bfloat16":
        odd = (pattern >> 16) & np.uint32(1)
        rounded = (pattern + np.uint32(0x7FFF) + odd) >> 16
        return np.where(nan, NAN_BFLOAT16, rounded).astype(np.uint16)
    if saturate:
        bounded = np.clip(values, -FLOAT16_MAX, FLOAT16_MAX)
        values = np.where(np.isfinite(values), bounded, values)
    with np.errstate(all="ignore"):
        half = values.astype(np.float16).view(np.uint16)
    return np.where(nan, np.uint16(NAN_FLOAT16), half).view(np.float16)
