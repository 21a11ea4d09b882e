"""reduce_scatter: every rank keeps its shard of the sum; qgZ for any number of levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from zcomm.arrays import ITEMSIZE, Memory, View
from zcomm.collectives import node
from zcomm.collectives.channel import Channel
from zcomm.collectives.courier import DONE, Courier, Mail, Post, Regions, Ways
from zcomm.collectives.jobs import Jobs, Pack, Recode, Reduce
from zcomm.collectives.memories import LINE_NBYTES, Layer, Memories, Region, Run
from zcomm.collectives.pipeline import Prepared, Steps
from zcomm.collectives.wire import Place, Reduction, nested_reduce, reduce
from zcomm.layout import Indices, Segment
from zcomm.pieces import Piece
from zcomm.plan import Plan, WireFormat
from zcomm.seeds import Draws

Chunks = dict[int, tuple[Region, ...]]
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

    Exact ones inside a node read the peers' (:mod:`zcomm.collectives.node`); all others are
    executed in pieces.
    """
    if not node.reduce_scatter(channel, plan, fulls, shards, partial(reduce_last, reduction)):
        reduce_scatter_in_pieces(channel, plan, fulls, shards, reduction, draws)


def reduce_scatter_in_pieces(
    channel: Channel,
    plan: Plan,
    fulls: Sequence[View],
    shards: Sequence[View],
    reduction: Reduction,
    draws: Draws,
) -> None:
    """Do what :func:`reduce_scatter` does, in any topology and with any codec.

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
    if plan.layouts:
        views = (*fulls, *shards)
        dtypes = tuple(view.dtype for view in views)
        prepare(channel, plan, dtypes, reduction).run(views, draws)


def kept(
    channel: Channel, plan: Plan, dtypes: tuple[str, ...], reduction: Reduction
) -> Callable[[Sequence[View], Sequence[View], Draws], None]:
    """Return :func:`reduce_scatter` of arrays in host memory, its way found before."""
    if node.possible(channel, plan):
        return lambda fulls, shards, draws: reduce_scatter(
            channel, plan, fulls, shards, reduction, draws
        )
    run = prepare(channel, plan, dtypes, reduction).run
    return lambda fulls, shards, draws: run((*fulls, *shards), draws)


def prepare(
    channel: Channel, plan: Plan, dtypes: tuple[str, ...], reduction: Reduction
) -> Prepared:
    """Return the reduce_scatter of arrays of these dtypes, the full ones' before the shards'."""

    def make(plan: Plan, me: int) -> Prepared:
        def write(piece: Piece, ways: Ways, batch: bool) -> _Script:
            return _Script(me, piece, ways, dtypes, reduction, batch)

        return Prepared(channel, plan, write, regions)

    key = "reduce_scatter of", dtypes, reduction
    prepared: Prepared = plan.memo(key, channel.rank, make)
    return prepared


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


class _Turn(NamedTuple):
    """What a rank does in one hop: messages to others first, then the own."""

    outgoing: Jobs
    sends: tuple[Post, ...]
    own: Jobs


class _Script:
    """One piece of a reduce_scatter, as one rank runs it, whatever its arrays.

    ``dtypes`` are those of all arrays, the full ones first. ``batch``: all messages of a hop are
    encoded at once.
    """

    def __init__(
        self,
        me: int,
        piece: Piece,
        ways: Ways,
        dtypes: Sequence[str],
        reduction: Reduction,
        batch: bool,
    ) -> None:
        self._me = me
        self._piece = piece
        self._plan = piece.plan
        self._ways = ways
        self._dtypes = dtypes
        self._reduction = reduction
        self._layer = Layer(ways.numbers.scratch)
        hops: list[_Hop] = self._plan.memo("reduce_scatter", me, _hops)
        incoming = [self._expect(index, hop) for index, hop in enumerate(hops)]
        self.mail = Mail(ways, tuple(tuple(posts.values()) for posts in incoming))
        self._turns: list[_Turn] = []
        chunks: Chunks = {}
        for index, hop in enumerate(hops):
            found = {peer: post.region for peer, post in incoming[index].items()}
            lying = self._lying(hop) if index == 0 else {}
            turn, own = self._turn(index, hop, chunks, batch, write_own=not lying)
            self._turns.append(turn)
            if own is not None:
                found[me] = own
            chunks = {
                shard: tuple(
                    found[peer].part(span) if peer in found else lying[shard] for peer in hop.peers
                )
                for shard, span in hop.cuts
            }
        alone = [] if hops else [*self._alone(chunks)]
        self._finish = Jobs([*alone, *self._reduces(chunks[me])], reduction)
        self.scratch_nbytes = self._layer.nbytes

    def steps(self, channel: Channel, courier: Courier, memories: Memories, draws: Draws) -> Steps:
        """Run the piece, see :func:`reduce_scatter`."""
        clock, last = channel.clock, len(self._turns) - 1
        yield courier.open()
        courier.expect()
        yield DONE
        for index, turn in enumerate(self._turns):
            turn.outgoing.timed(clock, "encode", memories, draws)
            for post in turn.sends:
                courier.send(index, post)
            turn.own.timed(clock, "encode", memories, draws)
            if index:
                courier.release(index - 1)
            yield courier.arrival(index)
        self._finish.timed(clock, "decode", memories, draws)
        if last >= 0:
            courier.release(last)
        yield courier.sent()

    def _expect(self, index: int, hop: _Hop) -> dict[int, Post]:
        """Return where to read the messages of a hop, by peer."""
        found = {}
        for peer in hop.peers:
            if peer != self._me:
                inbox = self._ways.inbox(index, peer, self._me)
                region = inbox or self._layer.take(hop.nbytes)
                found[peer] = Post(peer, region, inbox is not None)
        return found

    def _lying(self, hop: _Hop) -> dict[int, Region]:
        """Return the own chunks of the first hop, by shard, where they lie in the caller's memory.

        That is possible without a codec, where every shard is one run; else there are none.
        """
        if len(self._plan.layouts) != 1:
            return {}
        array, layout = self._piece.items[0], self._plan.layouts[0]
        wire, size = self._plan.hops[0].formats[0], ITEMSIZE[self._dtypes[array]]
        if wire != WireFormat(self._dtypes[array]):
            return {}
        found = {}
        for shard, _ in hop.cuts:
            run = layout.run(shard)
            if run is None:
                return {}
            found[shard] = Region(array, run.start * size, (run.start + run.numel) * size)
        return found

    def _turn(
        self, index: int, hop: _Hop, chunks: Chunks, batch: bool, *, write_own: bool
    ) -> tuple[_Turn, Region | None]:
        """Work out what is written and sent in a hop; return it, and where the own message is."""
        others: list[Pack | Recode] = []
        mine: list[Pack | Recode] = []
        sends = []
        own = None
        for post in hop.posts:
            if post.peer == self._me and not write_own:
                continue
            region, shared, written = self._message(index, post)
            jobs = self._writes(index, post, region, chunks) if written else ()
            if post.peer == self._me:
                own = region
                mine.extend(jobs)
            else:
                others.extend(jobs)
                sends.append(Post(post.peer, region, shared, post.logical))
        first, second = ([*others, *mine], []) if batch else (others, mine)
        turn = _Turn(Jobs(first, self._reduction), tuple(sends), Jobs(second, self._reduction))
        return turn, own

    def _message(self, index: int, post: _Post) -> tuple[Region, bool, bool]:
        """Return where a message lies, whether the peer reads it there, and whether to write it."""
        outbox = None if post.peer == self._me else self._ways.outbox(index, post.peer)
        if outbox is not None:
            return outbox, True, True
        if post.run is not None:
            array = self._piece.items[0]
            size = ITEMSIZE[self._dtypes[array]]
            start, stop = post.run.start * size, (post.run.start + post.run.numel) * size
            return Region(array, start, stop), False, False
        return self._layer.take(post.nbytes), False, True

    def _writes(
        self, index: int, post: _Post, message: Region, chunks: Chunks
    ) -> Iterator[Pack | Recode]:
        for write in post.writes:
            out, where = message.part(write.span), (index, write.shard, write.position)
            if write.before is None:
                array = self._piece.items[write.position]
                run = Run(array, self._dtypes[array], *write.source)
                yield Pack(write.wire, run, out, where)
            else:
                wire, span = write.before
                parts = tuple(chunk.part(span) for chunk in chunks[write.shard])
                yield Recode(wire, parts, write.wire, write.source[1], out, where)

    def _alone(self, chunks: Chunks) -> Iterator[Pack]:
        """Write the only rank's shard as it is: no level has a hop, so no codec is passed."""
        parts = self._plan.parts(self._plan.plain_hop, self._me)
        message = self._layer.take(parts[-1].span.stop)
        chunks[self._me] = (message,)
        for position, part in enumerate(parts):
            array = self._piece.items[position]
            table = self._plan.layouts[position].table(self._me)
            run = Run(array, self._dtypes[array], *table)
            yield Pack(part.wire, run, message.part(part.span), ())

    def _reduces(self, chunks: Sequence[Region]) -> Iterator[Reduce]:
        """Reduce the chunks of the last hop into the caller's shards."""
        plan, me = self._plan, self._me
        hop = plan.hops[-1] if plan.hops else plan.plain_hop
        for position, part in enumerate(plan.parts(hop, me)):
            array = len(self._dtypes) // 2 + self._piece.items[position]
            starts, lengths = plan.layouts[position].table(me, compact=True)
            starts = starts + self._piece.firsts[me][position]
            run = Run(array, self._dtypes[array], starts, lengths)
            parts = tuple(chunk.part(part.span) for chunk in chunks)
            flat = hop.level is None and part.wire.codec is None
            nesting = plan.nesting if flat else None
            yield Reduce(part.wire, parts, run, plan.partials[position], nesting)


def reduce_last(
    reduction: Reduction, plan: Plan, position: int, chunks: Sequence[Memory], target: Place
) -> None:
    """Reduce the chunks of the last hop of a layout, those of a flat one as the levels nest."""
    hop = plan.hops[-1]
    wire = hop.formats[position]
    if hop.level is None and wire.codec is None:
        nested_reduce(plan.nesting, (wire, plan.partials[position]), chunks, target, reduction)
    else:
        reduce(wire, chunks, target, reduction)
