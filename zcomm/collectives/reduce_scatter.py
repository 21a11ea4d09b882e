"""reduce_scatter: every rank keeps its shard of the sum; qgZ for any number of levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from topology import Topology
from zcomm.arrays import DeviceMemory, Memory, View
from zcomm.collectives import pipeline
from zcomm.collectives.channel import Channel
from zcomm.collectives.courier import DONE, LINE_NBYTES, Courier, Regions
from zcomm.collectives.pipeline import Steps
from zcomm.collectives.wire import (
    Packing,
    Place,
    Recoding,
    Reduction,
    pack_all,
    reduce,
    reduce_pack,
    reduce_pack_all,
)
from zcomm.device import scratch
from zcomm.layout import Indices
from zcomm.pieces import Piece
from zcomm.plan import Hop, Plan, WireFormat
from zcomm.seeds import Draws

Chunks = dict[int, list[Memory]]
"""For every shard on its way: its wire chunks from the peers of the last hop, ascending."""


def reduce_scatter(
    channel: Channel,
    plan: Plan,
    fulls: Sequence[View],
    shards: Sequence[View],
    reduction: Reduction,
    draws: Draws,
) -> None:
    """Reduce ``fulls`` over all ranks and write this rank's segments, compact, to ``shards``.

    Piece by piece, several at a time:

    1. Post the receives of all hops. Order the shards by the coordinates of their owners and encode
       them, each message where its peer will read it, or where it is sent from.
    2. Over each hop, the innermost level first, send every peer the shards on their way to it, one
       message, and receive as many from each.
    3. Between two hops decode, sum in float32 ascending by coordinate, and encode again (one fused
       pass).
    4. After the last hop decode, sum, divide once, and round once to the dtype of ``shards``.

    The own chunks pass the codec like all others. A hop among all ranks (flat) without a codec sums
    locally, nested as the levels are, so that it gives the bits of the hierarchical one. qgZ:
    ZeRO++ (arXiv 2306.10209, section 4.3).
    """
    if not plan.layouts:
        return

    def start(piece: Piece, courier: Courier) -> Steps:
        parts = piece.of(fulls), piece.of_shard(shards, channel.rank)
        return _Run(channel, piece.plan, courier, *parts, reduction, draws).steps()

    pipeline.run(channel, plan, fulls[0].memory, start, regions)


def regions(plan: Plan, sender: int, near: frozenset[int]) -> tuple[Regions, int]:
    """Lay out a rank's messages to near peers: hop by hop, peer by peer."""
    found: Regions = {}
    at = 0
    for index, hop in enumerate(plan.hops):
        for peer in plan.peers(hop, sender):
            if peer in near:
                end = at + plan.message_nbytes(hop, sender, peer)
                found[index, peer] = slice(at, end)
                at = -(-end // LINE_NBYTES) * LINE_NBYTES
    return found, at


@dataclass
class _Run:
    """One piece of a reduce_scatter under way.

    ``incoming`` is where messages of (hop, peer) are read, ``scratch[hop]`` the pool's memory in
    which chunks of a hop lie, ``leaving`` that of messages on their way out.
    """

    channel: Channel
    plan: Plan
    courier: Courier
    fulls: Sequence[View]
    shards: Sequence[View]
    reduction: Reduction
    draws: Draws
    incoming: dict[tuple[int, int], Memory] = field(default_factory=dict)
    scratch: dict[int, list[Memory]] = field(default_factory=dict)
    leaving: list[Memory] = field(default_factory=list)

    def steps(self) -> Steps:
        """Run the piece, see :func:`reduce_scatter`."""
        if not self.plan.hops:
            self._finish(self._alone())
            return
        courier, last = self.courier, len(self.plan.hops) - 1
        yield courier.open()
        self._expect()
        yield DONE
        chunks: Chunks = {}
        for index in range(last + 1):
            own = self._send(index, chunks)
            self._release(index - 1)
            yield courier.arrival(index)
            chunks = self._cut(index, own)
            if courier.sent().done():
                self._left()
        with self.channel.clock.measure("decode"):
            self._finish(chunks[self.channel.rank])
        self._release(last)
        yield courier.sent()
        self._left()

    def _expect(self) -> None:
        """Post the receives of all hops."""
        plan, me = self.plan, self.channel.rank
        for index, hop in enumerate(plan.hops):
            self.scratch[index] = []
            for peer in plan.peers(hop, me):
                if peer == me:
                    continue
                inbox = self.courier.inbox(index, peer)
                if inbox is None:
                    inbox = self._take(plan.message_nbytes(hop, peer, me), self.scratch[index])
                    self.courier.expect(index, peer, inbox)
                self.incoming[index, peer] = inbox

    def _send(self, index: int, chunks: Chunks) -> Memory:
        """Encode and send the messages of a hop, the wire first; return the own one."""
        plan, me = self.plan, self.channel.rank
        hop = plan.hops[index]
        messages: dict[int, Memory] = {}
        batch = isinstance(self.fulls[0].memory, DeviceMemory)
        packings: list[Packing] = []
        recodings: list[Recoding] = []
        for peer in plan.outward(hop, me):
            plain = self._plain(hop, index, peer)
            if plain is None:
                plain, outs = self._message(hop, index, peer)
                for shard, out in outs.items():
                    if index == 0:
                        packings += self._packings(hop, shard, out)
                    else:
                        recodings += self._recodings(index, shard, chunks[shard], out)
            messages[peer] = plain
            if not batch:
                self._encode(packings, recodings)
                self._hand_over(index, peer, plain)
        if batch:
            self._encode(packings, recodings)
            for peer in plan.peers(hop, me):
                self._hand_over(index, peer, messages[peer])
        return messages[me]

    def _encode(self, packings: list[Packing], recodings: list[Recoding]) -> None:
        if packings or recodings:
            with self.channel.clock.measure("encode"):
                pack_all(packings)
                reduce_pack_all(recodings, self.reduction)
            packings.clear()
            recodings.clear()

    def _hand_over(self, index: int, peer: int, message: Memory) -> None:
        me = self.channel.rank
        if peer != me:
            logical = self.plan.message(index, me, peer).logical_nbytes
            self.courier.send(index, peer, message, logical)

    def _cut(self, index: int, own: Memory) -> Chunks:
        """Cut the messages that arrived, and the own one, into chunks."""
        plan, me = self.plan, self.channel.rank
        hop = plan.hops[index]
        messages = [
            own if peer == me else self.incoming[index, peer] for peer in plan.peers(hop, me)
        ]
        return {
            shard: [message[span] for message in messages]
            for shard, span in plan.spans(hop, plan.cargo(hop, me, me)).items()
        }

    def _release(self, index: int) -> None:
        """Give back the memory of a hop's chunks, which have been read."""
        if index < 0:
            return
        for hop, peer in self.incoming:
            if hop == index:
                self.courier.release(index, peer)
        self.channel.pool.give(*self.scratch.pop(index))

    def _left(self) -> None:
        self.channel.pool.give(*self.leaving)
        self.leaving = []

    def _alone(self) -> list[Memory]:
        """Return the only rank's shard as it is: no level has a hop, so no codec is passed."""
        me = self.channel.rank
        hop = self.plan.plain_hop
        out = scratch(self.plan.chunk_nbytes(hop, me), self.fulls[0].memory)
        pack_all(self._packings(hop, me, out))
        return [out]

    def _finish(self, chunks: Sequence[Memory]) -> None:
        """Reduce the chunks of the last hop into the caller's shards."""
        plan, me = self.plan, self.channel.rank
        hop = plan.hops[-1] if plan.hops else plan.plain_hop
        for position, part in enumerate(plan.parts(hop, me)):
            parts = [chunk[part.span] for chunk in chunks]
            place = Place(self.shards[position], *plan.layouts[position].table(me, compact=True))
            if hop.level is None and part.wire.codec is None:
                formats = part.wire, plan.partials[position]
                nested_reduce(plan.nesting, formats, parts, place, self.reduction)
            else:
                reduce(part.wire, parts, place, self.reduction)

    def _plain(self, hop: Hop, index: int, peer: int) -> Memory | None:
        """Return a message as it already lies in the caller's memory, where it can stay there."""
        cargo = self.plan.cargo(hop, self.channel.rank, peer)
        if index > 0 or len(cargo) != 1 or len(self.fulls) != 1 or hop.formats[0].codec is not None:
            return None
        run = self.plan.layouts[0].run(cargo[0])
        if run is None or self.courier.outbox(index, peer) is not None:
            return None
        return self.fulls[0].elements(run.start, run.numel)

    def _message(self, hop: Hop, index: int, peer: int) -> tuple[Memory, dict[int, Memory]]:
        """Return memory for one message, and where in it the chunk of each shard belongs."""
        plan, me = self.plan, self.channel.rank
        message = self.courier.outbox(index, peer)
        if message is None:
            keep = self.scratch[index] if peer == me else self.leaving
            message = self._take(plan.message_nbytes(hop, me, peer), keep)
        spans = plan.spans(hop, plan.cargo(hop, me, peer))
        return message, {shard: message[span] for shard, span in spans.items()}

    def _packings(self, hop: Hop, shard: int, out: Memory) -> Iterator[Packing]:
        for position, part in enumerate(self.plan.parts(hop, shard)):
            source = Place(self.fulls[position], *self.plan.layouts[position].table(shard))
            seed = self.draws.of(part.wire.codec, 0, shard, position)
            yield Packing(part.wire, source, out[part.span], seed)

    def _recodings(
        self, index: int, shard: int, chunks: Sequence[Memory], out: Memory
    ) -> Iterator[Recoding]:
        before = self.plan.parts(self.plan.hops[index - 1], shard)
        after = self.plan.parts(self.plan.hops[index], shard)
        for position, layout in enumerate(self.plan.layouts):
            old, new = before[position], after[position]
            parts = [chunk[old.span] for chunk in chunks]
            _, lengths = layout.table(shard)
            seed = self.draws.of(new.wire.codec, index, shard, position)
            yield Recoding(old.wire, parts, new.wire, lengths, out[new.span], seed)

    def _take(self, nbytes: int, keep: list[Memory]) -> Memory:
        memory = self.channel.pool.take(nbytes, self.fulls[0].memory)
        keep.append(memory)
        return memory


def nested_reduce(
    nesting: Topology,
    formats: tuple[WireFormat, WireFormat],
    chunks: Sequence[Memory],
    target: Place,
    reduction: Reduction,
) -> None:
    """Reduce the plain chunks of all ranks as the levels nest.

    Inside out, ascending, every partial sum rounded: ``formats`` are those of the chunks and of the
    partial sums. This is the definition of an exact result; the hierarchical algorithm computes the
    same, spread over the ranks.
    """
    wire, partial = formats
    parts = list(enumerate(chunks))
    for level in nesting.levels:
        if len(level.groups) in (1, len(parts)):
            continue
        sums = []
        for group in level.groups:
            members = [part for first, part in parts if first in group]
            sums.append((group[0], _partial(wire, members, partial, target.lengths, reduction)))
        parts, wire = sums, partial
    reduce(wire, [part for _, part in parts], target, reduction)


def _partial(
    wire: WireFormat,
    parts: list[Memory],
    partial: WireFormat,
    lengths: Indices,
    reduction: Reduction,
) -> Memory:
    out = scratch(partial.wire_nbytes(tuple(lengths.tolist())), parts[0])
    reduce_pack(wire, parts, partial, lengths, reduction, out, seed=0)
    return out
