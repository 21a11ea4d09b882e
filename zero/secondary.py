"""hpZ: a second copy of the parameters, sharded over a group of ranks close to each other.

Words defined here:

- **group**: the ranks that share one secondary copy. **rail**: the ranks at the same position in
  all groups. **slice**: what one rank holds of a unit, the shards of its rail.

The first gather of a version fills the slice along the rail, then gathers inside the group; later
ones gather inside the group only. Weights are encoded once, by their owner: the group sends what
is held, decoded values or the codes themselves, so every gather of a version gives the same bits.

A reader must not assume that groups are nodes: they are any division of the ranks in the order of
the topology.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from topology import Topology
from zcomm import Codec, Communicator
from zcomm.arrays import Memory, view
from zcomm.device import kernels_of
from zcomm.errors import OffloadError
from zcomm.layout import Layout, Segment
from zcomm.work import Work
from zero.differences import Differences
from zero.layout import dtype_name
from zero.lend import lend
from zero.unit import Buffer, Unit


def groups_of(topology: Topology, secondary: int | str) -> list[tuple[int, ...]]:
    """Divide the ranks into secondary groups of equal size, near ranks together.

    Args:
        topology: of all ranks.
        secondary: ``"node"`` for the groups of the level named node, else of the last but one
            level; or the number of ranks of a group.

    Raises:
        ValueError: nodes of different sizes, or a number that does not divide the ranks.
    """
    order = sorted(range(topology.size), key=lambda rank: topology.coordinates(rank)[::-1])
    if isinstance(secondary, int):
        if topology.size % secondary:
            raise ValueError(f"secondary {secondary} does not divide {topology.size} ranks")
        return [tuple(order[i : i + secondary]) for i in range(0, len(order), secondary)]
    levels = topology.levels
    nodes = next(
        (level for level in levels if level.name == "node"), levels[max(0, len(levels) - 2)]
    )
    if len({len(group) for group in nodes.groups}) > 1:
        sizes = ", ".join(str(len(group)) for group in nodes.groups)
        raise ValueError(f"secondary 'node' needs nodes of one size; these have {sizes} ranks")
    members = [sorted(group, key=order.index) for group in nodes.groups]
    return sorted(map(tuple, members), key=lambda group: order.index(group[0]))


@dataclass(eq=False)
class Slice:
    """What this rank holds of a unit: one tensor per buffer, filled in ``version``."""

    held: list[Tensor]
    version: int


class Secondary:
    """The slices of all units, and the two groups of ranks that fill and read them."""

    def __init__(
        self,
        comm: Communicator,
        secondary: int | str,
        codec: Codec | None,
        *,
        codes: bool,
        seed: int,
    ) -> None:
        persistent = secondary == "persistent"
        groups = groups_of(comm.topology, "node" if persistent else secondary)
        number = next(i for i, group in enumerate(groups) if comm.rank in group)
        position = groups[number].index(comm.rank)
        self._rails = list(zip(*groups, strict=True))
        self._position = position
        self._rank = comm.rank
        self._codec = codec
        self._differences = Differences(self._rails[position], comm.rank) if persistent else None
        self._codes = codes
        self._seed = seed
        self._slices: dict[Unit, Slice] = {}
        self._layouts: dict[object, Layout] = {}
        self.group = comm.split(color=number, key=position)
        self.rail = comm.split(color=position, key=number)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(t.numel() * t.element_size() for s in self._slices.values() for t in s.held)

    def forget(self) -> None:
        """Let the next gather of every unit fill its slice anew."""
        for held in self._slices.values():
            held.version = -1

    def gather(
        self, unit: Unit, fulls: Sequence[Tensor], *, async_op: bool = False
    ) -> tuple[Work[object], ...]:
        """Write the unit's parameters of its current version to ``fulls``, one per buffer.

        Returns the works to wait for, all of them; none without ``async_op``.
        """
        codec = self._codec if unit.quantise and self.rail.size > 1 else None
        current = self._slices.get(unit)
        if current is None:
            current = self._slices[unit] = Slice([], -1)
        try:
            works = self._filled(unit, codec, current, async_op)
        except OffloadError as error:
            # All of the rail have raised it; the group waits for this rank.
            self.group.refuse(error)
            raise
        ready = partial(_check_filled, tuple(works)) if async_op else None
        if codec is not None and self._codes:
            held = current.held[0]
            works += self._spread_codes(unit, codec, held, fulls, ready, async_op)
        else:
            layouts = [self._group_layout(buffer) for buffer in unit.buffers]
            works.append(
                self.group.gather_layout(
                    current.held, fulls, layouts, label=unit.label, ready=ready, async_op=async_op
                )
            )
        return tuple(works) if async_op else ()

    def _filled(self, unit: Unit, codec: Codec | None, current: Slice, async_op: bool) -> list[Any]:
        """Bring a slice to the unit's version; return the works that do."""
        if self._differences is not None and codec is not None:
            return self._follow(unit, codec, current, async_op)
        if current.version == unit.version:
            return []
        fill = self._fill_codes if codec is not None and self._codes else self._fill
        current.held, works = fill(unit, codec, async_op)
        current.version = unit.version
        return works

    def _follow(self, unit: Unit, codec: Codec, current: Slice, async_op: bool) -> list[Any]:
        """Bring a persistent slice to the unit's version; see :mod:`zero.differences`."""
        works: list[Any] = []
        if current.version < unit.published:
            # New, or the user wrote to the parameters: the shards as they are.
            current.held, filled = self._fill(unit, None, async_op)
            current.version = unit.published
            works += filled
        if current.version != unit.version:
            works += self._send_differences(unit, codec, current.held, async_op)
            current.version = unit.published = unit.version
        return works

    def _send_differences(
        self, unit: Unit, codec: Codec, held: Sequence[Tensor], async_op: bool
    ) -> list[Any]:
        assert self._differences is not None
        differences = self._differences
        moved = [
            (buffer, place)
            for buffer, place in zip(unit.buffers, held, strict=True)
            if buffer in unit.trainable
        ]
        layouts = [differences.layout(buffer) for buffer, _ in moved]
        # Made in inference mode they could not be filled by another thread.
        with torch.inference_mode(False):
            own = [
                torch.empty(sum(m.run.numel for m in buffer.masters), device=buffer.device)
                for buffer, _ in moved
            ]
        fulls = [
            torch.empty(layout.numel, device=buffer.device)
            for layout, (buffer, _) in zip(layouts, moved, strict=True)
        ]
        seed = unit.seed(self._seed, self._rank)

        def find() -> None:
            for (buffer, _), place in zip(moved, own, strict=True):
                place.copy_(differences.own(buffer))

        work = self.rail.gather_layout(
            own,
            fulls,
            layouts,
            codec=codec,
            min_numel=0,
            label=unit.label,
            seed=seed,
            ready=find,
            async_op=async_op,
        )

        def apply() -> None:
            for (buffer, place), full in zip(moved, fulls, strict=True):
                differences.apply(buffer, place, full)

        if async_op:
            return [work, self.rail.enqueue(apply, [*(place for _, place in moved), *fulls])]
        apply()
        return []

    def _fill(
        self, unit: Unit, codec: Codec | None, async_op: bool
    ) -> tuple[list[Tensor], list[Any]]:
        layouts = [self._rail_layout(buffer) for buffer in unit.buffers]
        # Made in inference mode it could not be updated outside.
        with torch.inference_mode(False):
            held = self._slices[unit].held or [
                torch.empty(layout.numel, dtype=buffer.layout.dtype, device=buffer.device)
                for buffer, layout in zip(unit.buffers, layouts, strict=True)
            ]
        lent = lend(self.rail, unit, async_op=async_op)
        work = self.rail.gather_layout(
            lent.shards,
            held,
            layouts,
            codec=codec,
            min_numel=0,
            label=unit.label,
            seed=unit.seed(self._seed, self._rank),
            ready=lent.ready,
            async_op=async_op,
        )
        return held, [work, *lent.give_back()]

    def _fill_codes(
        self, unit: Unit, codec: Codec | None, async_op: bool
    ) -> tuple[list[Tensor], list[Any]]:
        assert codec is not None
        seed = unit.seed(self._seed, self._rank)
        lent = lend(self.rail, unit, async_op=async_op)
        nbytes = sum(_wire_nbytes(buffer, codec, self._rank) for buffer in unit.buffers)
        device = unit.buffers[0].device
        with torch.inference_mode(False):
            own = torch.empty(nbytes, dtype=torch.uint8, device=device)

        def encode() -> None:
            lent.ready()
            wires = [
                codec.encode(shard, seed=seed, segments=buffer.layout.all.lengths(self._rank))
                for shard, buffer in zip(lent.shards, unit.buffers, strict=True)
            ]
            torch.cat([torch.as_tensor(wire, device=device) for wire in wires], out=own)

        layout = self._codes_layout(unit, codec, (self._rails[self._position],))
        rail = Layout("uint8", tuple((segment,) for segment in layout.shards[0]))
        held = torch.empty(layout.numel, dtype=torch.uint8, device=device)
        work = self.rail.gather_layout(
            [own], [held], [rail], label=unit.label, ready=encode, async_op=async_op
        )
        return [held], [work, *lent.give_back()]

    def _spread_codes(
        self,
        unit: Unit,
        codec: Codec,
        held: Tensor,
        fulls: Sequence[Tensor],
        ready: Callable[[], None] | None,
        async_op: bool,
    ) -> list[Any]:
        layout = self._codes_layout(unit, codec, tuple(self._rails))
        memory = torch.empty(layout.numel, dtype=torch.uint8, device=held.device)
        work = self.group.gather_layout(
            [held], [memory], [layout], label=unit.label, ready=ready, async_op=async_op
        )

        def decode() -> None:
            self._decode(unit, codec, layout, memory, fulls)

        if async_op:
            return [work, self.group.enqueue(decode, [memory, *fulls])]
        decode()
        return []

    def _decode(
        self, unit: Unit, codec: Codec, layout: Layout, codes: Tensor, fulls: Sequence[Tensor]
    ) -> None:
        """Write what all shards' codes stand for to ``fulls``."""
        for rail, segments in zip(self._rails, layout.shards, strict=True):
            for rank, segment in zip(rail, segments, strict=True):
                wire = view(codes[segment.start : segment.start + segment.numel]).memory
                _decode(unit, codec, rank, wire, fulls)

    def _codes_layout(self, unit: Unit, codec: Codec, rails: tuple[tuple[int, ...], ...]) -> Layout:
        """Return, for each rail, the place of its ranks' codes one after the other."""
        key = (unit, rails)
        if key not in self._layouts:
            start = 0
            shards = []
            for rail in rails:
                segments = []
                for rank in rail:
                    nbytes = sum(_wire_nbytes(buffer, codec, rank) for buffer in unit.buffers)
                    segments.append(Segment(start, nbytes))
                    start += nbytes
                shards.append(tuple(segments))
            self._layouts[key] = Layout("uint8", tuple(shards))
        return self._layouts[key]

    def _rail_layout(self, buffer: Buffer) -> Layout:
        """Return where the shards of this rank's rail lie in its slice."""
        key = (buffer, "rail")
        if key not in self._layouts:
            start = 0
            shards = []
            for rank in self._rails[self._position]:
                segments = []
                for run in buffer.layout.runs[rank]:
                    segments.append(Segment(start, run.numel))
                    start += run.numel
                shards.append(tuple(segments))
            self._layouts[key] = Layout(dtype_name(buffer.layout.dtype), tuple(shards))
        return self._layouts[key]

    def _group_layout(self, buffer: Buffer) -> Layout:
        """Return where the slices of this rank's group lie in the whole buffer."""
        key = (buffer, "group")
        if key not in self._layouts:
            segments = buffer.layout.all.shards
            shards = tuple(
                tuple(s for rank in rail for s in segments[rank]) for rail in self._rails
            )
            self._layouts[key] = Layout(dtype_name(buffer.layout.dtype), shards)
        return self._layouts[key]


def _check_filled(works: Sequence[Work[object]]) -> None:
    """Raise what kept a slice from being filled: nothing of it may be sent."""
    for work in works:
        if isinstance(work.error, OffloadError):
            raise work.error


def _wire_nbytes(buffer: Buffer, codec: Codec, rank: int) -> int:
    lengths = buffer.layout.all.lengths(rank)
    dtype = dtype_name(buffer.layout.dtype)
    return codec.wire_nbytes(sum(lengths), dtype=dtype, segments=lengths)


def _decode(unit: Unit, codec: Codec, rank: int, wire: Memory, fulls: Sequence[Tensor]) -> None:
    start = 0
    for buffer, full in zip(unit.buffers, fulls, strict=True):
        nbytes = _wire_nbytes(buffer, codec, rank)
        dtype = dtype_name(buffer.layout.dtype)
        starts, lengths = buffer.layout.all.table(rank)
        chunk = wire[start : start + nbytes]
        memory = view(full).memory
        kernels_of(memory).decode(codec.on_wire(dtype), chunk, starts, lengths, memory, dtype)
        start += nbytes
