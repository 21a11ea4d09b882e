"""Exact operations inside a node through its windows, block by block and nothing else.

What :mod:`zcomm.collectives.pipeline` does for any plan, for the simplest: one hop, no codec, no
message. A rank's *steps* are the blocks of its shard. A sender puts a step of every receiver into a
slot (in an all_gather the same for all), a receiver takes the steps in order and releases the slot;
each does what it can, and reads before it writes, while what was written is in the caches. The bits
are those of the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zcomm.arrays import ITEMSIZE, DeviceMemory, HostMemory, Memory, View
from zcomm.codecs import kernels
from zcomm.collectives.channel import Channel
from zcomm.collectives.inside import (
    Block,
    Patience,
    Reduce,
    Table,
    blocks,
    count,
    host,
    inside,
    on_wire,
)
from zcomm.collectives.memories import LINE_NBYTES
from zcomm.collectives.wire import Place, host_kernels, pack, unpack
from zcomm.pieces import in_flight, logical_nbytes, slot_nbytes
from zcomm.plan import AllReduce, Plan, WireFormat
from zcomm.transports.windows import Windows

SMALLEST_NBYTES = 1024 * 1024
"""Below this size pieces do as well."""

GATHER_NBYTES = 512 * 1024
REDUCE_NBYTES = 256 * 1024
"""Bytes of a block of one shard: less costs Python, more leaves the caches."""

SMALLEST_BLOCK_NBYTES = 32 * 1024
"""What a slot must hold for every receiver; where ranks are many, pieces do as well."""

Step = tuple[int, Block]
"""The position of a layout, and a block of a shard of it."""


def usable(channel: Channel, plan: Plan, views: Sequence[View]) -> bool:
    """Tell whether an operation on these arrays may be executed here."""
    return (
        inside(channel, plan)
        and not any(isinstance(view.memory, DeviceMemory) for view in views)
        and logical_nbytes(plan) >= SMALLEST_NBYTES
        and _each(plan) >= SMALLEST_BLOCK_NBYTES
    )


def all_gather(channel: Channel, plan: Plan, shards: Sequence[View], fulls: Sequence[View]) -> bool:
    """Do an all_gather, or return False where that is not for here.

    1. Put a block of the own shard where all read it, and copy it to its own place.
    2. Copy the blocks of the others from where they are to their places.
    """
    if not usable(channel, plan, fulls):
        return False
    with host_kernels():
        run = _Run(channel, plan)
        run.gather(on_wire(shards, plan), fulls, placed=False)
    return True


def reduce_scatter(
    channel: Channel, plan: Plan, fulls: Sequence[View], shards: Sequence[View], reduce: Reduce
) -> bool:
    """Do a reduce_scatter, or return False where that is not for here.

    1. Put a block of the shard of every other rank where it reads them.
    2. Reduce a block of the own shard when those of all others are there.
    """
    if not usable(channel, plan, fulls):
        return False
    with host_kernels():
        _Run(channel, plan).reduce(on_wire(fulls, plan), shards, reduce, compact=True)
    return True


def all_reduce(channel: Channel, plans: AllReduce, tensors: Sequence[View], reduce: Reduce) -> bool:
    """Do an all_reduce in place, or return False where that is not for here.

    1. Reduce the own shard in place: nobody else needs it from this rank.
    2. Gather the reduced shards.
    """
    if not (usable(channel, plans.scatter, tensors) and usable(channel, plans.gather, tensors)):
        return False
    with host_kernels():
        _Run(channel, plans.scatter).reduce(tensors, tensors, reduce, compact=False)
        _Run(channel, plans.gather).gather(tensors, tensors, placed=True)
    return True


class _Run:
    """One rank's part of an operation."""

    def __init__(self, channel: Channel, plan: Plan) -> None:
        assert channel.transport.windows is not None
        channel.gate.settle()
        count(channel, plan)
        self._channel = channel
        self._plan = plan
        self._windows: Windows = channel.transport.windows
        self._num_slots = in_flight(plan)
        self._copy = kernels().copy
        me, size = channel.rank, channel.size
        self._order = [(me + step) % size for step in range(1, size)]
        self._numbers = channel.ranks
        self._slots = {
            rank: [
                self._windows.slot(channel.ranks[rank], slot, self._num_slots)
                for slot in range(self._num_slots)
            ]
            for rank in range(size)
        }

    def gather(self, sources: Sequence[View], fulls: Sequence[View], *, placed: bool) -> None:
        """Gather; where ``placed`` the own shard is where it belongs, and is read there."""
        me, num_slots = self._channel.rank, self._num_slots
        steps = [_steps(self._plan, rank, GATHER_NBYTES) for rank in range(self._channel.size)]
        taken, written = [0] * len(steps), 0
        patience = Patience(self._channel, self._plan)
        while written < len(steps[me]) or any(taken[p] < len(steps[p]) for p in self._order):
            moved = False
            for peer in self._order:
                slot = taken[peer] % num_slots
                if taken[peer] < len(steps[peer]) and self._arrived(peer, slot):
                    position, block = steps[peer][taken[peer]]
                    self._take(self._slots[peer][slot], position, block, fulls)
                    self._windows.release(self._numbers[peer], slot)
                    taken[peer] += 1
                    moved = True
            slot = written % num_slots
            if written < len(steps[me]) and self._windows.free(slot, num_slots):
                position, block = steps[me][written]
                table = block.table if placed else block.run
                self._put(sources[position], table, self._slots[me][slot], block.numel)
                self._publish(slot, self._order)
                if not placed:
                    self._take(self._slots[me][slot], position, block, fulls)
                written += 1
                moved = True
            if moved:
                patience.reset()
            else:
                patience.rest(partial(self._late, steps, taken))

    def reduce(
        self, fulls: Sequence[View], shards: Sequence[View], reduce: Reduce, *, compact: bool
    ) -> None:
        """Reduce the own shards of all ranks, into their ``compact`` form or their places."""
        me, num_slots = self._channel.rank, self._num_slots
        nbytes = min(REDUCE_NBYTES, _each(self._plan))
        steps = [_steps(self._plan, rank, nbytes) for rank in range(self._channel.size)]
        most = max(len(steps[peer]) for peer in self._order)
        done = written = 0
        patience = Patience(self._channel, self._plan)
        while written < most or done < len(steps[me]):
            moved, slot = False, done % num_slots
            if done < len(steps[me]) and all(self._arrived(p, slot) for p in self._order):
                position, block = steps[me][done]
                place = Place(shards[position], *(block.run if compact else block.table))
                self._reduce_step(slot, steps[me][done], fulls, reduce, place)
                for peer in self._order:
                    self._windows.release(self._numbers[peer], slot)
                done += 1
                moved = True
            slot = written % num_slots
            if written < most and self._windows.free(slot, num_slots):
                receivers = [peer for peer in self._order if written < len(steps[peer])]
                for peer in receivers:
                    position, block = steps[peer][written]
                    out = self._slots[me][slot][self._region(me, peer) :]
                    self._put(fulls[position], block.table, out, block.numel)
                    self._publish(slot, [peer])
                written += 1
                moved = True
            if moved:
                patience.reset()
            else:
                late = [done] * len(steps)
                patience.rest(partial(self._late, [steps[me]] * len(steps), late))

    def _reduce_step(
        self, slot: int, step: Step, fulls: Sequence[View], reduce: Reduce, place: Place
    ) -> None:
        """Reduce a block of the own shard: those of the others in a slot, the own where it is."""
        me, (position, block) = self._channel.rank, step
        full = fulls[position]
        nbytes = block.numel * ITEMSIZE[full.dtype]
        chunks: list[Memory] = []
        scratch: list[Memory] = []
        for rank in range(self._channel.size):
            if rank != me:
                at = self._region(rank, me)
                chunks.append(self._slots[rank][slot][at : at + nbytes])
            elif len(block.table[0]) == 1:
                chunks.append(full.elements(int(block.table[0][0]), block.numel))
            else:
                scratch.append(self._channel.pool.take(nbytes, full.memory))
                pack(WireFormat(full.dtype), Place(full, *block.table), scratch[0], seed=0)
                chunks += scratch
        with self._channel.clock.measure("decode"):
            reduce(self._plan, position, chunks, place)
        self._channel.pool.give(*scratch)

    def _region(self, sender: int, receiver: int) -> int:
        """Return where in a slot of the sender the block for a receiver begins."""
        return (receiver - (receiver > sender)) * _each(self._plan)

    def _put(self, source: View, table: Table, out: HostMemory, numel: int) -> None:
        """Copy elements of an array into a slot."""
        out = out[: numel * ITEMSIZE[source.dtype]]
        with self._channel.clock.measure("encode"):
            if len(table[0]) == 1:
                out[...] = host(source.elements(int(table[0][0]), numel))
            else:
                pack(WireFormat(source.dtype), Place(source, *table), out, seed=0)

    def _take(self, slot: HostMemory, position: int, block: Block, fulls: Sequence[View]) -> None:
        """Copy a block from a slot to its place."""
        full, dtype = fulls[position], self._plan.layouts[position].dtype
        chunk = slot[: block.numel * ITEMSIZE[dtype]]
        starts = block.table[0]
        with self._channel.clock.measure("decode"):
            if full.dtype == dtype and len(starts) == 1:
                target = host(full.elements(int(starts[0]), block.numel))
                self._copy(target, chunk, full.memory.size)
            else:
                unpack(WireFormat(dtype), chunk, Place(full, *block.table))

    def _arrived(self, peer: int, slot: int) -> bool:
        return self._windows.arrived(self._numbers[peer], slot)

    def _publish(self, slot: int, receivers: Sequence[int]) -> None:
        for peer in receivers:
            self._windows.publish(slot, self._numbers[peer])

    def _late(self, steps: Sequence[Sequence[Step]], taken: Sequence[int]) -> list[int]:
        """Return the ranks of the transport that have not written what is next, or not read."""
        late = {
            self._numbers[peer]
            for peer in self._order
            if taken[peer] < len(steps[peer])
            and not self._arrived(peer, taken[peer] % self._num_slots)
        }
        return sorted(late or self._windows.readers())


def _each(plan: Plan) -> int:
    """Return the bytes of a slot for each of its receivers."""
    return slot_nbytes(plan) // max(plan.topology.size - 1, 1) // LINE_NBYTES * LINE_NBYTES


def _steps(plan: Plan, rank: int, nbytes: int) -> tuple[Step, ...]:
    """Return the blocks of all layouts of a shard."""

    def make(plan: Plan, rank: int) -> tuple[Step, ...]:
        pairs = enumerate(plan.layouts)
        return tuple((at, block) for at, lay in pairs for block in blocks(lay, rank, nbytes))

    made: tuple[Step, ...] = plan.memo(f"blocks of {nbytes}", rank, make)
    return made
