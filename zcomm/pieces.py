"""Pieces: one large operation as several small ones of the same kind, so that hops overlap.

A *piece* of a plan is a plan whose layouts hold a part of every shard: segments are cut at
multiples of 4096 elements from their own start (and of whole blocks, so that no code changes). The
messages of a piece are messages of their own. All ranks cut alike: from the plan, and nothing else.
A shard that is shorter than the others has fewer parts, and is empty in the last pieces.

Numbers that rounding draws count from the start of a segment, so a plan with stochastic rounding
is one piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

from zcomm.arrays import ITEMSIZE
from zcomm.layout import Layout, Segment
from zcomm.transports.windows import SLOTS_NBYTES

if TYPE_CHECKING:
    from zcomm.plan import Plan, WireFormat

CUT = 4096
"""Segments are cut at multiples of this many elements from their start: whole blocks, always."""

SMALLEST_NBYTES = 32 * 1024
USUAL_NBYTES = 144 * 1024
"""A piece has so many bytes of a shard on the wire: less costs Python, more costs overlap."""

LARGEST_NBYTES = 512 * 1024
"""Where a shard is long enough to be many pieces they grow up to this size, since a message costs
a core a quarter of a millisecond whatever it holds. Where no network is crossed a message costs
nothing but copies, and all pieces have this size."""

MANY = 8
"""Pieces are larger than usual where they are so many."""

IN_FLIGHT = 8
IN_FLIGHT_INSIDE = 4
"""Inside a node large pieces matter more than many: there is no latency to hide."""

SHARE = 4
"""Between the two, a piece is this part of the longest shard."""

RAMP = (4, 2)
"""The first pieces are smaller by so much: nothing is on the wire until one is encoded, and the
next should be by the time that one has left. So is the last: nothing hides what follows its
arrival."""

Part = dict[int, list[Segment]]
"""For every item, its segments in one piece of one shard."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of an operation: ``plan`` moves it, ``items`` are the positions of its layouts.

    ``firsts[rank]`` says for each item where the piece begins in the compact form of a shard.
    """

    plan: Plan
    items: tuple[int, ...]
    firsts: tuple[tuple[int, ...], ...]


def cut(plan: Plan) -> tuple[Piece, ...]:
    """Return the pieces of a plan, at least one."""
    weights = [_nbytes_per_element(formats) for formats in _formats(plan)]
    longest, room = _extent(plan, weights)
    if longest <= room:
        return (whole(plan),)
    parts = [list(_parts(plan, rank, weights, room)) for rank in range(plan.topology.size)]
    return tuple(_pieces(plan, parts))


def count(plan: Plan) -> int:
    """Return about how many pieces :func:`cut` makes, without making them."""
    weights = [_nbytes_per_element(formats) for formats in _formats(plan)]
    longest, room = _extent(plan, weights)
    if longest <= room:
        return 1
    ends = accumulate(_rooms(longest, room, CUT * max(weights)))
    return 1 + sum(1 for _ in takewhile(lambda end: end < longest, ends))


def _extent(plan: Plan, weights: Sequence[float]) -> tuple[float, float]:
    """Return the bytes of the longest shard, and of the room that a piece has for a shard."""
    weighed = list(zip(weights, plan.layouts, strict=True))
    longest = max(
        sum(weight * layout.shard_numel(rank) for weight, layout in weighed)
        for rank in range(plan.topology.size)
    )
    if not weights or not plan.hops or plan.draws:
        return longest, longest
    usual = LARGEST_NBYTES if _inside(plan) else max(USUAL_NBYTES, longest / MANY)
    largest = plan.piece_nbytes or min(usual, LARGEST_NBYTES)
    slot = slot_nbytes(plan) / _num_inside(plan) - CUT * max(weights)  # see _rooms
    return longest, max(min(longest / SHARE, largest, slot), SMALLEST_NBYTES)


def whole(plan: Plan) -> Piece:
    """Return a plan as one piece."""
    items = tuple(range(len(plan.layouts)))
    return Piece(plan, items, ((0,) * len(items),) * plan.topology.size)


def in_flight(plan: Plan) -> int:
    """Return how many pieces may have posted their receives and not be finished."""
    return IN_FLIGHT_INSIDE if _inside(plan) else IN_FLIGHT


def slot_nbytes(plan: Plan) -> int:
    """Return what a rank may write for its node in one piece."""
    return SLOTS_NBYTES // in_flight(plan)


def _inside(plan: Plan) -> bool:
    """Tell whether all ranks are in one node, so that no message crosses a network."""
    return len(plan.topology.levels[0].groups) == 1


def _num_inside(plan: Plan) -> int:
    """Return about how many shards a rank of this plan writes for its node in one piece."""
    if plan.operation == "all_gather" or not plan.hops:
        return len(plan.cargo(plan.hops[-1], 0, 0)) if plan.hops else 1
    inside = plan.hops[:-1] or plan.hops
    return sum((len(plan.peers(hop, 0)) - 1) * len(plan.cargo(hop, 0, 0)) for hop in inside)


def _formats(plan: Plan) -> list[list[WireFormat]]:
    """Return, for every layout, its formats in all hops."""
    return [[hop.formats[item] for hop in plan.hops] for item in range(len(plan.layouts))]


def _nbytes_per_element(formats: Sequence[WireFormat]) -> float:
    return max((wire.wire_nbytes((CUT * 256,)) / (CUT * 256) for wire in formats), default=0.0)


def _parts(plan: Plan, rank: int, weights: Sequence[float], room: float) -> Iterator[Part]:
    """Cut one shard: fill a part up to its room in bytes, then begin the next."""
    weighed = zip(weights, plan.layouts, strict=True)
    nbytes = sum(weight * layout.shard_numel(rank) for weight, layout in weighed)
    rooms = _rooms(nbytes, room, CUT * max(weights))
    part: Part = {}
    left = next(rooms)
    for item, layout in enumerate(plan.layouts):
        weight = weights[item]
        for segment in layout.shards[rank]:
            start, numel = segment.start, segment.numel
            while weight * numel > left:
                taken = min(int(left / weight) // CUT * CUT, numel)
                if taken == 0 and not part:
                    taken = min(CUT, numel)
                if taken:
                    part.setdefault(item, []).append(Segment(start, taken))
                start, numel = start + taken, numel - taken
                yield part
                part, left = {}, next(rooms)
            if numel:
                part.setdefault(item, []).append(Segment(start, numel))
                left -= weight * numel
    if part:
        yield part


def _rooms(nbytes: float, room: float, step: float) -> Iterator[float]:
    """Return the room of every part of so many bytes, which can be cut at multiples of ``step``.

    All are at most one step more than ``room``.
    """
    ramp = [_up(max(room / by, SMALLEST_NBYTES), step) for by in RAMP]
    for size in ramp:
        if nbytes < size + SMALLEST_NBYTES:
            break
        yield size
        nbytes -= size
    number = max(math.ceil((nbytes - ramp[0]) / room), 0)
    for _ in range(number):
        yield _up((nbytes - ramp[0]) / number, step)
    yield math.inf


def _up(nbytes: float, step: float) -> float:
    return math.ceil(nbytes / step) * step


def _pieces(plan: Plan, parts: Sequence[Sequence[Part]]) -> Iterator[Piece]:
    firsts = [[0] * len(plan.layouts) for _ in parts]
    for number in range(max(map(len, parts))):
        now = [own[number] if number < len(own) else {} for own in parts]
        items = tuple(sorted({item for part in now for item in part}))
        layouts = tuple(
            Layout(plan.layouts[item].dtype, tuple(tuple(part.get(item, ())) for part in now))
            for item in items
        )
        hops = tuple(
            replace(hop, formats=tuple(hop.formats[item] for item in items)) for hop in plan.hops
        )
        partials = tuple(plan.partials[item] for item in items)
        begins = tuple(tuple(first[item] for item in items) for first in firsts)
        made = replace(plan, layouts=layouts, hops=hops, partials=partials)
        yield Piece(made, items, begins)
        for first, part in zip(firsts, now, strict=True):
            for item, segments in part.items():
                first[item] += sum(segment.numel for segment in segments)


def logical_nbytes(plan: Plan) -> int:
    """Return the bytes of all shards in the caller's dtypes."""
    return sum(layout.numel * ITEMSIZE[layout.dtype] for layout in plan.layouts)
