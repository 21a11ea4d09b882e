"""How far a decoded value may be from the value that was encoded: ``Codec.error_bound``.

The bounds hold for every finite input and are computed in float64 from the scales alone; see
docs/numerics.md for where each comes from. Do not assume that they are tight where a block is
flushed to zero or a cast overflows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import reference
from .codec import Codec
from .wire import CAST_DTYPE, Bytes, layout

Bounds = npt.NDArray[np.float64]

SLACK = 1 + 2.0**-7
BFLOAT16_OVERFLOWS = float.fromhex("0x1.ffp127")
FLOAT16_OVERFLOWS, FLOAT16_MAX = 65520.0, 65504.0


def error_bound(codec: Codec, x: Bytes, dtype: str, out_dtype: str) -> Bounds:
    """Return the bound of every element of the memory ``x``, which holds ``dtype``.

    ``out_dtype``: what the values are decoded to. Blocks that decode to NaN get NaN.
    """
    values = reference.to_float32(reference.typed(x, dtype), dtype)
    with np.errstate(all="ignore"):
        exact = values.astype(np.float64)
        if codec.quantised:
            parts = [_quantised(rows, codec.bits) for rows in reference.blocks(codec, values)]
            bound = np.concatenate([np.empty(0), *parts])
        else:
            bound = _rounding(CAST_DTYPE[codec.format], exact)
        if out_dtype not in ("float32", CAST_DTYPE.get(codec.format)):
            bound = bound + _output(codec, values, out_dtype)
    return bound


def _quantised(rows: npt.NDArray[np.float32], bits: int) -> Bounds:
    pattern = reference.encode_rows(rows, bits)[1]
    scale = reference.from_bfloat16(pattern).astype(np.float64)[:, None]
    step = np.where(np.isfinite(scale), np.abs(scale), np.nan)
    exact = rows.astype(np.float64)
    size = np.abs(exact)
    # The scale has the opposite sign of the extreme: on its own side one code is missing.
    beyond = np.where(exact * scale > 0, size - ((1 << (bits - 1)) - 1) * step, 0.0)
    bound = np.maximum(step / 2, beyond) * SLACK
    return np.where(step == 0, size, bound).reshape(-1)


def _output(codec: Codec, values: npt.NDArray[np.float32], out_dtype: str) -> Bounds:
    """Return what the last rounding adds, to float16 with its largest value as the end."""
    numel = np.array([values.size], np.int64)
    message = np.empty(layout(codec, numel).nbytes, np.uint8)
    decoded = np.empty_like(values)
    start = np.zeros(1, np.int64)
    reference.encode(codec, values.view(np.uint8), "float32", start, numel, message)
    reference.decode(codec, message, start, numel, decoded.view(np.uint8), "float32")
    if out_dtype != "float16":
        return _rounding(out_dtype, decoded.astype(np.float64))
    within = np.clip(decoded.astype(np.float64), -FLOAT16_MAX, FLOAT16_MAX)
    beyond = np.abs(values.astype(np.float64)) - FLOAT16_MAX
    return _rounding(out_dtype, within) + np.maximum(beyond, 0.0)


def _rounding(dtype: str, exact: Bounds) -> Bounds:
    """Return the bound of one rounding to ``dtype``; infinite where it overflows."""
    size = np.abs(exact)
    if dtype == "bfloat16":
        return np.where(size < BFLOAT16_OVERFLOWS, 2.0**-8 * size + 2.0**-134, np.inf)
    if dtype == "float16":
        return np.where(size < FLOAT16_OVERFLOWS, 2.0**-11 * size + 2.0**-25, np.inf)
    return np.where(np.isfinite(size), 0.0, np.nan)
