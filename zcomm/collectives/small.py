"""Operations whose message to each rank fits in one round: one exchange, with the header.

All of them write their *payload* into the own row of the guard's payloads, or one for each rank
into the outbox, trade, and read the rows of all ranks. Whether an operation is small follows from
what its header says, never from what only one rank knows (the library or the strides of its array):
all ranks decide alike. Results are those of the large algorithms, bit for bit: the same kernels in
the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from zcomm.arrays import HostMemory, Memory, View
from zcomm.collectives.channel import Channel
from zcomm.collectives.wire import Place, Reduction, nested_reduce, pack, reduce, unpack
from zcomm.device import DeviceMemory, from_host, on_host, scratch
from zcomm.guard import PAYLOAD_NBYTES, Guard
from zcomm.plan import AllReduce, Plan, WireFormat
from zcomm.seeds import Draws
from zcomm.traffic import Tally


class Table:
    """The payloads of one communicator, traded and counted."""

    def __init__(self, channel: Channel, guard: Guard) -> None:
        self.channel = channel
        self.guard = guard
        self._tallies: dict[object, Tally] = {}

    @property
    def own(self) -> HostMemory:
        """The payload of this rank."""
        row: HostMemory = self.guard.payloads[self.channel.rank]
        return row

    def row(self, rank: int) -> HostMemory:
        """Return the payload of a rank."""
        row: HostMemory = self.guard.payloads[rank]
        return row

    def tally(self, operation: str, nbytes: int, logical: int) -> Tally:
        """Return the tally of calls that send everybody a payload of ``nbytes`` bytes."""
        key = operation, nbytes, logical
        if key not in self._tallies:
            others = self.channel.others
            wire = dict.fromkeys(others, nbytes), dict.fromkeys(others, logical)
            self._tallies[key] = self.channel.tally(operation, *wire)
        return self._tallies[key]

    def outgoing(self, rank: int) -> HostMemory:
        """Return the payload for one rank, where each is sent its own."""
        row: HostMemory = self.guard.outbox[rank]
        return row

    def incoming(self, rank: int) -> HostMemory:
        """Return the payload that a rank has for this one, where each is sent its own."""
        return self.outgoing(rank) if rank == self.channel.rank else self.row(rank)

    def each(self, plan: Plan) -> Tally:
        """Return the tally of calls that send every rank what the only hop of a plan does."""
        tally: Tally = plan.memo("tally", self.channel.rank, self._tally_of)
        return tally

    def _tally_of(self, plan: Plan, me: int) -> Tally:
        messages = plan.messages(0, me)
        wire = {message.peer: message.wire_nbytes for message in messages}
        logical = {message.peer: message.logical_nbytes for message in messages}
        return self.channel.tally(plan.counted_as, wire, logical)


def fits(plan: Plan) -> bool:
    """Tell whether a plan is one small message from every rank to each other."""
    found: bool = plan.memo("fits", 0, _fits)
    return found


def _fits(plan: Plan, _: int) -> bool:
    if len(plan.hops) != 1 or not plan.layouts:
        return False
    hop, size = plan.hops[0], plan.topology.size
    chunks = (plan.chunk_nbytes(hop, shard) for shard in range(size))
    return len(plan.peers(hop, 0)) == size and max(chunks) <= PAYLOAD_NBYTES


def reduces(plans: AllReduce) -> bool:
    """Tell whether an all_reduce is one small message from every rank to all others."""
    return plans.whole is not None and fits(plans.whole)


def all_gather(
    table: Table,
    words: str,
    plan: Plan,
    shards: Sequence[View],
    fulls: Sequence[View],
    draws: Draws,
) -> None:
    """Gather the shards of all ranks.

    1. Encode the own shard into the payload.
    2. Trade.
    3. Decode every payload, the own one too, into its place.
    """
    channel, hop = table.channel, plan.hops[0]
    me, at = channel.rank, 0
    with channel.clock.measure("encode"):
        for position, (layout, wire) in enumerate(zip(plan.layouts, hop.formats, strict=True)):
            nbytes = wire.wire_nbytes(layout.lengths(me))
            place = Place(shards[position], *layout.table(me, compact=True))
            seed = draws.of(wire.codec, me, position)
            _pack(wire, place, table.own[at : at + nbytes], seed)
            at += nbytes
    message = plan.messages(0, me)[0]
    table.guard.trade(words, at)
    table.tally(plan.counted_as, at, message.logical_nbytes).calls += 1
    with channel.clock.measure("decode"):
        for rank in range(channel.size):
            at = 0
            for layout, wire, full in zip(plan.layouts, hop.formats, fulls, strict=True):
                nbytes = wire.wire_nbytes(layout.lengths(rank))
                chunk = table.row(rank)[at : at + nbytes]
                _unpack(wire, chunk, Place(full, *layout.table(rank)))
                at += nbytes


def reduce_scatter(
    table: Table,
    words: str,
    plan: Plan,
    fulls: Sequence[View],
    shards: Sequence[View],
    reduction: Reduction,
    draws: Draws,
) -> None:
    """Reduce ``fulls``, and keep the own shard.

    1. Encode the shard of every rank into the payload for it, the own one too.
    2. Trade.
    3. Decode, sum and divide what all ranks have for this one.
    """
    channel, hop = table.channel, plan.hops[0]
    with channel.clock.measure("encode"):
        sizes = tuple(
            _pack_shard(table, plan, fulls, shard, draws) for shard in range(channel.size)
        )
    table.guard.trade(words, sizes)
    table.each(plan).calls += 1
    me, at = channel.rank, 0
    with channel.clock.measure("decode"):
        for position, (layout, wire) in enumerate(zip(plan.layouts, hop.formats, strict=True)):
            span = slice(at, at + wire.wire_nbytes(layout.lengths(me)))
            place = Place(shards[position], *layout.table(me, compact=True))
            memory = place.view.memory
            parts = [_placed(table.incoming(peer)[span], memory) for peer in plan.peers(hop, me)]
            if hop.level is None and wire.codec is None:
                formats = wire, plan.partials[position]
                nested_reduce(plan.nesting, formats, parts, place, reduction)
            else:
                reduce(wire, parts, place, reduction)
            at = span.stop


def _pack_shard(table: Table, plan: Plan, fulls: Sequence[View], shard: int, draws: Draws) -> int:
    """Write the payload for the owner of a shard; return its bytes."""
    at = 0
    for position, (layout, wire) in enumerate(zip(plan.layouts, plan.hops[0].formats, strict=True)):
        nbytes = wire.wire_nbytes(layout.lengths(shard))
        place = Place(fulls[position], *layout.table(shard))
        seed = draws.of(wire.codec, 0, shard, position)
        _pack(wire, place, table.outgoing(shard)[at : at + nbytes], seed)
        at += nbytes
    return at


def all_to_all(table: Table, words: str, send: View, recv: View) -> None:
    """Send the i-th of W equal runs to rank i; the run received from rank i lands in place i."""
    size = table.channel.size
    nbytes = send.memory.size // size
    runs = [slice(rank * nbytes, (rank + 1) * nbytes) for rank in range(size)]
    for rank, run in enumerate(runs):
        table.outgoing(rank)[:nbytes] = on_host(send.memory[run])
    table.guard.trade(words, (nbytes,) * size)
    table.tally("all_to_all", nbytes, nbytes).calls += 1
    for rank, run in enumerate(runs):
        from_host(recv.memory[run], table.incoming(rank)[:nbytes])


def all_reduce(
    table: Table, words: str, plans: AllReduce, tensors: Sequence[View], reduction: Reduction
) -> None:
    """Reduce ``tensors`` over all ranks, in place.

    1. Trade them whole.
    2. Reduce the payloads of all ranks as the levels nest.
    """
    at = 0
    for tensor in tensors:
        table.own[at : at + tensor.memory.size] = on_host(tensor.memory)
        at += tensor.memory.size
    table.guard.trade(words, at)
    table.tally("all_reduce", at, at).calls += 1
    at = 0
    for tensor, partial in zip(tensors, plans.scatter.partials, strict=True):
        nbytes = tensor.memory.size
        span = slice(at, at + nbytes)
        parts = [
            _placed(table.row(rank)[span], tensor.memory) for rank in range(table.channel.size)
        ]
        formats = WireFormat(tensor.dtype), partial
        nested_reduce(plans.scatter.nesting, formats, parts, whole(tensor), reduction)
        at += nbytes


def broadcast(table: Table, words: str, x: View, root: int) -> None:
    """Copy the root's elements to all ranks: they are its payload, the others have none."""
    if table.channel.rank != root:
        table.guard.trade(words, 0)
        from_host(x.memory, table.row(root)[: x.memory.size])
        return
    table.own[: x.memory.size] = on_host(x.memory)
    table.guard.trade(words, x.memory.size)
    table.tally("broadcast", x.memory.size, x.memory.size).calls += 1


