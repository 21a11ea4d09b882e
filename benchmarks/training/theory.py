"""What the ZeRO and ZeRO++ papers say about one training step, in bytes for a given topology.

Ψ is the number of parameters; a *volume* is the parameters once, in the type that travels (2Ψ bytes
in 16 bits). The papers count volumes; here each level of the topology has its share of one: over a
level of g positions, whose groups have H ranks, a rank sends (g-1)/H of a volume, in a hierarchical
all-gather and reduce-scatter alike. So a node sends (n-1)/n of a volume to n-1 other nodes. Padding
is not in these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ITEMSIZE = 2
"""Bytes of a parameter and of a gradient."""

ADAM_NBYTES = 12
"""Bytes of a float32 master weight and Adam's two moments."""

# Bytes of one element on the wire: its code, and its share of the bfloat16 scale of a block.
INT8_NBYTES = 1 + 2 / 256
INT4_NBYTES = 1 / 2 + 2 / 128


@dataclass(frozen=True)
class Expected:
    """One step of one scheme: wire bytes that a rank sends per level, and bytes that it holds.

    ``levels`` is innermost first. ``secondary`` is the secondary partition, not in ``states``.
    """

    levels: tuple[float, ...]
    states: float
    secondary: float = 0.0

    @property
    def inside(self) -> float:
        """Bytes that a rank sends inside its node; a topology of one level is one node."""
        return sum(self.levels[:-1]) if len(self.levels) > 1 else self.levels[0]

    @property
    def between(self) -> float:
        """Bytes that a rank sends to other nodes."""
        return self.levels[-1] if len(self.levels) > 1 else 0.0


def stage0(numel: int, shape: Sequence[int]) -> Expected:
    """Data parallelism: gradients are scattered and gathered again, all states everywhere."""
    levels = _sent(numel, shape, [2 * ITEMSIZE] * len(shape))
    return Expected(levels, numel * (2 * ITEMSIZE + ADAM_NBYTES))


def stage3(numel: int, shape: Sequence[int]) -> Expected:
    """Weights are gathered forward and backward, gradients scattered, all states sharded."""
    levels = _sent(numel, shape, [3 * ITEMSIZE] * len(shape))
    return Expected(levels, numel * (2 * ITEMSIZE + ADAM_NBYTES) / _product(shape))


def zeropp(numel: int, shape: Sequence[int]) -> Expected:
    """ZeRO++: between nodes 8-bit weights once and 4-bit gradients; no weights backward.

    Inside a node, forward and backward, the 16-bit values of the secondary partition: it holds what
    was decoded, and sends what it holds. On a single node a secondary would repeat the primary one,
    so there is none, and both gathers are of 8 bits.
    """
    states = numel * (2 * ITEMSIZE + ADAM_NBYTES) / _product(shape)
    if len(shape) == 1 or shape[-1] == 1:
        each = [INT4_NBYTES + 2 * INT8_NBYTES] * len(shape)
        return Expected(_sent(numel, shape, each), states)
    each = [INT4_NBYTES + 2 * ITEMSIZE] * (len(shape) - 1) + [INT4_NBYTES + INT8_NBYTES]
    return Expected(_sent(numel, shape, each), states, numel * ITEMSIZE / _product(shape[:-1]))


def _sent(numel: int, shape: Sequence[int], element_nbytes: Sequence[float]) -> tuple[float, ...]:
    """Return the bytes that a rank sends per level, when an element takes so many bytes there."""
    levels, holders = [], 1
    for extent, nbytes in zip(shape, element_nbytes, strict=True):
        holders *= extent
        levels.append(numel * nbytes * (extent - 1) / holders)
    return tuple(levels)


def _product(shape: Sequence[int]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product
