"""Blocks: the masters of a buffer, one after the other, cut into what a step holds at a time.

Plain descriptions, no tensors. A **block** is what a step reads, updates and writes as one; a
**piece** is what it holds of one master. Masters are cut as parameters are, at multiples of 256
elements from their start: torch's fused steps update the last elements of a tensor, fewer than a
vector register holds, by other instructions than the rest, so that other cuts would change bits.

A reader must not assume that a piece is a whole master, nor that all blocks have one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero.layout import cut

GRID = 256
"""A multiple of the elements of a vector register, whatever the processor."""


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


def cut_blocks(numels: Sequence[int], most: int) -> tuple[Block, ...]:
    """Cut masters of these sizes into blocks of about equal size.

    Args:
        numels: elements of each master.
        most: elements of a block, to which at most 255 are added.
    """
    count = -(-sum(numels) // most)
    blocks: list[Block] = []
    first = 0
    for runs in cut(numels, count, GRID) if count else ():
        pieces: list[Piece] = []
        numel = 0
        for run in runs:
            pieces.append(Piece(run.slot, run.offset, run.numel, numel))
            numel += run.numel
        if pieces:
            blocks.append(Block(first, numel, tuple(pieces)))
        first += numel
    return tuple(blocks)
