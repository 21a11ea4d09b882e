"""The data of the checks: functions of (seed, rank, element), so any rank can make any rank's part.

Three kinds. *exact*: small whole numbers (powers of two for products), whose result is the same in
any order of summation. *grid*: numbers that every codec in use represents without error, equal on
all ranks, so that sums stay on the grid. *random*: near-normal numbers, where rounding and codecs
show.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.collectives.cases import DataType

Array = npt.NDArray[Any]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# Products of more factors than this would leave float16's range; later ranks contribute signs.
_NUM_SCALED_RANKS = 8
GRID_BLOCK = 32
"""The smallest block of a codec: an extreme at every multiple of it is in every block."""


def random_words(seed: int, rank: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """Return 64 random bits for each element of a range (SplitMix64 of its index)."""
    stream = np.array([seed, rank], np.uint64)
    with np.errstate(over="ignore"):
        origin = _mix(_mix(stream[:1]) + stream[1:] * _GOLDEN)
        return _mix(origin + np.arange(start, stop, dtype=np.uint64) * _GOLDEN)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def exact(
    dtype: DataType, op: str | None, num_ranks: int, seed: int, rank: int, start: int, stop: int
) -> Array:
    """Return whole numbers whose reduction over ``num_ranks`` is exact in every order."""
    words = random_words(seed, rank, start, stop)
    if op == "prod":
        exponent = (words % np.uint64(3)).astype(np.int64) - 1 if rank < _NUM_SCALED_RANKS else 0
        if not dtype.floating:
            # At most 2^6, which every integer type holds.
            exponent = np.maximum(exponent, 0) if rank < 6 else 0
        sign = (
            1 - 2 * (words >> np.uint64(32) & np.uint64(1)).astype(np.int64) if dtype.signed else 1
        )
        product: Array = np.exp2(np.broadcast_to(exponent, words.shape)) * sign
        return product.astype(dtype.carrier)
    limit = max(1, min(dtype.exact_limit, 2**20) // num_ranks)
    whole = (words % np.uint64(2 * limit + 1)).astype(np.int64) - limit
    values: Array = whole if dtype.signed else np.abs(whole)
    return values.astype(dtype.carrier)


def grid(dtype: DataType, chunk: int, seed: int, start: int, stop: int) -> Array:
    """Return multiples of 1/8 from -1 to 7/8, with -1 wherever a block of a chunk may start."""
    eighths = (random_words(seed, 0, start, stop) % np.uint64(16)).astype(np.int64) - 8
    eighths[np.arange(start, stop) % max(chunk, 1) % GRID_BLOCK == 0] = -8
    return (eighths / 8).astype(dtype.carrier)


def normal(dtype: DataType, seed: int, rank: int, start: int, stop: int) -> Array:
    """Return near-normal values (sums of four uniform ones) of mean 0 and variance 1.

    Integers take the same values times a sixth of their exact range, of at most 2^20.
    """
    words = random_words(seed, rank, start, stop)
    total = np.zeros(words.shape, np.int64)
    for shift in (0, 16, 32, 48):
        total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    value = (total - 2 * 0xFFFF) / 0x10000 * np.sqrt(3.0)
    if dtype.floating:
        return round_to(value, dtype)
    value = np.rint(value * min(dtype.exact_limit, 2**20) / 6)
    values: Array = value if dtype.signed else np.abs(value)
    return values.astype(dtype.carrier)


def round_to(value: npt.NDArray[Any], dtype: DataType) -> Array:
    """Round to the nearest value of ``dtype``, ties to even; the result is in the carrier type.

    Where ``value`` is float64 and ``dtype`` bfloat16, it is rounded to float32 first, as NumPy has
    nothing between.
    """
    if dtype.name != "bfloat16":
        with np.errstate(over="ignore"):
            return value.astype(dtype.carrier)
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(
            0xFFFF0000
        )
    not_finite = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    return np.where(not_finite, bits & np.uint32(0xFFFF0000), rounded).view(np.float32)
