"""How far a decoded value may be from the value that was encoded: ``Codec.error_bound``.

The bounds hold for every finite input and every seed, and are computed in float64 from the scales;
docs/numerics.md says where each comes from. A *coefficient* is what a code stands for: the value
itself, or the transformed one. Do not assume that the bounds are tight where a block is flushed to
zero or a cast overflows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from zcomm.subnormals import exact_subnormals

from . import hadamard, reference
from .codec import Codec
from .floats import Floats, from_bfloat16, to_float32, typed
from .quantise import Scales, decode_rows, encode_rows, has_signed_scale, largest_code
from .wire import CAST_DTYPE, Bytes, layout

Bounds = npt.NDArray[np.float64]

SLACK = 1 + 2.0**-7
TRANSFORM_SLACK = 1 + 2.0**-16
# Half a unit in the last place of a code: relative to normal numbers, in scales to subnormal ones.
FLOAT8_ROUNDING = {"fp8_e4m3": (2.0**-4, 2.0**-10), "fp8_e5m2": (2.0**-3, 2.0**-17)}
SUM_OVERFLOWS = 2.0**128 * (1 - 2.0**-16)
BFLOAT16_OVERFLOWS = float.fromhex("0x1.ffp127")
FLOAT16_OVERFLOWS, FLOAT16_MAX = 65520.0, 65504.0


@exact_subnormals()
def error_bound(codec: Codec, x: Bytes, dtype: str, out_dtype: str) -> Bounds:
    """Return the bound of every element of the memory ``x``, which holds ``dtype``.

    ``out_dtype``: what the values are decoded to. Blocks that decode to NaN get NaN.
    """
    values = to_float32(typed(x, dtype), dtype)
    with np.errstate(all="ignore"):
        if codec.quantised:
            bound = np.empty(values.size)
            for place, length in reference.blocks(codec, values.size):
                rows = values[place].reshape(-1, length)
                bound[place] = _quantised(codec, rows).reshape(-1)
        else:
            bound = _rounding(CAST_DTYPE[codec.format], values.astype(np.float64))
        if out_dtype not in ("float32", CAST_DTYPE.get(codec.format)):
            bound = bound + _output(codec, values, bound, out_dtype)
    return bound


@exact_subnormals()
def narrowing(x: Bounds, values: Bytes) -> Bounds:
    """Return what the elements of ``x`` lost when they became the float32 in ``values``.

    That is 0 where they became infinite or NaN: the bound of such a value holds for ``x``, too.
    """
    narrow = typed(values, "float32").astype(np.float64)
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(narrow), np.abs(x - narrow), 0.0)


def _quantised(codec: Codec, rows: Floats) -> Bounds:
    codes, scales = encode_rows(codec, rows, first=0, seed=0)
    if codec.transform == "none":
        return _coefficients(codec, rows, scales)
    coefficients = hadamard.transform(rows)
    bound = _coefficients(codec, coefficients, scales)
    decoded = decode_rows(replace(codec, transform="none"), codes, scales)
    return _transformed(rows, coefficients, bound + _dropped(decoded))


def _coefficients(codec: Codec, coefficients: Floats, scales: Scales) -> Bounds:
    scale = from_bfloat16(scales).astype(np.float64)[:, None]
    step = np.where(np.isfinite(scale), np.abs(scale), np.nan)
    exact = coefficients.astype(np.float64)
    size = np.abs(exact)
    if codec.format in FLOAT8_ROUNDING:
        relative, absolute = FLOAT8_ROUNDING[codec.format]
        bound = np.maximum(size * relative, step * absolute)
    elif has_signed_scale(codec):
        # The scale has the opposite sign of the extreme: on its own side one code is missing.
        beyond = np.where(exact * scale > 0, size - (largest_code(codec) - 1) * step, 0.0)
        bound = np.maximum(step / 2, beyond)
    else:
        bound = np.broadcast_to(step, size.shape)
    return np.where(step == 0, size, bound * SLACK)


def _transformed(rows: Floats, coefficients: Floats, bound: Bounds) -> Bounds:
    """Return the bound of values whose coefficients have the given bound."""
    reached, result, start = np.abs(coefficients) + bound, bound.copy(), 0
    for size in hadamard.group_sizes(rows.shape[1]):
        group = slice(start, start + size)
        spread = bound[:, group].sum(axis=1) / size**0.5 * TRANSFORM_SLACK
        overflows = reached[:, group].sum(axis=1) >= SUM_OVERFLOWS
        spread = np.where(overflows, np.inf, spread)
        result[:, group] = spread[:, None] + _dropped(rows[:, group])
        start += size
    return result


def _dropped(values: Floats) -> Bounds:
    """Return what the transform takes away from its inputs, by counting small ones as zero."""
    return np.where(hadamard.counts_as_zero(values), np.abs(values), 0).astype(np.float64)


def _output(codec: Codec, values: Floats, bound: Bounds, out_dtype: str) -> Bounds:
    """Return what the last rounding adds, to float16 with its largest value as the end."""
    size = np.abs(values.astype(np.float64))
    if codec.rounding == "stochastic":  # the decoded value depends on the seed
        decoded = size + bound
    else:
        decoded = np.abs(_round_trip(codec, values).astype(np.float64))
    if out_dtype != "float16":
        return _rounding(out_dtype, decoded)
    beyond = np.maximum(size - FLOAT16_MAX, 0.0)
    return _rounding(out_dtype, np.minimum(decoded, FLOAT16_MAX)) + beyond


def _round_trip(codec: Codec, values: Floats) -> Floats:
    start, numel = np.zeros(1, np.int64), np.array([values.size], np.int64)
    message = np.empty(layout(codec, numel).nbytes, np.uint8)
    decoded = np.empty_like(values)
    reference.encode(codec, values.view(np.uint8), "float32", start, numel, message)
    reference.decode(codec, message, start, numel, decoded.view(np.uint8), "float32")
    return decoded


def _rounding(dtype: str, exact: Bounds) -> Bounds:
    """Return the bound of one rounding to ``dtype``; NaN stays, infinite where it overflows."""
    size = np.abs(exact)
    if dtype == "bfloat16":
        bound = np.where(size < BFLOAT16_OVERFLOWS, 2.0**-8 * size + 2.0**-134, np.inf)
    elif dtype == "float16":
        bound = np.where(size < FLOAT16_OVERFLOWS, 2.0**-11 * size + 2.0**-25, np.inf)
    else:
        bound = np.where(np.isfinite(size), 0.0, np.inf)
    return np.where(np.isnan(size), np.nan, bound)
