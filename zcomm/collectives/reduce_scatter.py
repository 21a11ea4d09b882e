"""reduce_scatter: every rank keeps its shard of the sum; qgZ for any number of levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topology import Topology
from zcomm.arrays import ITEMSIZE, Memory, View
from zcomm.collectives.channel import Channel
from zcomm.collectives.wire import CARRIER, pack, reduce, reduce_pack, unpack
from zcomm.plan import Hop, Indices, Plan, WireFormat

Chunks = dict[int, list[Memory]]
"""For every shard on its way: its wire chunks from the peers of the last hop, ascending."""


def reduce_scatter(
    channel: Channel,
    plan: Plan,
    fulls: Sequence[View],
    shards: Sequence[View],
    op: str,
    divisor: int,
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
    if not plan.hops:
        for layout, full, shard in zip(plan.layouts, fulls, shards, strict=True):
            _keep(layout.dtype, layout.table(channel.rank), full, shard)
        return
    chunks: Chunks = {}
    scratch: list[Memory] = []
    for index, hop in enumerate(plan.hops):
        before, scratch = scratch, []
        last = None if index == 0 else plan.hops[index - 1]
        messages = _outgoing(channel, plan, hop, last, chunks, fulls, op, scratch)
        chunks = _exchange(channel, plan, index, messages, scratch)
        channel.pool.give(*before)
    with channel.clock.measure("decode"):
        for position, piece in enumerate(_pieces(plan, plan.hops[-1], channel.rank)):
            parts = [chunk[piece.span] for chunk in chunks[channel.rank]]
            starts, lengths = plan.layouts[position].table(channel.rank, compact=True)
            _finish(
                plan, position, piece.wire, parts, shards[position], starts, lengths, op, divisor
            )
    channel.pool.give(*scratch)


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


def _outgoing(
    channel: Channel,
    plan: Plan,
    hop: Hop,
    last: Hop | None,
    chunks: Chunks,
    fulls: Sequence[View],
    op: str,
    scratch: list[Memory],
) -> dict[int, Memory]:
    """Encode a message for every peer of the hop, itself included; ``scratch`` notes memory."""
    messages = {}
    with channel.clock.measure("encode"):
        for peer in plan.peers(hop, channel.rank):
            cargo = plan.cargo(hop, channel.rank, peer)
            plain = None if last is not None else _plain(plan, hop, cargo, fulls)
            if plain is not None:
                messages[peer] = plain
                continue
            out = channel.pool.take(sum(plan.chunk_nbytes(hop, shard) for shard in cargo))
            scratch.append(out)
            at = 0
            for shard in cargo:
                nbytes = plan.chunk_nbytes(hop, shard)
                place = out[at : at + nbytes]
                if last is None:
                    _encode(plan, hop, shard, fulls, place)
                else:
                    _recode(plan, last, hop, shard, chunks[shard], op, place)
                at += nbytes
            messages[peer] = out
    return messages


def _plain(plan: Plan, hop: Hop, cargo: Sequence[int], fulls: Sequence[View]) -> Memory | None:
    """Return the message as it already lies in the caller's memory, where it does."""
    if len(cargo) != 1 or len(plan.layouts) != 1 or hop.formats[0].codec is not None:
        return None
    run = plan.layouts[0].run(cargo[0])
    return None if run is None else fulls[0].elements(run.start, run.numel)


def _encode(plan: Plan, hop: Hop, shard: int, fulls: Sequence[View], out: Memory) -> None:
    for position, piece in enumerate(_pieces(plan, hop, shard)):
        pack(piece.wire, fulls[position], *plan.layouts[position].table(shard), out[piece.span])


def _recode(
    plan: Plan, last: Hop, hop: Hop, shard: int, chunks: Sequence[Memory], op: str, out: Memory
) -> None:
    before, after = _pieces(plan, last, shard), _pieces(plan, hop, shard)
    for position, (old, new) in enumerate(zip(before, after, strict=True)):
        lengths = plan.layouts[position].table(shard)[1]
        reduce_pack(
            old.wire, [chunk[old.span] for chunk in chunks], new.wire, lengths, op, out[new.span]
        )


def _exchange(
    channel: Channel, plan: Plan, index: int, messages: dict[int, Memory], scratch: list[Memory]
) -> Chunks:
    """Exchange the messages, cut what arrived into chunks; ``scratch`` notes the memory."""
    hop, me = plan.hops[index], channel.rank
    cargo = plan.cargo(hop, me, me)
    nbytes = sum(plan.chunk_nbytes(hop, shard) for shard in cargo)
    recvs = {peer: channel.pool.take(nbytes) for peer in messages if peer != me}
    sends = {peer: memory for peer, memory in messages.items() if peer != me}
    logical = {message.peer: message.logical_nbytes for message in plan.messages(index, me)}
    channel.exchange(plan.counted_as, sends, recvs, logical)
    scratch += recvs.values()
    chunks: Chunks = {}
    at = 0
    for shard in cargo:
        span = slice(at, at + plan.chunk_nbytes(hop, shard))
        chunks[shard] = [(messages if peer == me else recvs)[peer][span] for peer in messages]
        at = span.stop
    return chunks


def _finish(
    plan: Plan,
    position: int,
    wire: WireFormat,
    parts: list[Memory],
    target: View,
    starts: Indices,
    lengths: Indices,
    op: str,
    divisor: int,
) -> None:
    if plan.hops[-1].level is None and wire.codec is None:
        nested_reduce(
            plan.nesting, wire, plan.partials[position], parts, target, starts, lengths, op, divisor
        )
    else:
        reduce(wire, parts, target, starts, lengths, op, divisor)


def nested_reduce(
    nesting: Topology,
    wire: WireFormat,
    partial: WireFormat,
    chunks: Sequence[Memory],
    target: View,
    starts: Indices,
    lengths: Indices,
    op: str,
    divisor: int,
) -> None:
    """Reduce the plain chunks of all ranks as the levels nest.

    Inside out, ascending, every partial sum rounded to ``partial``. This is the definition of an
    exact result; the hierarchical algorithm computes the same, spread over the ranks.
    """
    parts = list(enumerate(chunks))
    for level in nesting.levels:
        if len(level.groups) in (1, len(parts)):
            continue
        sums = []
        for group in level.groups:
            members = [part for first, part in parts if first in group]
            sums.append((group[0], _partial(wire, members, partial, lengths, op)))
        parts, wire = sums, partial
    reduce(wire, [part for _, part in parts], target, starts, lengths, op, divisor)


def _partial(
    wire: WireFormat, parts: list[Memory], partial: WireFormat, lengths: Indices, op: str
) -> Memory:
    out = np.empty(partial.wire_nbytes(tuple(lengths.tolist())), np.uint8)
    reduce_pack(wire, parts, partial, lengths, op, out)
    return out


def _keep(dtype: str, table: tuple[Indices, Indices], full: View, shard: View) -> None:
    """Copy the only rank's segments, rounded to the dtype asked for: no level has a hop."""
    starts, lengths = table
    packed = np.cumsum(lengths) - lengths
    chunk = np.empty(int(lengths.sum()) * ITEMSIZE[dtype], np.uint8)
    pack(WireFormat(dtype), full, starts, lengths, chunk)
    if dtype in CARRIER and shard.dtype != dtype:
        reduce(WireFormat(dtype), [chunk], shard, packed, lengths, "sum", 1)
    else:
        unpack(WireFormat(dtype), chunk, shard, packed, lengths)
