"""Who is near whom: an immutable description of the ranks of a job.

Words defined here:

- **level**: a partition of the ranks into groups. Level 0 is the innermost; the groups of a level
  nest in those of the next; the last level is one group, all ranks.
- **coordinates** of a rank, innermost first: its position in its level 0 group, then the position
  of its level k-1 group among those that make up its level k group. Positions count by smallest
  rank.
- **uniform**: all groups of a level have the same size, at every level. **shape**: then, the number
  of positions at each level, innermost first.
- **rail**: the ranks that differ in one coordinate only.

A reader must not assume that the ranks of a group are consecutive, that a coordinate follows from
the rank by division, that groups have equal sizes, or that a group has more than one rank.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from topology.checks import Groups, canonical_groups, check_levels, elements
from topology.errors import TopologyError

SCHEMA = "zcomm.topology/1"

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """One partition of the ranks.

    A partition has no order: ranks are kept ascending and groups by smallest rank, in whatever
    order they are given.

    Raises:
        TopologyError: an empty name, level or group, or something in a group that is not a rank.
    """

    name: str
    groups: Groups

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", canonical_groups(self.name, self.groups))


@dataclass(frozen=True)
class Topology:
    """The levels of a job, from the inside out; the last holds all ranks.

    Example:
        Two nodes of two ranks that were placed round-robin::

            Topology((Level("node", ((0, 2), (1, 3))), Level("network", ((0, 1, 2, 3),))))

    Raises:
        TopologyError: levels that are not partitions of the same ranks 0..W-1, do not nest, share a
            name, or do not end in one group.
    """

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        check_levels([level.name for level in self.levels], [level.groups for level in self.levels])

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.levels[-1].groups[0])

    @cached_property
    def uniform(self) -> bool:
        """Whether all groups of a level have the same size, at every level."""
        return all(len(_group_sizes(level)) == 1 for level in self.levels)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Number of positions at each level, innermost first; their product is ``size``.

        Raises:
            TopologyError: the topology is not uniform.
        """
        self._require_uniform("a shape")
        sizes = [1, *(len(level.groups[0]) for level in self.levels)]
        return tuple(outer // inner for inner, outer in pairwise(sizes))

    def coordinates(self, rank: int) -> Coordinates:
        """Return the position of ``rank`` at every level, innermost first; uniform or not."""
        return self._coordinates[self._checked_rank(rank)]

    def group(self, level: int, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group of ``level`` that holds ``rank``, ascending."""
        index = self._group_of[self._checked_level(level)][self._checked_rank(rank)]
        return self.levels[level].groups[index]

    def rail(self, level: int, rank: int) -> tuple[int, ...]:
        """Return ``rank`` and the ranks that differ from it in coordinate ``level`` only.

        They are ordered by that coordinate.

        Raises:
            TopologyError: the topology is not uniform.
        """
        self._require_uniform("a rail")
        return self._rails[self._checked_level(level)][_without(self.coordinates(rank), level)]

    def distance(self, a: int, b: int) -> int:
        """Return the smallest level with a group that holds both ranks, 0 for a rank and itself."""
        self._checked_rank(a)
        self._checked_rank(b)
        return next(level for level, table in enumerate(self._group_of) if table[a] == table[b])

    def ownership(self) -> tuple[int, ...]:
        """Return the ranks in the order in which they own shards.

        Uniform: the innermost coordinate is the most significant. With two levels and n nodes,
        local rank l of node k owns shard l·n + k: the ranks of a rail own consecutive shards.
        Not uniform: ascending ranks.
        """
        return self._ownership

    def restrict(self, ranks: Sequence[int]) -> "Topology":
        """Return the topology of some of the ranks, renumbered from 0 in the given order.

        All levels stay, with their names, so that a level's index keeps its meaning; groups may
        shrink to one rank.

        Raises:
            TopologyError: no rank, a rank twice, or one that is not there.
        """
        renumbered = {self._checked_rank(old): new for new, old in enumerate(ranks)}
        if not renumbered or len(renumbered) != len(ranks):
            raise TopologyError(
                f"restrict needs at least one rank and each only once, got {list(ranks)}"
            )
        return Topology(tuple(_restrict_level(level, renumbered) for level in self.levels))

    def to_json(self) -> str:
        """Return the canonical JSON: one line, keys sorted; equal topologies give equal text."""
        levels = [{"name": level.name, "groups": level.groups} for level in self.levels]
        document = {"schema": SCHEMA, "levels": levels}
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Topology":
        """Read what ``to_json`` wrote, or the same by hand: white space and order are free.

        Raises:
            TopologyError: not JSON, another schema, missing or unknown keys, or levels that do not
                fit together.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise TopologyError(f"not JSON: {error}") from None
        given = _checked_keys(document, {"schema", "levels"}, "a topology")
        if given["schema"] != SCHEMA:
            raise TopologyError(f"the schema must be {SCHEMA!r}, got {given['schema']!r}")
        return cls(tuple(_level_from_json(item) for item in elements(given["levels"], "levels")))

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def describe(self) -> str:
        """Return one line for people: ``8 ranks = 2 x 4 (network x node), block placement``."""
        ranks = f"{self.size} rank{'s' if self.size > 1 else ''}"
        if not self.uniform:
            return f"{ranks}, not uniform ({self._unevenness()}): flat algorithms only"
        shape = " x ".join(str(extent) for extent in reversed(self.shape))
        names = " x ".join(level.name for level in reversed(self.levels))
        return f"{ranks} = {shape} ({names}), {self._placement()}"

    @cached_property
    def _group_of(self) -> tuple[tuple[int, ...], ...]:
        """For every level and rank, the index of the group that holds it."""
        tables = []
        for level in self.levels:
            index = {rank: number for number, group in enumerate(level.groups) for rank in group}
            tables.append(tuple(index[rank] for rank in range(self.size)))
        return tuple(tables)

    @cached_property
    def _coordinates(self) -> tuple[Coordinates, ...]:
        subgroup_of: Sequence[int] = range(self.size)
        columns = []
        for level, table in zip(self.levels, self._group_of, strict=True):
            columns.append(_positions(level, subgroup_of))
            subgroup_of = table
        return tuple(zip(*columns, strict=True))

    @cached_property
    def _rails(self) -> tuple[dict[Coordinates, tuple[int, ...]], ...]:
        """For every level, the rail of each choice of the other coordinates."""
        by_coordinates = sorted(range(self.size), key=self._coordinates.__getitem__)
        tables = []
        for level in range(len(self.levels)):
            rails: dict[Coordinates, list[int]] = {}
            for rank in by_coordinates:
                rails.setdefault(_without(self._coordinates[rank], level), []).append(rank)
            tables.append({others: tuple(ranks) for others, ranks in rails.items()})
        return tuple(tables)

    @cached_property
    def _ownership(self) -> tuple[int, ...]:
        ranks = range(self.size)
        return tuple(sorted(ranks, key=self._coordinates.__getitem__) if self.uniform else ranks)

    def _checked_rank(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise TopologyError(
                f"rank {rank} does not exist; the ranks are 0 to {self.size - 1} ({self.size})"
            )
        return rank

    def _checked_level(self, level: int) -> int:
        if not 0 <= level < len(self.levels):
            names = ", ".join(f"{index} ({level.name})" for index, level in enumerate(self.levels))
            raise TopologyError(f"level {level} does not exist; the levels are {names}")
        return level

    def _require_uniform(self, what: str) -> None:
        if not self.uniform:
            raise TopologyError(f"{what} needs groups of equal size, not {self._unevenness()}")

    def _unevenness(self) -> str:
        level = next(level for level in self.levels if len(_group_sizes(level)) > 1)
        sizes = sorted(_group_sizes(level).items())
        return f"{level.name}: " + ", ".join(f"{number} of size {size}" for size, number in sizes)

    def _placement(self) -> str:
        outermost_first = sorted(range(self.size), key=lambda rank: self._coordinates[rank][::-1])
        if outermost_first == list(range(self.size)):
            return "block placement"
        level = next(level for level in self.levels if len(level.groups[0]) > 1)
        first = level.groups[0]
        shown = " ".join(str(rank) for rank in first[:8]) + (" …" if len(first) > 8 else "")
        return f"permuted placement (the first {level.name} holds ranks {shown})"


def _group_sizes(level: Level) -> Counter[int]:
    return Counter(len(group) for group in level.groups)


def _positions(level: Level, subgroup_of: Sequence[int]) -> list[int]:
    """Return, by rank, the position of its sub-group in its group."""
    positions = [0] * len(subgroup_of)
    for group in level.groups:
        # Ascending ranks meet the sub-groups in the order of their smallest rank.
        met: dict[int, int] = {}
        for rank in group:
            positions[rank] = met.setdefault(subgroup_of[rank], len(met))
    return positions


def _without(coordinates: Coordinates, level: int) -> Coordinates:
    return coordinates[:level] + coordinates[level + 1 :]


def _restrict_level(level: Level, renumbered: dict[int, int]) -> Level:
    kept = [[renumbered[rank] for rank in group if rank in renumbered] for group in level.groups]
    return Level(level.name, tuple(tuple(group) for group in kept if group))


def _level_from_json(item: object) -> Level:
    given = _checked_keys(item, {"name", "groups"}, "a level")
    return Level(given["name"], given["groups"])


def _checked_keys(value: object, expected: set[str], what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TopologyError(
            f"{what} must be an object with the keys {_listed(expected)}, got {value!r}"
        )
    if value.keys() != expected:
        raise TopologyError(
            f"{what} must have exactly the keys {_listed(expected)}, got {_listed(value)}"
        )
    return value


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
