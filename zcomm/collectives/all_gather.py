"""all_gather: every rank's shard to all ranks, encoded once, decoded once, straight into place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from zcomm.arrays import ITEMSIZE, View
from zcomm.collectives import node
from zcomm.collectives.channel import Channel
from zcomm.collectives.courier import DONE, Courier, Mail, Post, Regions, Ways
from zcomm.collectives.jobs import Jobs, Move, Pack, Unpack
from zcomm.collectives.memories import LINE_NBYTES, Layer, Memories, Region, Run
from zcomm.collectives.pipeline import Prepared, Steps
from zcomm.pieces import Piece
from zcomm.plan import Plan, WireFormat
from zcomm.seeds import Draws


def all_gather(
    channel: Channel, plan: Plan, shards: Sequence[View], fulls: Sequence[View], draws: Draws
) -> None:
    """Gather the shards of all ranks into the segments of ``fulls`` that the plan's layouts name.

    Exact ones inside a node read the peers' where that pays (:mod:`zcomm.collectives.node`); all
    others are executed in pieces.
    """
    if not node.all_gather(channel, plan, shards, fulls):
        all_gather_in_pieces(channel, plan, shards, fulls, draws)


def all_gather_in_pieces(
    channel: Channel, plan: Plan, shards: Sequence[View], fulls: Sequence[View], draws: Draws
) -> None:
    """Do what :func:`all_gather` does, in any topology and with any codec.

    Piece by piece, several at a time:

    1. Post the receives of all hops. Encode the own shard.
    2. Over each hop, the outermost level first, send every shard held so far to the peers of the
       level and receive theirs: a shard crosses the network once per node. Where the next level has
       no codec, decode what is held and forward the decoded values.
    3. Decode every shard once into its place, the own one too: all ranks hold what receivers
       decode. What is held is sent on before it is decoded.

    Hierarchical all-gather as in ZeRO++ (arXiv 2306.10209, section 4.1), for any number of levels.
    """
    if plan.layouts:
        views = (*shards, *fulls)
        prepare(channel, plan, tuple(view.dtype for view in views)).run(views, draws)


def kept(
    channel: Channel, plan: Plan, dtypes: tuple[str, ...]
) -> Callable[[Sequence[View], Sequence[View], Draws], None]:
    """Return :func:`all_gather` of arrays in host memory, of these dtypes, its way found before."""
    if node.possible(channel, plan):
        return partial(all_gather, channel, plan)
    run = prepare(channel, plan, dtypes).run
    return lambda shards, fulls, draws: run((*shards, *fulls), draws)


def prepare(channel: Channel, plan: Plan, dtypes: tuple[str, ...]) -> Prepared:
    """Return the all_gather of arrays of these dtypes, the shards' before the full ones'."""

    def make(plan: Plan, me: int) -> Prepared:
        def write(piece: Piece, ways: Ways, batch: bool) -> _Script:
            return _Script(me, piece, ways, dtypes, batch)

        return Prepared(channel, plan, write, regions)

    prepared: Prepared = plan.memo(("all_gather of", dtypes), channel.rank, make)
    return prepared


class _Post(NamedTuple):
    """A message to and one from a peer; ``place`` is where its chunks lie in this rank's store."""

    peer: int
    nbytes: int
    logical: int
    place: slice | None
    cuts: tuple[tuple[int, slice], ...]


class _Hop(NamedTuple):
    """A hop of one rank; ``cargo`` is where the message lies in its store."""

    cargo: slice
    posts: tuple[_Post, ...]


class _Stage(NamedTuple):
    """Hops of one format, ``first`` to ``last``, and what a rank stores for them.

    ``spans`` say where in the rank's store the chunks lie that it sends: those that it holds
    before the last hop, in the order of ownership, so that every cargo is one run of bytes.
    """

    first: int
    last: int
    spans: dict[int, slice]
    hops: tuple[_Hop, ...]
    held: tuple[int, ...]


class _Store(NamedTuple):
    """All stages of a rank, and the bytes that they need together."""

    stages: tuple[_Stage, ...]
    nbytes: int


