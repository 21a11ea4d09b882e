"""all_reduce: a reduce_scatter and an all_gather, or one gather where the message is small.

Replicas end bit-identical.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from zcomm.arrays import ITEMSIZE, View
from zcomm.collectives import node
from zcomm.collectives.all_gather import all_gather, all_gather_in_pieces
from zcomm.collectives.channel import Channel
from zcomm.collectives.reduce_scatter import reduce_last, reduce_scatter_in_pieces
from zcomm.collectives.wire import Place, Reduction, nested_reduce
from zcomm.device import scratch
from zcomm.plan import AllReduce, Plan, WireFormat
from zcomm.seeds import Draws


def all_reduce(
    channel: Channel,
    plans: AllReduce,
    tensors: Sequence[View],
    reduction: Reduction,
    draws: Draws,
) -> None:
    """Reduce ``tensors`` over all ranks, in place.

    1. reduce_scatter: every rank reduces its shard of each tensor. Where the gather encodes, the
       shard stays in float32 until then, so that it is rounded once.
    2. all_gather of the reduced shards; the owner, too, keeps what the others decode.

    Exact ones inside a node do both in place, see :func:`zcomm.collectives.node.all_reduce`.
    """
    if plans.whole is not None:
        _reduce_whole(channel, plans.whole, plans.scatter, tensors, reduction, draws)
        return
    if node.all_reduce(channel, plans, tensors, functools.partial(reduce_last, reduction)):
        return
    shards, pool = [], channel.pool
    for position, layout in enumerate(plans.scatter.layouts):
        encoded = any(hop.formats[position].codec is not None for hop in plans.gather.hops)
        dtype = "float32" if encoded else layout.dtype
        nbytes = layout.shard_numel(channel.rank) * ITEMSIZE[dtype]
        shards.append(View(pool.take(nbytes, tensors[position].memory), dtype))
    reduce_scatter_in_pieces(channel, plans.scatter, tensors, shards, reduction, draws.stage(0))
    all_gather_in_pieces(channel, plans.gather, shards, tensors, draws.stage(1))
    pool.give(*(shard.memory for shard in shards))


def _reduce_whole(
    channel: Channel,
    whole: Plan,
    scatter: Plan,
    tensors: Sequence[View],
    reduction: Reduction,
    draws: Draws,
) -> None:
    """Reduce small ``tensors`` exactly.

    1. all_gather of every rank's tensors, whole.
    2. Reduce locally as the levels nest: the bits of the large algorithm.
    """
    copies = [View(scratch(channel.size * t.memory.size, t.memory), t.dtype) for t in tensors]
    all_gather(channel, whole, tensors, copies, draws)
    for tensor, copy, partial in zip(tensors, copies, scatter.partials, strict=True):
        parts = [copy.elements(rank * tensor.numel, tensor.numel) for rank in range(channel.size)]
        place = Place(tensor, np.array([0], np.int64), np.array([tensor.numel], np.int64))
        formats = WireFormat(tensor.dtype), partial
        nested_reduce(scatter.nesting, formats, parts, place, reduction)
