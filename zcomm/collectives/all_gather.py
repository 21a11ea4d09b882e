"""all_gather: every rank's shard to all ranks, encoded once, decoded once, straight into place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zcomm.arrays import DeviceMemory, Memory, View
from zcomm.collectives import pipeline
from zcomm.collectives.channel import Channel
from zcomm.collectives.courier import DONE, LINE_NBYTES, Courier, Regions
from zcomm.collectives.pipeline import Steps
from zcomm.collectives.wire import Packing, Place, Unpacking, pack, pack_all, unpack, unpack_all
from zcomm.device import copy
from zcomm.pieces import Piece
from zcomm.plan import Plan, WireFormat
from zcomm.seeds import Draws


def all_gather(
    channel: Channel, plan: Plan, shards: Sequence[View], fulls: Sequence[View], draws: Draws
) -> None:
    """Gather the shards of all ranks into the segments of ``fulls`` that the plan's layouts name.

    Piece by piece, several at a time:

    1. Post the receives of all hops. Encode the own shard.
    2. Over each hop, the outermost level first, send every shard held so far to the peers of the
       level and receive theirs: a shard crosses the network once per node. Where the next level has
       no codec, decode what is held and forward the decoded values.
    3. Decode every shard once into its place, the own one too: all ranks hold what receivers
       decode. Peers of the last hop are sent to before what is held is decoded.

    Hierarchical all-gather as in ZeRO++ (arXiv 2306.10209, section 4.1), for any number of levels.
    """
    if not plan.layouts:
        return

    def start(piece: Piece, courier: Courier) -> Steps:
        parts = piece.of_shard(shards, channel.rank), piece.of(fulls)
        return _Run(channel, piece.plan, courier, *parts, draws).steps()

    pipeline.run(channel, plan, fulls[0].memory, start, regions)


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
    for peer in plan.peers(hop, me):
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


class _Run:
    """One piece of an all_gather under way.

    ``store`` is where the chunks lie that this rank sends: None where it sends them from the
    caller's memory, and receives them there. ``incoming`` is where messages of (hop, peer) are,
    ``inboxes`` those among them that are in the peer's window.
    """

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        courier: Courier,
        shards: Sequence[View],
        fulls: Sequence[View],
        draws: Draws,
    ) -> None:
        self._channel = channel
        self._plan = plan
        self._courier = courier
        self._shards = shards
        self._fulls = fulls
        self._draws = draws
        self._in_place = (
            plan.memo("in place", 0, _in_place)
            and shards[0].dtype == fulls[0].dtype == plan.layouts[0].dtype
        )
        self._plans: _Store = plan.memo("all_gather", channel.rank, _layout_store)
        self._store: Memory | None = None
        self._incoming: dict[tuple[int, int], Memory] = {}
        self._inboxes: set[tuple[int, int]] = set()
        self._scratch: list[Memory] = []

    def steps(self) -> Steps:
        """Run the piece, see :func:`all_gather`."""
        if not self._plan.hops:
            self._copy_own()
            return
        batch = isinstance(self._fulls[0].memory, DeviceMemory)  # as few launches as possible
        yield self._courier.open()
        self._expect()
        yield DONE
        for stage in self._plans.stages:
            self._encode(stage)
            for index, hop in enumerate(stage.hops, stage.first):
                self._send(index, hop)
                if index == stage.last and not batch:
                    self._decode(stage, self._held(stage))
                yield self._courier.arrival(index)
                if index < stage.last:
                    self._keep(index, hop)
            held = self._held(stage) if batch else {}
            self._decode(stage, held | self._arrived(stage))
            self._release(stage.last)
        yield self._courier.sent()
        self._channel.pool.give(*self._scratch)

    def _expect(self) -> None:
        """Post the receives of all hops: what is sent on goes to the store."""
        self._store = self._courier.slot()
        if self._store is None and not self._in_place:
            self._store = self._take(self._plans.nbytes)
        for stage in self._plans.stages:
            for index, hop in enumerate(stage.hops, stage.first):
                for post in hop.posts:
                    inbox = self._courier.inbox(index, post.peer)
                    if inbox is None:
                        inbox = self._place(stage, index, post)
                        self._courier.expect(index, post.peer, inbox)
                    else:
                        self._inboxes.add((index, post.peer))
                    self._incoming[index, post.peer] = inbox

    def _place(self, stage: _Stage, index: int, post: _Post) -> Memory:
        """Return where to receive a message that does not come through a window."""
        if self._in_place:
            run = self._plan.layouts[0].run(post.peer)
            assert run is not None
            return self._fulls[0].elements(run.start, run.numel)
        if index < stage.last:
            assert self._store is not None
            assert post.place is not None
            return self._store[post.place]
        return self._take(post.nbytes)

    def _encode(self, stage: _Stage) -> None:
        """Write the chunks that this rank holds to the store."""
        if self._store is None:
            return
        hop = self._plan.hops[stage.first]
        with self._channel.clock.measure("encode"):
            packings = []
            for shard in stage.held:
                chunk = self._store[stage.spans[shard]]
                for position, part in enumerate(self._plan.parts(hop, shard)):
                    place = self._source(stage, shard, position)
                    seed = self._draws.of(part.wire.codec, shard, position)
                    packings.append(Packing(part.wire, place, chunk[part.span], seed))
            if len(packings) == 1:
                pack(*packings[0])
            else:
                pack_all(packings)

    def _source(self, stage: _Stage, shard: int, position: int) -> Place:
        layout, first = self._plan.layouts[position], stage.first == 0
        view = (self._shards if first else self._fulls)[position]
        return Place(view, *layout.table(shard, compact=first))

    def _send(self, index: int, hop: _Hop) -> None:
        if self._store is None:
            numel = self._plan.layouts[0].shard_numel(self._channel.rank)
            message = self._shards[0].elements(0, numel)
        else:
            message = self._store[hop.cargo]
        for post in hop.posts:
            self._courier.send(index, post.peer, message, post.logical)

    def _keep(self, index: int, hop: _Hop) -> None:
        """Copy to the store what arrived in the windows of peers: the next hop sends it."""
        for post in hop.posts:
            if (index, post.peer) in self._inboxes:
                assert self._store is not None
                assert post.place is not None
                copy(self._store[post.place], self._incoming[index, post.peer])
        self._release(index)

    def _held(self, stage: _Stage) -> dict[int, Memory]:
        """Return the chunks in the store."""
        if self._store is None:
            self._copy_own()
            return {}
        return {shard: self._store[span] for shard, span in stage.spans.items()}

    def _arrived(self, stage: _Stage) -> dict[int, Memory]:
        """Return the chunks that arrived in the last hop and are not yet in their place."""
        chunks = {}
        for post in stage.hops[-1].posts:
            where = stage.last, post.peer
            if not self._in_place or where in self._inboxes:
                message = self._incoming[where]
                chunks.update({shard: message[span] for shard, span in post.cuts})
        return chunks

    def _decode(self, stage: _Stage, chunks: dict[int, Memory]) -> None:
        with self._channel.clock.measure("decode"):
            unpack_all(self._unpackings(stage, chunks))

    def _unpackings(self, stage: _Stage, chunks: dict[int, Memory]) -> Iterator[Unpacking]:
        plan = self._plan
        hop = plan.hops[stage.last]
        for shard, chunk in chunks.items():
            for position, part in enumerate(plan.parts(hop, shard)):
                place = Place(self._fulls[position], *plan.layouts[position].table(shard))
                yield Unpacking(part.wire, chunk[part.span], place)

    def _release(self, index: int) -> None:
        for hop, peer in self._inboxes:
            if hop == index:
                self._courier.release(index, peer)

    def _copy_own(self) -> None:
        """Copy the own shard to its place as it is."""
        me = self._channel.rank
        for layout, own, full in zip(self._plan.layouts, self._shards, self._fulls, strict=True):
            chunk = own.elements(0, layout.shard_numel(me))
            unpack(WireFormat(layout.dtype), chunk, Place(full, *layout.table(me)))

    def _take(self, nbytes: int) -> Memory:
        memory = self._channel.pool.take(nbytes, self._fulls[0].memory)
        self._scratch.append(memory)
        return memory


def _in_place(plan: Plan, _: int) -> bool:
    """Tell whether the bytes on the wire lie in one run where they belong."""
    layout = plan.layouts[0]
    return (
        len(plan.layouts) == 1
        and all(hop.level is None and hop.formats[0].codec is None for hop in plan.hops)
        and all(layout.run(rank) is not None for rank in range(len(layout.shards)))
    )
