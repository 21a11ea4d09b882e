"""One description of what travels: the hops that executors, traffic and models all read.

Words: a *layout* (:mod:`zcomm.layout`) says which elements are whose shard. A *hop* is one
exchange: over one level of the topology (with the rail peers of that level), or with all ranks
(``level=None``). The *cargo* of a message is the shards inside it, one wire chunk each, in the
order of ownership. ``formats`` say how the elements of each layout look on the wire in a hop.

A plan is the same object on every rank; what one rank does is asked with its number. Ranks are
those of the communicator. One-rank levels have no hop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from topology import Topology
from zcomm.arrays import ITEMSIZE
from zcomm.codecs import Codec
from zcomm.layout import Layout
from zcomm.pieces import Piece, cut, whole


@dataclass(frozen=True)
class WireFormat:
    """How elements of ``dtype`` look on the wire: through ``codec``, or as they are (None)."""

    dtype: str
    codec: Codec | None = None

    def wire_nbytes(self, lengths: tuple[int, ...]) -> int:
        """Return the bytes of one wire chunk whose segments have these lengths."""
        if self.codec is None:
            return sum(lengths) * ITEMSIZE[self.dtype]
        return _encoded_nbytes(self.codec, self.dtype, lengths)


@lru_cache(maxsize=65536)
def _encoded_nbytes(codec: Codec, dtype: str, lengths: tuple[int, ...]) -> int:
    return codec.wire_nbytes(sum(lengths), dtype=dtype, segments=lengths)


@dataclass(frozen=True)
class Hop:
    """One exchange over a level (None: among all ranks); ``formats`` hold one entry per layout."""

    level: int | None
    formats: tuple[WireFormat, ...]


@dataclass(frozen=True)
class Part:
    """One layout's part of a shard's wire chunk."""

    wire: WireFormat
    span: slice


@dataclass(frozen=True)
class Message:
    """What one rank sends to one peer in one hop; ``level`` is where the bytes travel."""

    peer: int
    level: int
    cargo: tuple[int, ...]
    logical_nbytes: int
    wire_nbytes: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The hops of one operation.

    ``nesting`` is the topology that defines the order of exact sums, ``partials`` how each layout's
    partial sums are rounded between its levels: every algorithm obeys both, so none changes a bit
    of an exact result. ``counted_as`` is the operation in the traffic counters (the two plans of an
    all_reduce count as all_reduce). ``piece_nbytes`` is the largest message of a piece, where
    :mod:`zcomm.pieces` should not follow its own rule.
    """

    operation: str
    algorithm: str
    layouts: tuple[Layout, ...]
    topology: Topology
    hops: tuple[Hop, ...]
    nesting: Topology
    partials: tuple[WireFormat, ...]
    counted_as: str
    piece_nbytes: int | None = None
    _messages: dict[tuple[int, int], dict[int, Message]] = field(
        default_factory=dict, init=False, repr=False
    )
    _parts: dict[tuple[int, int], tuple[Hop, tuple[Part, ...]]] = field(
        default_factory=dict, init=False, repr=False
    )
    _memos: dict[tuple[Hashable, int], Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def quantised(self) -> bool:
        """Tell whether any hop goes through a codec."""
        return any(wire.codec is not None for hop in self.hops for wire in hop.formats)

    @property
    def draws(self) -> bool:
        """Tell whether any codec rounds at random."""
        codecs = {wire.codec for hop in self.hops for wire in hop.formats}
        return any(codec is not None and codec.rounding == "stochastic" for codec in codecs)

    @property
    def how(self) -> str:
        """The algorithm as callers write it, with the size of pieces where it was given."""
        if self.piece_nbytes is None:
            return self.algorithm
        return f"{self.algorithm}:piece={self.piece_nbytes}"

    @cached_property
    def route(self) -> str:
        """The hops in words: level (``*``: all) and format of each, in their order."""
        words = []
        for hop in self.hops:
            formats = {wire.codec.format if wire.codec else "none" for wire in hop.formats}
            level = "*" if hop.level is None else hop.level
            words.append(f"{level}:{'+'.join(sorted(formats))}")
        return ",".join(words)

    @cached_property
    def plain_hop(self) -> Hop:
        """A hop of no level, with the elements as they are."""
        return Hop(None, self.plain_formats)

    @property
    def plain_formats(self) -> tuple[WireFormat, ...]:
        """The formats of elements as they are."""
        return tuple(WireFormat(layout.dtype) for layout in self.layouts)

    @cached_property
    def _families(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        families: dict[tuple[int, ...], list[int]] = {}
        for rank in self.topology.ownership():
            at = self.topology.coordinates(rank)
            for depth in range(1, len(at) + 1):
                families.setdefault(at[:depth], []).append(rank)
        return {prefix: tuple(ranks) for prefix, ranks in families.items()}

    def peers(self, hop: Hop, rank: int) -> tuple[int, ...]:
        """Return the ranks of the exchange that ``rank`` is part of, itself included, ascending."""
        if hop.level is None:
            return self._everyone
        return self.topology.rail(hop.level, rank)

    @cached_property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(range(self.topology.size))

    def outward(self, hop: Hop, rank: int) -> list[int]:
        """Return the same ranks, the most distant first, itself last.

        Those of one distance begin with the next higher: no two ranks send to one of them at once.
        """
        far, size = self.topology.distance, self.topology.size

        def order(peer: int) -> tuple[bool, int, int]:
            return peer == rank, -far(rank, peer), (peer - rank) % size

        return sorted(self.peers(hop, rank), key=order)

    def memo(self, name: Hashable, rank: int, make: Callable[[Plan, int], Any]) -> Any:
        """Return what ``make(plan, rank)`` returned when it was first asked for under a name."""
        if (name, rank) not in self._memos:
            self._memos[name, rank] = make(self, rank)
        return self._memos[name, rank]

    def cargo(self, hop: Hop, rank: int, peer: int) -> tuple[int, ...]:
        """Return the shards inside the message from ``rank`` to ``peer``.

        Gathering, a rank sends the shards that it holds: those that share its coordinates up to the
        hop's level. Reducing, it sends the shards on their way to the peer: those that share the
        peer's.
        """
        at = rank if self.operation == "all_gather" else peer
        if hop.level is None:
            return (at,)
        return self._families[self.topology.coordinates(at)[: hop.level + 1]]

    def chunk_nbytes(self, hop: Hop, shard: int) -> int:
        """Return the bytes of one shard's wire chunk in a hop, all layouts together."""
        parts = self.parts(hop, shard)
        return parts[-1].span.stop if parts else 0

    def parts(self, hop: Hop, shard: int) -> tuple[Part, ...]:
        """Return where in a shard's wire chunk each layout's part lies."""
        key = (id(hop), shard)
        if key not in self._parts:
            parts, at = [], 0
            for layout, wire in zip(self.layouts, hop.formats, strict=True):
                end = at + wire.wire_nbytes(layout.lengths(shard))
                parts.append(Part(wire, slice(at, end)))
                at = end
            self._parts[key] = hop, tuple(parts)
        return self._parts[key][1]

    def spans(self, hop: Hop, cargo: tuple[int, ...]) -> dict[int, slice]:
        """Return where in a message with this cargo each shard's chunk lies."""
        spans, at = {}, 0
        for shard in cargo:
            end = at + self.chunk_nbytes(hop, shard)
            spans[shard] = slice(at, end)
            at = end
        return spans

    def message_nbytes(self, hop: Hop, rank: int, peer: int) -> int:
        """Return the bytes of the message from ``rank`` to ``peer`` (or itself) in a hop."""
        return sum(self.chunk_nbytes(hop, shard) for shard in self.cargo(hop, rank, peer))

    def messages(self, index: int, rank: int) -> tuple[Message, ...]:
        """Return what ``rank`` sends in hop number ``index``, itself left out."""
        return tuple(self._messages_of(index, rank).values())

    def message(self, index: int, rank: int, peer: int) -> Message:
        """Return what ``rank`` sends to one peer in hop number ``index``."""
        return self._messages_of(index, rank)[peer]

    def _messages_of(self, index: int, rank: int) -> dict[int, Message]:
        if (index, rank) not in self._messages:
            hop = self.hops[index]
            peers = self.peers(hop, rank)
            found = {peer: self._message(hop, rank, peer) for peer in peers if peer != rank}
            self._messages[index, rank] = found
        return self._messages[index, rank]

    def _message(self, hop: Hop, rank: int, peer: int) -> Message:
        cargo = self.cargo(hop, rank, peer)
        logical = sum(
            layout.shard_numel(shard) * ITEMSIZE[layout.dtype]
            for shard in cargo
            for layout in self.layouts
        )
        nbytes = self.message_nbytes(hop, rank, peer)
        return Message(peer, self.topology.distance(rank, peer), cargo, logical, nbytes)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What the operation is executed as, one after the other, or several at a time."""
        return cut(self)

    @cached_property
    def whole(self) -> tuple[Piece, ...]:
        """The operation as one piece."""
        return (whole(self),)

    def wire_nbytes(self, rank: int) -> dict[int, int]:
        """Return the bytes that ``rank`` sends, per level of the topology."""
        total: dict[int, int] = {}
        for piece in self.pieces:
            for index in range(len(self.hops)):
                for message in piece.plan.messages(index, rank):
                    total[message.level] = total.get(message.level, 0) + message.wire_nbytes
        return total


@dataclass(frozen=True)
class AllReduce:
    """The plans of an all_reduce: ``scatter`` then ``gather``, or, small and exact, ``whole``.

    ``whole`` gathers every rank's tensors; ``scatter`` then only says how they are summed.
    """

    scatter: Plan
    gather: Plan
    whole: Plan | None

    @property
    def executed(self) -> tuple[Plan, ...]:
        """The plans whose messages travel."""
        return (self.scatter, self.gather) if self.whole is None else (self.whole,)
