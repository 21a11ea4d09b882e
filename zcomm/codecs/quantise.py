"""Blocks as codes and scales, and back: the arithmetic of the quantised formats.

A *row* is a block, a *code* the 8 bits that stand for one element (int4: the low four count), a
*scale* the bfloat16 pattern that all codes of a row share. Written to be read next to
docs/numerics.md. Do not assume that rows keep their values: with transform=hadamard, codes stand
for the transformed ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from . import fp8, hadamard, philox
from .floats import (
    INFINITY_BITS,
    NAN_BFLOAT16,
    SIGN_BIT,
    Floats,
    from_bfloat16,
    magnitudes,
)

if TYPE_CHECKING:
    from .codec import Codec

Codes = npt.NDArray[np.uint8]
Scales = npt.NDArray[np.uint16]
Live = npt.NDArray[np.bool_]

LARGEST_ROUNDED_UP = 0x7F7F0000
FLUSHED_BELOW = (127 - 100) << 23  # 2^-100
FLOAT8 = {"fp8_e4m3": fp8.E4M3, "fp8_e5m2": fp8.E5M2}


def encode_rows(codec: Codec, rows: Floats, *, first: int, seed: int) -> tuple[Codes, Scales]:
    """Return the codes, of the shape of ``rows``, and the scales of blocks.

    ``rows`` is (blocks, elements), with at least one element in a block; ``first`` is the index in
    its segment of the first element, a multiple of 4.
    """
    with np.errstate(all="ignore"):
        if codec.transform == "hadamard":
            rows = hadamard.transform(rows)
        scales, live = _scales(codec, rows)
        inverse = np.where(live, np.float32(1) / from_bfloat16(scales), np.float32(0))
        scaled = np.where(live[:, None], rows * inverse[:, None], np.float32(0))
        return _codes(codec, scaled, first, seed), scales


def decode_rows(codec: Codec, codes: Codes, scales: Scales) -> Floats:
    """Return the values of blocks; NaN in any form."""
    with np.errstate(all="ignore"):
        factors = from_bfloat16(scales)
        factors = np.where(np.isfinite(factors), factors, np.float32(np.nan))
        values = code_values(codec, codes) * factors[:, None]
        return hadamard.transform(values) if codec.transform == "hadamard" else values


def code_values(codec: Codec, codes: Codes) -> Floats:
    """Return what codes stand for, in units of the scale."""
    if codec.format in FLOAT8:
        return FLOAT8[codec.format].decode(codes)
    if codec.bits == 4:
        codes = codes << np.uint8(4)
    return (codes.view(np.int8) >> np.int8(8 - codec.bits)).astype(np.float32)


def largest_code(codec: Codec) -> float:
    """Return the largest magnitude that codes stand for, in units of the scale."""
    if codec.format in FLOAT8:
        return FLOAT8[codec.format].largest
    return float((1 << (codec.bits - 1)) - (codec.rounding == "stochastic"))


def has_signed_scale(codec: Codec) -> bool:
    """Whether scales take the sign that turns the extreme into the lowest code."""
    return codec.format not in FLOAT8 and codec.rounding == "nearest"


def _scales(codec: Codec, rows: Floats) -> tuple[Scales, Live]:
    """Return the scale of every row, and whether its codes are not all zero by rule."""
    pattern = rows.view(np.uint32)
    key = ((pattern << 1) | (pattern >> 31)).max(axis=1)
    extreme = (key >> 1) | (key << 31)
    rounded = _rounded_scales(codec, extreme.view(np.float32))
    magnitude, size = extreme & ~np.uint32(SIGN_BIT), rounded & ~np.uint32(SIGN_BIT)
    result = (rounded >> 16).astype(np.uint16)
    result[size < FLUSHED_BELOW] = 0
    result[magnitude > INFINITY_BITS] = NAN_BFLOAT16
    return result, (size >= FLUSHED_BELOW) & (magnitude < INFINITY_BITS)


def _rounded_scales(codec: Codec, extremes: Floats) -> npt.NDArray[np.uint32]:
    """Return float32 patterns whose upper half is the scale, NaN and flushed rows aside."""
    largest, upper_half = np.float32(largest_code(codec)), np.uint32(0xFFFF0000)
    if has_signed_scale(codec):
        down = (extremes * (np.float32(-1) / largest)).view(np.uint32)
        overflows = magnitudes(extremes) > LARGEST_ROUNDED_UP
        return np.where(overflows, down, down + np.uint32(0xFFFF)) & upper_half
    down = (np.abs(extremes) / largest).view(np.uint32)
    up = (down + np.uint32(0xFFFF)) & upper_half
    overflows = np.isinf(up.view(np.float32) * largest)
    return np.where(overflows, down & upper_half, up)


def _codes(codec: Codec, scaled: Floats, first: int, seed: int) -> Codes:
    """Return the codes of values in units of the scale."""
    if codec.format in FLOAT8:
        return FLOAT8[codec.format].encode(scaled)
    high = (1 << (codec.bits - 1)) - 1
    if codec.rounding == "nearest":
        codes = np.rint(np.clip(scaled, -high - 1, high))
    else:
        below = np.floor(scaled)
        drawn = philox.uniform(seed, first, scaled.size).reshape(scaled.shape)
        codes = np.clip(below + (drawn < scaled - below), -high, high)
    return codes.astype(np.int8).view(np.uint8)
