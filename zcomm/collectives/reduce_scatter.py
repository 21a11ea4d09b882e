"""reduce_scatter: every rank keeps its shard of the sum; qgZ for any number of levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
    pack,
    pack_all,
    reduce,
    reduce_pack,
    reduce_pack_all,
)
from zcomm.device import scratch
from zcomm.layout import Indices, Segment
from zcomm.pieces import Piece
from zcomm.plan import Plan, WireFormat
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


class _Write(NamedTuple):
    """One layout's part of one shard's chunk in a message: where it comes from and goes to.

    ``source`` is the table of its segments; ``before`` says where in the chunks of the hop before
    the same elements are, and in which format: None at the first hop.
    """

    position: int
    shard: int
    wire: WireFormat
    span: slice
    source: tuple[Indices, Indices]
    before: tuple[WireFormat, slice] | None


class _Post(NamedTuple):
    """A message from this rank; ``run`` is what it holds, where it lies in the caller's memory."""

    peer: int
    nbytes: int
    logical: int
    run: Segment | None
    writes: tuple[_Write, ...]


class _Hop(NamedTuple):
    """A hop of one rank: its messages, the wire first, and what those of all ``peers`` hold."""

    posts: tuple[_Post, ...]
    peers: tuple[int, ...]
    nbytes: int
    cuts: tuple[tuple[int, slice], ...]


def _hops(plan: Plan, me: int) -> list[_Hop]:
    """Work out, once for every plan, what a rank does in each hop."""
    found = []
    for index, hop in enumerate(plan.hops):
        cargo = plan.cargo(hop, me, me)
        posts = tuple(_post(plan, index, me, peer) for peer in plan.outward(hop, me))
        cuts = tuple(plan.spans(hop, cargo).items())
        found.append(_Hop(posts, plan.peers(hop, me), plan.message_nbytes(hop, me, me), cuts))
    return found


def _post(plan: Plan, index: int, me: int, peer: int) -> _Post:
    hop = plan.hops[index]
    cargo = plan.cargo(hop, me, peer)
    writes = []
    for shard, span in plan.spans(hop, cargo).items():
        old = plan.parts(plan.hops[index - 1], shard) if index else ()
        for position, part in enumerate(plan.parts(hop, shard)):
            at = slice(span.start + part.span.start, span.start + part.span.stop)
            before = (old[position].wire, old[position].span) if index else None
            table = plan.layouts[position].table(shard)
            writes.append(_Write(position, shard, part.wire, at, table, before))
    plain = index == 0 and len(cargo) == len(plan.layouts) == 1 and hop.formats[0].codec is None
    run = plan.layouts[0].run(cargo[0]) if plain else None
    logical = 0 if peer == me else plan.message(index, me, peer).logical_nbytes
    return _Post(peer, plan.message_nbytes(hop, me, peer), logical, run, tuple(writes))


