"""The Hadamard transform of groups of 32: it spreads an outlier over its group before encoding.

A *group* is 32 consecutive elements from a segment's start; blocks hold whole groups. A tail of t
elements transforms its first 2^floor(log2 t), the others stay as they are. The transform is its
own inverse, up to rounding. Do not assume that it is linear near zero: what is smaller than 2^-102
counts as zero, so that no result depends on how a machine treats subnormal numbers.
"""

from __future__ import annotations

import numpy as np

from .floats import Floats, magnitudes

GROUP = 32
ZERO_BELOW = (127 - 102) << 23  # 2^-102


def group_sizes(numel: int) -> list[int]:
    """Return the sizes of the groups of a block of ``numel`` elements that are transformed."""
    full, tail = divmod(numel, GROUP)
    return [GROUP] * full + ([1 << (tail.bit_length() - 1)] if tail else [])


def transform(rows: Floats) -> Floats:
    """Return blocks, the rows of a matrix, with their groups transformed."""
    result = rows.copy()
    tail = rows.shape[1] // GROUP * GROUP
    if tail:
        result[:, :tail] = _groups(rows[:, :tail].reshape(-1, GROUP)).reshape(-1, tail)
    if tail < rows.shape[1]:
        size = group_sizes(rows.shape[1])[-1]
        result[:, tail : tail + size] = _groups(rows[:, tail : tail + size])
    return result


def _groups(groups: Floats) -> Floats:
    size = groups.shape[1]
    values = np.where(counts_as_zero(groups), np.float32(0), groups).T
    for distance in (1, 2, 4, 8, 16):
        if distance < size:
            pairs = values.reshape(size // (2 * distance), 2, distance, -1)
            a, b = pairs[:, 0], pairs[:, 1]
            values = np.stack([a + b, a - b], axis=1)
    transformed: Floats = values.reshape(size, -1).T * np.float32(size**-0.5)
    return transformed


def counts_as_zero(values: Floats) -> np.typing.NDArray[np.bool_]:
    """Return where a value that is transformed counts as zero."""
    return magnitudes(values) < ZERO_BELOW
