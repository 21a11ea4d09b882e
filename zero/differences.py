"""hpZ that survives the step: what travels between nodes is how far the parameters moved.

``secondary="persistent"``: the ranks of a rail hold, in their slices and (the owner) in its shard,
the same *published* values. After a step, at the first gather:

1. the owner encodes master − published, float32
2. all ranks of the rail, the owner too, decode it and add it to what they hold, in float32, rounded
   to the parameters' dtype

so all copies keep the same bits, and what the codec lost is a part of the next difference: errors
do not add up. Source: SDP4Bit (arXiv 2410.15526, section 3.1), there with a replica on every rank.

A reader must not assume that a shard is the master rounded; it is what was published last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zcomm.layout import Layout
from zero.unit import Buffer, split


class Differences:
    """Encodes and applies differences, for the ranks of one rail (``rail``, in order)."""

    def __init__(self, rail: Sequence[int], rank: int) -> None:
        self._rail = rail
        self._rank = rank
        self._layouts: dict[Buffer, Layout] = {}

    def layout(self, buffer: Buffer) -> Layout:
        """Return where the ranks' trainable runs lie, one after the other, in float32."""
        if buffer not in self._layouts:
            self._layouts[buffer] = buffer.layout.in_a_row(self._rail, "float32")
        return self._layouts[buffer]

    def own(self, buffer: Buffer) -> Tensor:
        """Return master − published of this rank's trainable runs."""
        shard = dict(zip(buffer.runs, split(buffer.load_shard(), buffer.runs), strict=True))
        runs = [master.run for master in buffer.masters]
        differences = torch.empty(sum(run.numel for run in runs), device=buffer.device)
        parts = split(differences, runs)
        for run, value, part in zip(runs, buffer.load_masters(), parts, strict=True):
            published = shard[run].to(buffer.device, torch.float32)
            torch.sub(value.to(buffer.device), published, out=part)
        return differences

    def apply(self, buffer: Buffer, held: Tensor, differences: Tensor) -> None:
        """Add the rail's differences to the slice, and give the shard what it holds then."""
        shard = buffer.load_shard()
        own = dict(zip(buffer.runs, split(shard, buffer.runs), strict=True))
        start = begin = 0
        for rank in self._rail:
            for run in buffer.layout.runs[rank]:
                if buffer.layout.slots[run.slot].trainable:
                    place = held[start : start + run.numel]
                    place.copy_(place.float() + differences[begin : begin + run.numel])
                    if rank == self._rank:
                        own[run].copy_(place)
                    begin += run.numel
                start += run.numel
        buffer.store_shard(shard)
