"""Blocks: the masters of a buffer, one after the other, cut into what a step holds at a time.

Plain descriptions, no tensors. A **block** is what a step reads, updates and writes as one; a
**piece** is what it holds of one master. Optimizers treat elements alone, so a master that is cut
into pieces has the same bits as one that is not.

A reader must not assume that a piece is a whole master, nor that all blocks have one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GRID = 16
"""Blocks are multiples of so many elements: 64 bytes of float32."""


@dataclass(frozen=True)
class Piece:
    """``numel`` elements of master ``master`` from its ``offset``, at ``start`` of the block."""

    master: int
    offset: int
    numel: int
    start: int


@dataclass(frozen=True)
class Block:
    """``numel`` elements of a buffer's masters from element ``first``, in pieces."""

    first: int
    numel: int
    pieces: tuple[Piece, ...]


def cut(numels: Sequence[int], most: int) -> tuple[Block, ...]:
    """Cut masters of these sizes into blocks of about equal size.

    Args:
        numels: elements of each master.
        most: elements of a block, rounded up to a multiple of 16.
    """
    total = sum(numels)
    if not total:
        return ()
    count = -(-total // most)
    size = -(-total // (count * _GRID)) * _GRID
    return tuple(_block(numels, first, min(first + size, total)) for first in range(0, total, size))


def _block(numels: Sequence[int], first: int, last: int) -> Block:
    pieces = []
    start = 0
    for master, numel in enumerate(numels):
        lo, hi = max(first, start), min(last, start + numel)
        if lo < hi:
            pieces.append(Piece(master, lo - start, hi - lo, lo - first))
        start += numel
    return Block(first, last - first, tuple(pieces))