def _layout_store(plan: Plan, rank: int) -> _Store:
    """Work out, once for every plan, what a rank stores, sends and receives."""
    stages: list[_Stage] = []
    at = first = 0
    for index, hop in enumerate(plan.hops):
        if index + 1 < len(plan.hops) and plan.hops[index + 1].formats == hop.formats:
            continue
        spans = {}
        for shard, span in plan.spans(hop, plan.cargo(hop, rank, rank)).items():
            spans[shard] = slice(at + span.start, at + span.stop)
        hops = tuple(_hop(plan, number, rank, spans) for number in range(first, index + 1))
        held = plan.cargo(plan.hops[first], rank, rank)
        stages.append(_Stage(first, index, spans, hops, held))
        end = max((span.stop for span in spans.values()), default=at)
        first, at = index + 1, -(-end // LINE_NBYTES) * LINE_NBYTES
    return _Store(tuple(stages), at)


def _hop(plan: Plan, index: int, me: int, spans: dict[int, slice]) -> _Hop:
    hop = plan.hops[index]
    posts = []
    for peer in plan.outward(hop, me):
        if peer != me:
            cargo = plan.cargo(hop, peer, me)
            place = _run(spans, cargo) if cargo[0] in spans else None
            nbytes = plan.message_nbytes(hop, peer, me)
            logical = plan.message(index, me, peer).logical_nbytes
            posts.append(_Post(peer, nbytes, logical, place, tuple(plan.spans(hop, cargo).items())))
    return _Hop(_run(spans, plan.cargo(hop, me, me)), tuple(posts))


def _run(spans: dict[int, slice], cargo: Sequence[int]) -> slice:
    return slice(spans[cargo[0]].start, spans[cargo[-1]].stop)


def regions(plan: Plan, sender: int, near: frozenset[int]) -> tuple[Regions, int]:
    """Lay out what a rank stores: all peers of a hop read the same."""
    store: _Store = plan.memo("all_gather", sender, _layout_store)
    found: Regions = {}
    for stage in store.stages:
        for index, hop in enumerate(stage.hops, stage.first):
            found |= {(index, post.peer): hop.cargo for post in hop.posts if post.peer in near}
    return found, store.nbytes


class _Turn(NamedTuple):
    """What a rank does in one hop: before its messages have arrived, and after."""

    encode: Jobs
    sends: tuple[Post, ...]
    held: Jobs
    keep: Jobs
    arrived: Jobs


class _Script:
    """One piece of an all_gather, as one rank runs it, whatever its arrays.

    ``dtypes`` are those of all arrays, the shards first. ``_store`` is where the chunks lie that
    this rank sends: None where it sends them from the caller's memory, and receives them there.
    ``_incoming`` is where messages of (hop, peer) are read. ``batch``: a stage is decoded at once.
    """

    def __init__(
        self, me: int, piece: Piece, ways: Ways, dtypes: Sequence[str], batch: bool
    ) -> None:
        self._me = me
        self._piece = piece
        self._plan = piece.plan
        self._dtypes = dtypes
        self._num_items = len(dtypes) // 2
        self._batch = batch
        self._layer = Layer(ways.numbers.scratch)
        found: _Store = self._plan.memo("all_gather", me, _layout_store)
        self._in_place = (
            self._plan.memo("in place", 0, _in_place)
            and self._source_dtype(0) == self._target_dtype(0) == self._plan.layouts[0].dtype
        )
        self._store: Region | None = None
        if ways.slot:
            self._store = Region(ways.numbers.slot, 0, found.nbytes)
        elif not self._in_place:
            self._store = self._layer.take(found.nbytes)
        self._incoming: dict[tuple[int, int], Post] = {}
        receives = tuple(
            tuple(self._expect(stage, index, post, ways) for post in hop.posts)
            for stage in found.stages
            for index, hop in enumerate(stage.hops, stage.first)
        )
        self.mail = Mail(ways, receives)
        self._turns = [turn for stage in found.stages for turn in self._turns_of(stage, ways)]
        self._own = Jobs([] if self._plan.hops else [*self._copy_own()])
        self.scratch_nbytes = self._layer.nbytes

    def steps(self, channel: Channel, courier: Courier, memories: Memories, draws: Draws) -> Steps:
        """Run the piece, see :func:`all_gather`."""
        clock = channel.clock
        yield courier.open()
        courier.expect()
        yield DONE
        for index, turn in enumerate(self._turns):
            turn.encode.timed(clock, "encode", memories, draws)
            for post in turn.sends:
                courier.send(index, post)
            turn.held.timed(clock, "decode", memories, draws)
            yield courier.arrival(index)
            turn.keep.timed(clock, "comm", memories, draws)
            turn.arrived.timed(clock, "decode", memories, draws)
            courier.release(index)
        self._own.timed(clock, "decode", memories, draws)
        yield courier.sent()

    def _expect(self, stage: _Stage, index: int, post: _Post, ways: Ways) -> Post:
        """Return where to read a message: what is sent on goes to the store."""
        inbox = ways.inbox(index, post.peer, self._me)
        if inbox is not None:
            region = inbox
        elif self._in_place:
            run = self._plan.layouts[0].run(post.peer)
            assert run is not None
            region = self._elements(self._target(0), run.start, run.numel)
        elif index < stage.last:
            region = self._in_store(post.place)
        else:
            region = self._layer.take(post.nbytes)
        made = Post(post.peer, region, inbox is not None)
        self._incoming[index, post.peer] = made
        return made

    def _turns_of(self, stage: _Stage, ways: Ways) -> Iterator[_Turn]:
        """Work out the hops of a stage: what one brings is decoded once the next has been sent."""
        held = [*self._held(stage)]
        for index, hop in enumerate(stage.hops, stage.first):
            last = index == stage.last
            new: list[Pack | Unpack] = [*self._unpacks(stage, self._chunks(stage, index, hop))]
            yield _Turn(
                Jobs([*self._packs(stage)] if index == stage.first else []),
                tuple(self._send(index, hop, ways)),
                Jobs([] if self._batch else held),
                Jobs([] if last else [*self._keeps(index, hop)]),
                Jobs([*held, *new] if last and self._batch else new if last else []),
            )
            held = [*held, *new] if self._batch else new

    def _chunks(self, stage: _Stage, index: int, hop: _Hop) -> dict[int, Region]:
        """Return the chunks that a hop brings and that are not yet in their place."""
        chunks = {}
        for post in hop.posts:
            message = self._incoming[index, post.peer]
            for shard, span in post.cuts:
                if index < stage.last:
                    chunks[shard] = self._in_store(stage.spans[shard])
                elif message.shared or not self._in_place:
                    chunks[shard] = message.region.part(span)
        return chunks

    def _packs(self, stage: _Stage) -> Iterator[Pack]:
        """Write the chunks that this rank holds to the store."""
        if self._store is None:
            return
        hop = self._plan.hops[stage.first]
        for shard in stage.held:
            chunk = self._in_store(stage.spans[shard])
            for position, part in enumerate(self._plan.parts(hop, shard)):
                run = self._source(shard, position) if stage.first == 0 else None
                run = run or self._place(shard, position)
                yield Pack(part.wire, run, chunk.part(part.span), (shard, position))

    def _send(self, index: int, hop: _Hop, ways: Ways) -> Iterator[Post]:
        if self._store is None:
            first = self._piece.firsts[self._me][0]
            numel = self._plan.layouts[0].shard_numel(self._me)
            message = self._elements(self._piece.items[0], first, numel)
        else:
            message = self._in_store(hop.cargo)
        for post in hop.posts:
            shared = ways.outbox(index, post.peer) is not None
            yield Post(post.peer, message, shared, post.logical)

    def _held(self, stage: _Stage) -> Iterator[Pack | Unpack]:
        """Decode what is held before the first hop of a stage."""
        if self._store is None:
            return self._copy_own()
        spans = {shard: self._in_store(stage.spans[shard]) for shard in stage.held}
        return self._unpacks(stage, spans)

    def _keeps(self, index: int, hop: _Hop) -> Iterator[Move]:
        """Copy to the store what arrived in the slots of peers: the next hop sends it."""
        for post in hop.posts:
            message = self._incoming[index, post.peer]
            if message.shared:
                yield Move(message.region, self._in_store(post.place))

    def _unpacks(self, stage: _Stage, chunks: dict[int, Region]) -> Iterator[Unpack]:
        hop = self._plan.hops[stage.last]
        for shard, chunk in chunks.items():
            for position, part in enumerate(self._plan.parts(hop, shard)):
                yield Unpack(part.wire, chunk.part(part.span), self._place(shard, position))

    def _copy_own(self) -> Iterator[Pack | Unpack]:
        """Copy the own shard to its place as it is, by way of the dtype of its layout."""
        for position, layout in enumerate(self._plan.layouts):
            run, wire = self._source(self._me, position), WireFormat(layout.dtype)
            if run.dtype == layout.dtype:
                numel = layout.shard_numel(self._me)
                chunk = self._elements(run.array, self._piece.firsts[self._me][position], numel)
            else:
                chunk = self._layer.take(wire.wire_nbytes(layout.lengths(self._me)))
                yield Pack(wire, run, chunk, ())
            yield Unpack(wire, chunk, self._place(self._me, position))

    def _source(self, shard: int, position: int) -> Run:
        """Return the own segments in the compact array of an item."""
        starts, lengths = self._plan.layouts[position].table(shard, compact=True)
        starts = starts + self._piece.firsts[self._me][position]
        return Run(self._piece.items[position], self._source_dtype(position), starts, lengths)

    def _place(self, shard: int, position: int) -> Run:
        """Return the segments of a shard in the full array of an item."""
        table = self._plan.layouts[position].table(shard)
        return Run(self._target(position), self._target_dtype(position), *table)

    def _target(self, position: int) -> int:
        return self._num_items + self._piece.items[position]

    def _source_dtype(self, position: int) -> str:
        return self._dtypes[self._piece.items[position]]

    def _target_dtype(self, position: int) -> str:
        return self._dtypes[self._target(position)]

    def _elements(self, array: int, first: int, numel: int) -> Region:
        size = ITEMSIZE[self._dtypes[array]]
        return Region(array, first * size, (first + numel) * size)

    def _in_store(self, span: slice | None) -> Region:
        assert self._store is not None
        assert span is not None
        return self._store.part(span)


def _in_place(plan: Plan, _: int) -> bool:
    """Tell whether the bytes on the wire lie in one run where they belong."""
    layout = plan.layouts[0]
    return (
        len(plan.layouts) == 1
        and all(hop.level is None and hop.formats[0].codec is None for hop in plan.hops)
        and all(layout.run(rank) is not None for rank in range(len(layout.shards)))
    )