class _Run:
    """One piece of a reduce_scatter under way.

    ``incoming[hop]`` is where the messages of a hop are read, by peer; ``scratch[hop]`` the pool's
    memory among it; ``leaving`` that of messages on their way out.
    """

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        courier: Courier,
        fulls: Sequence[View],
        shards: Sequence[View],
        reduction: Reduction,
        draws: Draws,
    ) -> None:
        self._channel = channel
        self._plan = plan
        self._courier = courier
        self._fulls = fulls
        self._shards = shards
        self._reduction = reduction
        self._draws = draws
        self._hops: list[_Hop] = plan.memo("reduce_scatter", channel.rank, _hops)
        self._incoming: list[dict[int, Memory]] = []
        self._scratch: list[list[Memory]] = []
        self._leaving: list[Memory] = []

    def steps(self) -> Steps:
        """Run the piece, see :func:`reduce_scatter`."""
        if not self._hops:
            self._finish([self._alone()])
            return
        courier, last = self._courier, len(self._hops) - 1
        yield courier.open()
        self._expect()
        yield DONE
        chunks: Chunks = {}
        for index, hop in enumerate(self._hops):
            self._incoming[index][self._channel.rank] = self._send(index, hop, chunks)
            self._release(index - 1)
            yield courier.arrival(index)
            self._left()
            messages = [self._incoming[index][peer] for peer in hop.peers]
            chunks = {shard: [message[span] for message in messages] for shard, span in hop.cuts}
        with self._channel.clock.measure("decode"):
            self._finish(chunks[self._channel.rank])
        self._release(last)
        yield courier.sent()
        self._left()

    def _expect(self) -> None:
        """Post the receives of all hops."""
        courier, me = self._courier, self._channel.rank
        for index, hop in enumerate(self._hops):
            found: dict[int, Memory] = {}
            scratch: list[Memory] = []
            for peer in hop.peers:
                if peer == me:
                    continue
                inbox = courier.inbox(index, peer)
                if inbox is None:
                    inbox = self._take(hop.nbytes, scratch)
                    courier.expect(index, peer, inbox)
                found[peer] = inbox
            self._incoming.append(found)
            self._scratch.append(scratch)

    def _send(self, index: int, hop: _Hop, chunks: Chunks) -> Memory:
        """Encode and send the messages of a hop; return the own one."""
        if isinstance(self._fulls[0].memory, DeviceMemory):
            return self._send_at_once(index, hop, chunks)
        own = None
        for post in hop.posts:
            message = self._memory(index, post)
            if message is None:
                message = self._plain(post)
            else:
                with self._channel.clock.measure("encode"):
                    self._encode(index, [(post, message)], chunks)
            if post.peer == self._channel.rank:
                own = message
            else:
                self._courier.send(index, post.peer, message, post.logical)
        assert own is not None
        return own

    def _send_at_once(self, index: int, hop: _Hop, chunks: Chunks) -> Memory:
        """Encode all messages of a hop with as few launches as possible, then send them."""
        pairs = [(post, self._memory(index, post)) for post in hop.posts]
        with self._channel.clock.measure("encode"):
            encoded = [(post, message) for post, message in pairs if message is not None]
            self._encode(index, encoded, chunks)
        messages = {p.peer: self._plain(p) if message is None else message for p, message in pairs}
        for post in hop.posts:
            if post.peer != self._channel.rank:
                self._courier.send(index, post.peer, messages[post.peer], post.logical)
        return messages[self._channel.rank]

    def _memory(self, index: int, post: _Post) -> Memory | None:
        """Return where to write a message, None where it can stay in the caller's memory."""
        if post.peer != self._channel.rank:
            box = self._courier.outbox(index, post.peer)
            if box is not None:
                return box
        if post.run is not None:
            return None
        own = post.peer == self._channel.rank
        return self._take(post.nbytes, self._scratch[index] if own else self._leaving)

    def _plain(self, post: _Post) -> Memory:
        assert post.run is not None
        return self._fulls[0].elements(post.run.start, post.run.numel)

    def _encode(self, index: int, messages: Sequence[tuple[_Post, Memory]], chunks: Chunks) -> None:
        if index == 0:
            pack_all(self._packings(messages))
        else:
            reduce_pack_all(self._recodings(index, messages, chunks), self._reduction)

    def _packings(self, messages: Sequence[tuple[_Post, Memory]]) -> Iterator[Packing]:
        for post, message in messages:
            for write in post.writes:
                source = Place(self._fulls[write.position], *write.source)
                seed = self._draws.of(write.wire.codec, 0, write.shard, write.position)
                yield Packing(write.wire, source, message[write.span], seed)

    def _recodings(
        self, index: int, messages: Sequence[tuple[_Post, Memory]], chunks: Chunks
    ) -> Iterator[Recoding]:
        for post, message in messages:
            for write in post.writes:
                assert write.before is not None
                wire, span = write.before
                parts = [chunk[span] for chunk in chunks[write.shard]]
                seed = self._draws.of(write.wire.codec, index, write.shard, write.position)
                out = message[write.span]
                yield Recoding(wire, parts, write.wire, write.source[1], out, seed)

    def _finish(self, chunks: Sequence[Memory]) -> None:
        """Reduce the chunks of the last hop into the caller's shards."""
        plan, me = self._plan, self._channel.rank
        hop = plan.hops[-1] if plan.hops else plan.plain_hop
        for position, part in enumerate(plan.parts(hop, me)):
            parts = [chunk[part.span] for chunk in chunks]
            place = Place(self._shards[position], *plan.layouts[position].table(me, compact=True))
            if hop.level is None and part.wire.codec is None:
                formats = part.wire, plan.partials[position]
                nested_reduce(plan.nesting, formats, parts, place, self._reduction)
            else:
                reduce(part.wire, parts, place, self._reduction)

    def _alone(self) -> Memory:
        """Return the only rank's shard as it is: no level has a hop, so no codec is passed."""
        me = self._channel.rank
        parts = self._plan.parts(self._plan.plain_hop, me)
        out = scratch(parts[-1].span.stop, self._fulls[0].memory)
        for position, part in enumerate(parts):
            source = Place(self._fulls[position], *self._plan.layouts[position].table(me))
            pack(part.wire, source, out[part.span], seed=0)
        return out

    def _release(self, index: int) -> None:
        """Give back the memory of a hop's chunks, which have been read."""
        if index >= 0:
            for peer in self._incoming[index]:
                self._courier.release(index, peer)
            self._channel.pool.give(*self._scratch[index])

    def _left(self) -> None:
        """Give back the memory of messages that have left."""
        if self._leaving and self._courier.sent().done():
            self._channel.pool.give(*self._leaving)
            self._leaving = []

    def _take(self, nbytes: int, keep: list[Memory]) -> Memory:
        memory = self._channel.pool.take(nbytes, self._fulls[0].memory)
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
