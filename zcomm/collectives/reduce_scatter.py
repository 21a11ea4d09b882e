"""reduce_scatter: every rank keeps its shard of the sum; qgZ for any number of levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from topology import Topology
from zcomm.arrays import Memory, View
from zcomm.collectives.channel import Channel
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

    1. Order the shards by the coordinates of their owners and encode them.
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
    run = _Run(channel, plan, fulls, reduction, draws)
    chunks = run.alone() if not plan.hops else {}
    for index in range(len(plan.hops)):
        before, run.scratch = run.scratch, []
        chunks = run.exchange(index, run.outgoing(index, chunks))
        channel.pool.give(*before)
    with channel.clock.measure("decode"):
        run.finish(chunks[channel.rank], shards)
    channel.pool.give(*run.scratch)


@dataclass
class _Run:
    """One reduce_scatter under way; ``scratch`` is the memory that the last hop's chunks lie in."""

    channel: Channel
    plan: Plan
    fulls: Sequence[View]
    reduction: Reduction
    draws: Draws
    scratch: list[Memory] = field(default_factory=list)

    def alone(self) -> Chunks:
        """Return the only rank's shard as it is: no level has a hop, so no codec is passed."""
        me = self.channel.rank
        hop = Hop(None, self.plan.plain_formats)
        out = scratch(self.plan.chunk_nbytes(hop, me), self.fulls[0].memory)
        pack_all(self._packings(hop, me, out))
        return {me: [out]}

    def outgoing(self, index: int, chunks: Chunks) -> dict[int, Memory]:
        """Encode the message for every peer of a hop, this rank included."""
        plan, me = self.plan, self.channel.rank
        hop = plan.hops[index]
        messages = {}
        with self.channel.clock.measure("encode"):
            packings: list[Packing] = []
            recodings: list[Recoding] = []
            for peer in plan.peers(hop, me):
                cargo = plan.cargo(hop, me, peer)
                plain = self._plain(hop, cargo) if index == 0 else None
                if plain is None:
                    plain, outs = self._message(hop, cargo)
                    for shard, out in outs.items():
                        if index == 0:
                            packings += self._packings(hop, shard, out)
                        else:
                            recodings += self._recodings(index, shard, chunks[shard], out)
                messages[peer] = plain
            pack_all(packings)
            reduce_pack_all(recodings, self.reduction)
        return messages

    def exchange(self, index: int, messages: dict[int, Memory]) -> Chunks:
        """Exchange the messages of a hop and cut what arrived into chunks."""
        plan, me = self.plan, self.channel.rank
        hop = plan.hops[index]
        cargo = plan.cargo(hop, me, me)
        nbytes = sum(plan.chunk_nbytes(hop, shard) for shard in cargo)
        recvs = {peer: self._take(nbytes) for peer in messages if peer != me}
        sends = {peer: memory for peer, memory in messages.items() if peer != me}
        logical = {message.peer: message.logical_nbytes for message in plan.messages(index, me)}
        self.channel.exchange(plan.counted_as, sends, recvs, logical)
        chunks: Chunks = {}
        at = 0
        for shard in cargo:
            span = slice(at, at + plan.chunk_nbytes(hop, shard))
            chunks[shard] = [(messages if peer == me else recvs)[peer][span] for peer in messages]
            at = span.stop
        return chunks

    def finish(self, chunks: Sequence[Memory], shards: Sequence[View]) -> None:
        """Reduce the chunks of the last hop into the caller's shards."""
        plan, me = self.plan, self.channel.rank
        hop = plan.hops[-1] if plan.hops else Hop(None, plan.plain_formats)
        for position, piece in enumerate(_pieces(plan, hop, me)):
            parts = [chunk[piece.span] for chunk in chunks]
            place = Place(shards[position], *plan.layouts[position].table(me, compact=True))
            if hop.level is None and piece.wire.codec is None:
                formats = piece.wire, plan.partials[position]
                nested_reduce(plan.nesting, formats, parts, place, self.reduction)
            else:
                reduce(piece.wire, parts, place, self.reduction)

    def _plain(self, hop: Hop, cargo: Sequence[int]) -> Memory | None:
        """Return the message as it already lies in the caller's memory, where it does."""
        if len(cargo) != 1 or len(self.fulls) != 1 or hop.formats[0].codec is not None:
            return None
        run = self.plan.layouts[0].run(cargo[0])
        return None if run is None else self.fulls[0].elements(run.start, run.numel)

    def _message(self, hop: Hop, cargo: Sequence[int]) -> tuple[Memory, dict[int, Memory]]:
        """Return memory for one message, and where in it the chunk of each shard belongs."""
        sizes = [self.plan.chunk_nbytes(hop, shard) for shard in cargo]
        message, at = self._take(sum(sizes)), 0
        outs = {}
        for shard, nbytes in zip(cargo, sizes, strict=True):
            outs[shard] = message[at : at + nbytes]
            at += nbytes
        return message, outs

    def _packings(self, hop: Hop, shard: int, out: Memory) -> Iterator[Packing]:
        for position, piece in enumerate(_pieces(self.plan, hop, shard)):
            source = Place(self.fulls[position], *self.plan.layouts[position].table(shard))
            seed = self.draws.of(piece.wire.codec, 0, shard, position)
            yield Packing(piece.wire, source, out[piece.span], seed)

    def _recodings(
        self, index: int, shard: int, chunks: Sequence[Memory], out: Memory
    ) -> Iterator[Recoding]:
        before = _pieces(self.plan, self.plan.hops[index - 1], shard)
        after = _pieces(self.plan, self.plan.hops[index], shard)
        for position, layout in enumerate(self.plan.layouts):
            old, new = before[position], after[position]
            parts = [chunk[old.span] for chunk in chunks]
            _, lengths = layout.table(shard)
            seed = self.draws.of(new.wire.codec, index, shard, position)
            yield Recoding(old.wire, parts, new.wire, lengths, out[new.span], seed)

    def _take(self, nbytes: int) -> Memory:
        memory = self.channel.pool.take(nbytes, self.fulls[0].memory)
        self.scratch.append(memory)
        return memory


@dataclass(frozen=True)
class _Piece:
    """One layout's part of a shard's wire chunk."""

    wire: WireFormat
    span: slice


def _pieces(plan: Plan, hop: Hop, shard: int) -> list[_Piece]:
    pieces, at = [], 0
    for layout, wire in zip(plan.layouts, hop.formats, strict=True):
        nbytes = wire.wire_nbytes(layout.lengths(shard))
        pieces.append(_Piece(wire, slice(at, at + nbytes)))
        at += nbytes
    return pieces


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
