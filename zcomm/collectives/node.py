"""Exact operations inside a node whose ranks read each other's arrays where they lie.

Instead of messages an *offer* goes through the windows: where a rank's arrays are. Its peers read
them, in an order in which no two start with the same rank, and release the offer when they have;
until all have, the rank stays inside the call, so that nobody changes or frees what is read.

Reductions gain by reading whatever the pages. An all_gather does where arrays lie on huge pages
(see :mod:`zcomm.transports.remote`): every offer says whether the rank's do, and unless all do, all
release the offers and use the windows instead. So it follows from what was exchanged which way is
taken, and no bit depends on it. Sums are those of :func:`zcomm.collectives.wire.nested_reduce`,
block by block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zcomm.arrays import ITEMSIZE, DeviceMemory, HostMemory, Memory, View
from zcomm.collectives.channel import Channel
from zcomm.collectives.courier import FreeSlot, Inboxes
from zcomm.collectives.idle import Idle
from zcomm.collectives.inside import (
    Block,
    Reduce,
    Table,
    blocks,
    count,
    host,
    inside,
    on_wire,
)
from zcomm.collectives.wire import Place, host_kernels, pack, unpack
from zcomm.layout import Indices
from zcomm.pieces import in_flight, logical_nbytes, slot_nbytes
from zcomm.plan import AllReduce, Plan, WireFormat
from zcomm.transports.base import Pending
from zcomm.transports.remote import RemoteMemory
from zcomm.transports.windows import Windows

SMALLEST_NBYTES = 4 * 1024 * 1024
"""Below this size windows are as fast, and need no offer."""

BLOCK_NBYTES = 512 * 1024
"""Bytes of a shard that are read from every peer and then summed, in the caches."""


def readable(channel: Channel, plan: Plan, views: Sequence[View]) -> bool:
    """Tell whether an operation on these arrays may be executed here.

    It must be exact and large, in host memory, and one hop among all ranks, all of this node.
    """
    return possible(channel, plan) and not any(isinstance(v.memory, DeviceMemory) for v in views)


def possible(channel: Channel, plan: Plan) -> bool:
    """Tell the same of any arrays in host memory."""
    windows = channel.transport.windows
    return (
        windows is not None
        and windows.remote is not None
        and inside(channel, plan)
        and logical_nbytes(plan) >= SMALLEST_NBYTES
        and 8 * (len(plan.layouts) + 1) <= slot_nbytes(plan)
    )


def all_gather(channel: Channel, plan: Plan, shards: Sequence[View], fulls: Sequence[View]) -> bool:
    """Do what :func:`zcomm.collectives.all_gather.all_gather` does, or return False.

    1. Offer the own shard; stop where not all offers are worth reading.
    2. Copy the own shard to its place, and read those of the others straight into theirs.
    3. Wait until all have read the own one.
    """
    if not readable(channel, plan, fulls):
        return False
    with host_kernels():
        sources = on_wire(shards, plan)
        visit = _Visit(channel, plan)
        if not visit.agree(sources):
            return False
        me = channel.rank
        for source, layout, full in zip(sources, plan.layouts, fulls, strict=True):
            chunk = source.elements(0, layout.shard_numel(me))
            unpack(WireFormat(layout.dtype), chunk, Place(full, *layout.table(me)))
        for peer in visit.order:
            visit.gather(peer, fulls, compact=True)
            visit.release(peer)
        visit.end()
    return True


def reduce_scatter(
    channel: Channel, plan: Plan, fulls: Sequence[View], shards: Sequence[View], reduce: Reduce
) -> bool:
    """Do what :func:`zcomm.collectives.reduce_scatter.reduce_scatter` does, or return False.

    1. Offer the own arrays, and wait for all offers.
    2. Block by block, read the own shard's elements of all peers into scratch memory, and reduce
       them with the own ones, which are read where they are.
    3. Wait until all have read what they need.
    """
    if not readable(channel, plan, fulls):
        return False
    with host_kernels():
        sources = on_wire(fulls, plan)
        visit = _Visit(channel, plan)
        visit.trade(sources)
        visit.reduce(sources, shards, reduce, compact=True)
        for peer in visit.order:
            visit.release(peer)
        visit.end()
    return True


def all_reduce(channel: Channel, plans: AllReduce, tensors: Sequence[View], reduce: Reduce) -> bool:
    """Do what :func:`zcomm.collectives.all_reduce.all_reduce` does, or return False.

    1. Offer the own tensors, and wait for all offers.
    2. Reduce the own shard in place: nobody else reads it in the tensors of this rank.
    3. Say so. Of every peer that has said so too read the reduced shard, straight into its place:
       that peer reads it no more.
    4. Wait until all have read the own one.
    """
    if not (readable(channel, plans.scatter, tensors) and readable(channel, plans.gather, tensors)):
        return False
    with host_kernels():
        visit, result = _Visit(channel, plans.scatter), _Visit(channel, plans.gather, slot=1)
        visit.trade(tensors)
        visit.reduce(tensors, tensors, reduce, compact=False)
        for peer in visit.order:
            visit.release(peer)
        result.offer([])
        count(channel, plans.gather)
        for peer in visit.order:
            result.wait_for(peer)
            visit.gather(peer, tensors, compact=False)
            result.release(peer)
        result.end()
        visit.end()
    return True


class _Visit:
    """One rank's part of an operation: its offer in a slot, and those of its peers."""

    def __init__(self, channel: Channel, plan: Plan, slot: int = 0) -> None:
        windows = channel.transport.windows
        assert windows is not None
        assert windows.remote is not None
        self._channel = channel
        self._plan = plan
        self._windows: Windows = windows
        self._remote: RemoteMemory = windows.remote
        self._slot = slot
        self._num_slots = in_flight(plan)
        me, size = channel.rank, channel.size
        self.order = [(me + step) % size for step in range(1, size)]
        self._addresses: dict[int, Indices] = {}

    def agree(self, views: Sequence[View]) -> bool:
        """Offer these arrays and tell whether all offers are worth reading."""
        worth = self.trade(views, int(self._remote.worthwhile(*(host(v.memory) for v in views))))
        if not worth:
            for peer in self.order:
                self.release(peer)
        return worth

    def trade(self, views: Sequence[View], worth: int = 1) -> bool:
        """Offer these arrays, wait for all offers, and tell whether all are worth reading."""
        memories = [host(view.memory) for view in views]
        self.offer([worth, *(memory.ctypes.data for memory in memories)])
        for peer in self.order:
            self.wait_for(peer)
            numbers = self._numbers(self._channel.ranks[peer])[: len(views) + 1]
            worth &= int(numbers[0])
            self._addresses[peer] = numbers[1:].copy()
        if worth:
            count(self._channel, self._plan)
        return bool(worth)

    def offer(self, numbers: list[int]) -> None:
        """Publish numbers to all peers."""
        free = FreeSlot(self._windows, self._slot, self._num_slots)
        _wait(self._channel, self._plan, free)
        self._numbers(self._channel.transport.rank)[: len(numbers)] = numbers
        self._channel.gate.settle()
        for peer in self.order:
            self._windows.publish(self._slot, self._channel.ranks[peer])

    def wait_for(self, peer: int) -> None:
        """Wait for the offer of a peer."""
        owners = [self._channel.ranks[peer]]
        _wait(self._channel, self._plan, Inboxes(self._windows, self._slot, owners))

    def release(self, peer: int) -> None:
        """Say that what a peer offered has been read."""
        self._windows.release(self._channel.ranks[peer], self._slot)

    def end(self) -> None:
        """Wait until all peers have read what this rank offered."""
        free = FreeSlot(self._windows, self._slot, self._num_slots)
        _wait(self._channel, self._plan, free)

    def gather(self, peer: int, fulls: Sequence[View], *, compact: bool) -> None:
        """Read a peer's shards into their places, from their ``compact`` form or such places."""
        pool = self._channel.pool
        for position, (layout, full) in enumerate(zip(self._plan.layouts, fulls, strict=True)):
            if full.dtype == layout.dtype:
                source = layout.table(peer, compact=compact)
                self._read(peer, position, source, host(full.memory), layout.table(peer))
                continue
            for block in blocks(layout, peer, BLOCK_NBYTES):
                chunk = pool.take(block.numel * ITEMSIZE[layout.dtype], full.memory)
                self._read(peer, position, block.run if compact else block.table, host(chunk))
                unpack(WireFormat(layout.dtype), chunk, Place(full, *block.table))
                pool.give(chunk)

    def reduce(
        self, fulls: Sequence[View], shards: Sequence[View], reduce: Reduce, *, compact: bool
    ) -> None:
        """Reduce the own shards of all ranks, into their ``compact`` form or their places."""
        me, plan = self._channel.rank, self._plan
        for position, (layout, full, shard) in enumerate(
            zip(plan.layouts, fulls, shards, strict=True)
        ):
            for block in blocks(layout, me, BLOCK_NBYTES):
                scratch: list[Memory] = []
                chunks = self._chunks(position, block, full, scratch)
                place = Place(shard, *(block.run if compact else block.table))
                with self._channel.clock.measure("decode"):
                    reduce(plan, position, chunks, place)
                self._channel.pool.give(*scratch)

    def _chunks(
        self, position: int, block: Block, full: View, scratch: list[Memory]
    ) -> list[Memory]:
        """Return the elements of a block of all ranks; memory of the pool goes to ``scratch``."""
        me, starts, dtype = self._channel.rank, block.table[0], full.dtype
        chunks: dict[int, Memory] = {}
        for peer in self.order if len(starts) == 1 else [*self.order, me]:
            chunk = self._channel.pool.take(block.numel * ITEMSIZE[dtype], full.memory)
            scratch.append(chunk)
            chunks[peer] = chunk
            if peer == me:
                pack(WireFormat(dtype), Place(full, *block.table), chunk, seed=0)
            else:
                self._read(peer, position, block.table, host(chunk))
        if len(starts) == 1:
            chunks[me] = full.elements(int(starts[0]), block.numel)
        return [chunks[rank] for rank in range(self._channel.size)]

    def _read(
        self,
        peer: int,
        position: int,
        source: Table,
        target: HostMemory,
        place: Table | None = None,
    ) -> None:
        """Read runs of elements of what a peer offered into a place, or all of ``target``."""
        size = ITEMSIZE[self._plan.layouts[position].dtype]
        starts, lengths = (array * size for array in source)
        starts += self._addresses[peer][position]
        if place is None:
            into = np.array([0]), np.array([target.size])
        else:
            into = place[0] * size, place[1] * size
        with self._channel.clock.measure("comm"):
            self._remote.read(self._channel.ranks[peer], (starts, lengths), target, into)

    def _numbers(self, rank: int) -> Indices:
        """Return the slot of a rank as the numbers that it offers."""
        return self._windows.slot(rank, self._slot, self._num_slots).view(np.int64)


def _wait(channel: Channel, plan: Plan, pending: Pending) -> None:
    """Wait for peers of this node."""
    if pending.done():
        return
    idle = Idle(channel, plan)
    while not pending.done():
        idle.rest(pending)
