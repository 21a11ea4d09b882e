"""all_gather: every rank's shard to all ranks, encoded once, decoded once, straight into place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zcomm.arrays import Memory, View
from zcomm.collectives.channel import Channel
from zcomm.collectives.wire import Place, Unpacking, pack, unpack, unpack_all
from zcomm.device import copy
from zcomm.plan import Hop, Plan, WireFormat
from zcomm.seeds import Draws


class _Slots:
    """The wire chunks of all shards in ownership order: every cargo is one run of bytes."""

    def __init__(self, channel: Channel, plan: Plan, hop: Hop, like: Memory) -> None:
        self._offsets: dict[int, tuple[int, int]] = {}
        at = 0
        for shard in plan.topology.ownership():
            nbytes = plan.chunk_nbytes(hop, shard)
            self._offsets[shard] = (at, at + nbytes)
            at += nbytes
        self.memory = channel.pool.take(at, like)

    def cargo(self, shards: Sequence[int]) -> Memory:
        """Return the bytes of a message."""
        return self.memory[self._offsets[shards[0]][0] : self._offsets[shards[-1]][1]]


def all_gather(
    channel: Channel, plan: Plan, shards: Sequence[View], fulls: Sequence[View], draws: Draws
) -> None:
    """Gather the shards of all ranks into the segments of ``fulls`` that the plan's layouts name.

    1. Encode the own shard into its slot.
    2. Over each hop, the outermost level first, send every slot held so far to the peers of the
       level and receive theirs: a shard crosses the network once per node. Where the next level has
       no codec, decode what is held and forward the decoded values.
    3. Decode every slot once into its place, the own one too: all ranks hold what receivers decode.

    Hierarchical all-gather as in ZeRO++ (arXiv 2306.10209, section 4.1), for any number of levels.
    """
    me = channel.rank
    if not plan.layouts:
        return
    if not plan.hops:
        for layout, own, full in zip(plan.layouts, shards, fulls, strict=True):
            chunk = own.elements(0, layout.shard_numel(me))
            unpack(WireFormat(layout.dtype), chunk, Place(full, *layout.table(me)))
        return
    if _direct(plan, shards, fulls):
        _gather_in_place(channel, plan, shards[0], fulls[0])
        return
    hop, like = plan.hops[0], fulls[0].memory
    slots = _Slots(channel, plan, hop, like)
    _encode(channel, plan, hop, slots, me, shards, draws, compact=True)
    for index, following in enumerate(plan.hops):
        if following.formats != hop.formats:
            held = plan.cargo(following, me, me)
            _decode(channel, plan, hop, slots, held, fulls)
            channel.pool.give(slots.memory)
            hop, slots = following, _Slots(channel, plan, following, like)
            for shard in held:
                _encode(channel, plan, hop, slots, shard, fulls, draws, compact=False)
        peers = plan.peers(following, me)
        logical = {message.peer: message.logical_nbytes for message in plan.messages(index, me)}
        sends = {peer: slots.cargo(plan.cargo(following, me, peer)) for peer in peers if peer != me}
        recvs = {peer: slots.cargo(plan.cargo(following, peer, me)) for peer in peers if peer != me}
        channel.exchange(plan.counted_as, sends, recvs, logical)
    _decode(channel, plan, hop, slots, range(channel.size), fulls)
    channel.pool.give(slots.memory)


def _direct(plan: Plan, shards: Sequence[View], fulls: Sequence[View]) -> bool:
    """Tell whether plain bytes can be received where they belong, without a slot."""
    layout = plan.layouts[0]
    return (
        len(plan.layouts) == 1
        and all(hop.level is None and hop.formats[0].codec is None for hop in plan.hops)
        and shards[0].dtype == fulls[0].dtype == layout.dtype
        and all(layout.run(rank) is not None for rank in range(len(layout.shards)))
    )


def _gather_in_place(channel: Channel, plan: Plan, shard: View, full: View) -> None:
    layout, me = plan.layouts[0], channel.rank
    places = []
    for rank in range(channel.size):
        run = layout.run(rank)
        assert run is not None
        places.append(full.elements(run.start, run.numel))
    own = shard.elements(0, layout.shard_numel(me))
    recvs = {peer: place for peer, place in enumerate(places) if peer != me}
    channel.exchange(plan.counted_as, dict.fromkeys(recvs, own), recvs)
    copy(places[me], own)


def _encode(
    channel: Channel,
    plan: Plan,
    hop: Hop,
    slots: _Slots,
    shard: int,
    sources: Sequence[View],
    draws: Draws,
    *,
    compact: bool,
) -> None:
    with channel.clock.measure("encode"):
        out, at = slots.cargo((shard,)), 0
        for position, layout in enumerate(plan.layouts):
            wire = hop.formats[position]
            nbytes = wire.wire_nbytes(layout.lengths(shard))
            place = Place(sources[position], *layout.table(shard, compact=compact))
            pack(wire, place, out[at : at + nbytes], draws.of(wire.codec, shard, position))
            at += nbytes


def _decode(
    channel: Channel,
    plan: Plan,
    hop: Hop,
    slots: _Slots,
    held: Sequence[int],
    fulls: Sequence[View],
) -> None:
    with channel.clock.measure("decode"):
        unpack_all(_unpackings(plan, hop, slots, held, fulls))


def _unpackings(
    plan: Plan, hop: Hop, slots: _Slots, held: Sequence[int], fulls: Sequence[View]
) -> Iterator[Unpacking]:
    for shard in held:
        chunk, at = slots.cargo((shard,)), 0
        for layout, wire, full in zip(plan.layouts, hop.formats, fulls, strict=True):
            nbytes = wire.wire_nbytes(layout.lengths(shard))
            yield Unpacking(wire, chunk[at : at + nbytes], Place(full, *layout.table(shard)))
            at += nbytes
