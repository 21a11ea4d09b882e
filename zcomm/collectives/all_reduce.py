"""all_reduce: a reduce_scatter and an all_gather, or one gather where the message is small.

Replicas end bit-identical.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zcomm.arrays import ITEMSIZE, View
from zcomm.collectives.all_gather import all_gather
from zcomm.collectives.channel import Channel
from zcomm.collectives.reduce_scatter import nested_reduce, reduce_scatter
from zcomm.collectives.wire import Place, Reduction
from zcomm.plan import Plan, WireFormat

SMALL_NBYTES = 4096
"""Exact messages up to this size are gathered whole: one exchange instead of two or more."""


def all_reduce(
    channel: Channel, scatter: Plan, gather: Plan, tensors: Sequence[View], reduction: Reduction
) -> None:
    """Reduce ``tensors`` over all ranks, in place.

    1. reduce_scatter: every rank reduces its shard of each tensor. Where the gather encodes, the
       shard stays in float32 until then, so that it is rounded once.
    2. all_gather of the reduced shards; the owner, too, keeps what the others decode.
    """
    shards = []
    for position, layout in enumerate(scatter.layouts):
        encoded = any(hop.formats[position].codec is not None for hop in gather.hops)
        dtype = "float32" if encoded else layout.dtype
        memory = np.empty(layout.shard_numel(channel.rank) * ITEMSIZE[dtype], np.uint8)
        shards.append(View(memory, dtype))
    reduce_scatter(channel, scatter, tensors, shards, reduction)
    all_gather(channel, gather, shards, tensors)


def all_reduce_small(
    channel: Channel, scatter: Plan, tensors: Sequence[View], reduction: Reduction
) -> None:
    """Reduce small ``tensors`` over all ranks, in place, exactly.

    1. Send every tensor, whole, to all ranks in one message each.
    2. Reduce locally as the levels nest: the bits of the large algorithm.
    """
    own = np.concatenate([tensor.memory for tensor in tensors])
    gathered = [own if rank == channel.rank else np.empty_like(own) for rank in range(channel.size)]
    recvs = {rank: memory for rank, memory in enumerate(gathered) if rank != channel.rank}
    channel.exchange("all_reduce", dict.fromkeys(recvs, own), recvs)
    at = 0
    for tensor, partial in zip(tensors, scatter.partials, strict=True):
        parts = [memory[at : at + tensor.memory.size] for memory in gathered]
        whole = Place(tensor, np.array([0], np.int64), np.array([tensor.numel], np.int64))
        formats = WireFormat(tensor.dtype), partial
        nested_reduce(scatter.nesting, formats, parts, whole, reduction)
        at += tensor.memory.size
