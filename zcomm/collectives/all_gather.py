"""all_gather: every rank's shard to all ranks, encoded once, decoded once, straight into place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zcomm.arrays import Memory, View
from zcomm.collectives import pipeline
from zcomm.collectives.channel import Channel
from zcomm.collectives.courier import DONE, LINE_NBYTES, Courier, Regions
from zcomm.collectives.pipeline import Steps
from zcomm.collectives.wire import Packing, Place, Unpacking, pack_all, unpack, unpack_all
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


@dataclass(frozen=True)
class _Stage:
    """Hops of one format, ``first`` to ``last``, and what a rank stores for them.

    ``spans`` say where in the rank's memory the chunks lie that it sends: those that it holds
    before the last hop, in the order of ownership, so that every cargo is one run of bytes.
    """

    first: int
    last: int
    spans: dict[int, slice]

    def run(self, shards: Sequence[int]) -> slice:
        """Return where a cargo lies."""
        return slice(self.spans[shards[0]].start, self.spans[shards[-1]].stop)


def _stages(plan: Plan, rank: int) -> tuple[list[_Stage], int]:
    """Return the stages of a rank, and the bytes of all that they store."""
    stages: list[_Stage] = []
    at = first = 0
    for index, hop in enumerate(plan.hops):
        following = plan.hops[index + 1] if index + 1 < len(plan.hops) else None
        if following is not None and following.formats == hop.formats:
            continue
        spans = {}
        for shard in plan.cargo(hop, rank, rank):
            end = at + plan.chunk_nbytes(hop, shard)
            spans[shard] = slice(at, end)
            at = end
        stages.append(_Stage(first, index, spans))
        first = index + 1
        at = -(-at // LINE_NBYTES) * LINE_NBYTES
    return stages, at


def regions(plan: Plan, sender: int, near: frozenset[int]) -> tuple[Regions, int]:
    """Lay out what a rank stores: all peers of a hop read the same."""
    stages, nbytes = _stages(plan, sender)
    found: Regions = {}
    for stage in stages:
        for index in range(stage.first, stage.last + 1):
            hop = plan.hops[index]
            span = stage.run(plan.cargo(hop, sender, sender))
            found |= {(index, peer): span for peer in plan.peers(hop, sender) if peer in near}
    return found, nbytes


class _Run:
    """One piece of an all_gather under way.

    ``incoming`` is where messages of (hop, peer) are, ``store`` where the chunks lie that this rank
    sends: None where it sends them from the caller's memory, and receives them there.
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
        self._in_place = _in_place(plan, shards, fulls)
        self._store: Memory | None = None
        self._stages: list[_Stage] = []
        self._incoming: dict[tuple[int, int], Memory] = {}
        self._scratch: list[Memory] = []

    def steps(self) -> Steps:
        """Run the piece, see :func:`all_gather`."""
        if not self._plan.hops:
            self._copy_own()
            return
        yield self._courier.open()
        self._expect()
        yield DONE
        for stage in self._stages:
            self._encode(stage)
            for index in range(stage.first, stage.last):
                self._send(stage, index)
                yield self._courier.arrival(index)
                self._keep(stage, index)
            self._send(stage, stage.last)
            self._decode(stage, self._held(stage))
            yield self._courier.arrival(stage.last)
            self._decode(stage, self._arrived(stage.last))
            self._release(stage.last)
        yield self._courier.sent()
        self._channel.pool.give(*self._scratch)

    def _expect(self) -> None:
        """Post the receives of all hops: what is sent on goes to the store."""
        plan, courier, me = self._plan, self._courier, self._channel.rank
        self._stages, nbytes = _stages(plan, me)
        self._store = courier.slot()
        if self._store is None and not self._in_place:
            self._store = self._take(nbytes)
        for stage in self._stages:
            for index in range(stage.first, stage.last + 1):
                for peer in plan.peers(plan.hops[index], me):
                    if peer == me:
                        continue
                    inbox = courier.inbox(index, peer)
                    if inbox is None:
                        inbox = self._place(stage, index, peer)
                        courier.expect(index, peer, inbox)
                    self._incoming[index, peer] = inbox

    def _place(self, stage: _Stage, index: int, peer: int) -> Memory:
        """Return where to receive a message that comes over the network."""
        hop = self._plan.hops[index]
        if self._in_place:
            return self._own_place(peer)
        if index < stage.last:
            assert self._store is not None
            return self._store[stage.run(self._plan.cargo(hop, peer, peer))]
        return self._take(self._plan.message_nbytes(hop, peer, peer))

    def _own_place(self, rank: int) -> Memory:
        run = self._plan.layouts[0].run(rank)
        assert run is not None
        return self._fulls[0].elements(run.start, run.numel)

    def _encode(self, stage: _Stage) -> None:
        """Write the chunks that this rank holds to the store."""
        if self._store is None:
            return
        plan, me = self._plan, self._channel.rank
        hop = plan.hops[stage.first]
        with self._channel.clock.measure("encode"):
            packings = []
            for shard in plan.cargo(hop, me, me):
                chunk = self._store[stage.spans[shard]]
                for position, part in enumerate(plan.parts(hop, shard)):
                    place = self._source(stage, shard, position)
                    seed = self._draws.of(part.wire.codec, shard, position)
                    packings.append(Packing(part.wire, place, chunk[part.span], seed))
            pack_all(packings)

    def _source(self, stage: _Stage, shard: int, position: int) -> Place:
        layout, first = self._plan.layouts[position], stage.first == 0
        view = (self._shards if first else self._fulls)[position]
        return Place(view, *layout.table(shard, compact=first))

    def _send(self, stage: _Stage, index: int) -> None:
        plan, me = self._plan, self._channel.rank
        hop = plan.hops[index]
        if self._store is None:
            message = self._shards[0].elements(0, plan.layouts[0].shard_numel(me))
        else:
            message = self._store[stage.run(plan.cargo(hop, me, me))]
        for peer in plan.peers(hop, me):
            if peer != me:
                logical = plan.message(index, me, peer).logical_nbytes
                self._courier.send(index, peer, message, logical)

    def _keep(self, stage: _Stage, index: int) -> None:
        """Copy to the store what arrived in the windows of peers: the next hop sends it."""
        plan, courier = self._plan, self._courier
        for (hop, peer), message in self._incoming.items():
            if hop == index and courier.inbox(index, peer) is not None:
                assert self._store is not None
                copy(self._store[stage.run(plan.cargo(plan.hops[index], peer, peer))], message)
        self._release(index)

    def _held(self, stage: _Stage) -> dict[int, Memory]:
        """Return the chunks in the store."""
        if self._store is None:
            self._copy_own()
            return {}
        return {shard: self._store[span] for shard, span in stage.spans.items()}

    def _arrived(self, index: int) -> dict[int, Memory]:
        """Return the chunks that arrived in a hop and are not yet in their place."""
        plan, chunks = self._plan, {}
        hop = plan.hops[index]
        for (number, peer), message in self._incoming.items():
            if number == index and not (self._in_place and not self._courier.inbox(index, peer)):
                for shard, span in plan.spans(hop, plan.cargo(hop, peer, peer)).items():
                    chunks[shard] = message[span]
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
        for hop, peer in self._incoming:
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


def _in_place(plan: Plan, shards: Sequence[View], fulls: Sequence[View]) -> bool:
    """Tell whether plain bytes can be received where they belong."""
    layout = plan.layouts[0]
    return (
        len(plan.layouts) == 1
        and all(hop.level is None and hop.formats[0].codec is None for hop in plan.hops)
        and shards[0].dtype == fulls[0].dtype == layout.dtype
        and all(layout.run(rank) is not None for rank in range(len(layout.shards)))
    )
