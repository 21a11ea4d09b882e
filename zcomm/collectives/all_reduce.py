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
from zcomm.plan import AllReduce, Plan, WireFormat


def all_reduce(
    channel: Channel, plans: AllReduce, tensors: Sequence[View], reduction: Reduction
) -> None:
    """Reduce ``tensors`` over all ranks, in place.

    1. reduce_scatter: every rank reduces its shard of each tensor. Where the gather encodes, the
       shard stays in float32 until then, so that it is rounded once.
    2. all_gather of the reduced shards; the owner, too, keeps what the others decode.
    """
    if plans.whole is not None:
        _reduce_whole(channel, plans.whole, plans.scatter, tensors, reduction)
        return
    shards = []
    for position, layout in enumerate(plans.scatter.layouts):
        encoded = any(hop.formats[position].codec is not None for hop in plans.gather.hops)
        dtype = "float32" if encoded else layout.dtype
        memory = np.empty(layout.shard_numel(channel.rank) * ITEMSIZE[dtype], np.uint8)
        shards.append(View(memory, dtype))
    reduce_scatter(channel, plans.scatter, tensors, shards, reduction)
    all_gather(channel, plans.gather, shards, tensors)


def _reduce_whole(
    channel: Channel,
    whole: Plan,
    scatter: Plan,
    tensors: Sequence[View],
    reduction: Reduction,
) -> None:
    """Reduce small ``tensors`` exactly.

    1. all_gather of every rank's tensors, whole.
    2. Reduce locally as the levels nest: the bits of the large algorithm.
    """
    copies = [View(np.empty(channel.size * t.memory.size, np.uint8), t.dtype) for t in tensors]
    all_gather(channel, whole, tensors, copies)
    for tensor, copy, partial in zip(tensors, copies, scatter.partials, strict=True):
        parts = [copy.elements(rank * tensor.numel, tensor.numel) for rank in range(channel.size)]
        place = Place(tensor, np.array([0], np.int64), np.array([tensor.numel], np.int64))
        formats = WireFormat(tensor.dtype), partial
        nested_reduce(scatter.nesting, formats, parts, place, reduction)
