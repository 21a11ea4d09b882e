"""What :mod:`zcomm.collectives.node` needs to know of plans and arrays.

A *block* is a part of a shard of so many bytes that it stays in the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from zcomm.arrays import ITEMSIZE, DeviceMemory, HostMemory, Memory, View
from zcomm.collectives.channel import Channel
from zcomm.collectives.wire import Place, pack
from zcomm.device import scratch
from zcomm.layout import Indices, Layout
from zcomm.plan import Plan, WireFormat

Table = tuple[Indices, Indices]
"""Starts and lengths of runs, in elements."""

Reduce = Callable[[Plan, int, Sequence[Memory], Place], None]
"""Reduces the chunks of all ranks, ascending, of the layout of a position, into a place."""


def inside(channel: Channel, plan: Plan) -> bool:
    """Tell whether a plan is exact and one hop among all ranks, which all share memory."""
    return (
        len(plan.hops) == 1
        and not plan.quantised
        and 1 < channel.size == len(channel.near) + 1
        and channel.size == len(plan.peers(plan.hops[0], channel.rank))
    )


class Block(NamedTuple):
    """Segments, or parts of them, that follow each other in a shard.

    ``table`` says where they are in the full buffer, ``run`` in the compact form of the shard.
    """

    numel: int
    table: Table
    run: Table


@lru_cache(maxsize=256)
def blocks(layout: Layout, rank: int, nbytes: int) -> tuple[Block, ...]:
    """Cut a shard into blocks of so many bytes, the last one shorter."""
    room = max(nbytes // ITEMSIZE[layout.dtype], 1)
    found: list[Block] = []
    starts: list[int] = []
    lengths: list[int] = []

    def close() -> None:
        numel = sum(lengths)
        first = sum(block.numel for block in found[-1:]) + (
            int(found[-1].run[0][0]) if found else 0
        )
        run = np.array([first], np.int64), np.array([numel], np.int64)
        table = np.array(starts, np.int64), np.array(lengths, np.int64)
        found.append(Block(numel, table, run))
        starts.clear()
        lengths.clear()

    for segment in layout.shards[rank]:
        start, numel = segment.start, segment.numel
        while numel:
            taken = min(numel, room - sum(lengths))
            starts.append(start)
            lengths.append(taken)
            start, numel = start + taken, numel - taken
            if sum(lengths) == room:
                close()
    if starts:
        close()
    return tuple(found)


def on_wire(views: Sequence[View], plan: Plan) -> list[View]:
    """Return the arrays in the dtype in which they travel: themselves, or rounded copies."""
    found = []
    for view, layout in zip(views, plan.layouts, strict=True):
        if view.dtype != layout.dtype:
            out = scratch(view.numel * ITEMSIZE[layout.dtype], view.memory)
            whole = np.array([0], np.int64), np.array([view.numel], np.int64)
            pack(WireFormat(layout.dtype), Place(view, *whole), out, seed=0)
            view = View(out, layout.dtype)
        found.append(view)
    return found


def host(memory: Memory) -> HostMemory:
    """Return memory that is known to be the host's."""
    assert not isinstance(memory, DeviceMemory)
    return memory


def count(channel: Channel, plan: Plan) -> None:
    """Count what is read like the messages in whose place it is."""
    levels = set()
    for message in plan.messages(0, channel.rank):
        sizes = {"logical": message.logical_nbytes, "wire": message.wire_nbytes}
        calls = int(message.level not in levels)
        channel.traffic.record(plan.counted_as, message.level, calls=calls, **sizes)
        levels.add(message.level)