def gather_values(table: Table, words: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the control values of all ranks, shape (W, n): the same rows on every rank."""
    nbytes = values.nbytes
    table.own[:nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    table.guard.trade(words, nbytes)
    table.tally("values", nbytes, nbytes).calls += 1
    rows = np.ascontiguousarray(table.guard.payloads[:, :nbytes])
    return rows.view(values.dtype).reshape(table.channel.size, *values.shape)


def whole(x: View) -> Place:
    """Return the place of all elements."""
    return Place(x, np.array([0], np.int64), np.array([x.numel], np.int64))


def _pack(wire: WireFormat, source: Place, out: HostMemory, seed: int) -> None:
    if not isinstance(source.view.memory, DeviceMemory):
        pack(wire, source, out, seed)
        return
    chunk = scratch(out.size, source.view.memory)
    pack(wire, source, chunk, seed)
    out[...] = on_host(chunk)


def _unpack(wire: WireFormat, chunk: HostMemory, target: Place) -> None:
    unpack(wire, _placed(chunk, target.view.memory), target)


def _placed(chunk: HostMemory, like: Memory) -> Memory:
    """Return received bytes in the place where ``like`` lies."""
    if not isinstance(like, DeviceMemory):
        return chunk
    memory = scratch(chunk.size, like)
    from_host(memory, chunk)
    return memory
