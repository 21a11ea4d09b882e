"""What makes levels a topology: each a partition of the same ranks, nested, the last one group.

Every message holds the numbers that do not fit. Nothing here knows ``Topology``: the functions see
names and groups only, as they were given.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from topology.errors import TopologyError

Groups = tuple[tuple[int, ...], ...]


def canonical_groups(name: object, groups: object) -> Groups:
    """Return the groups with ranks ascending and ordered by smallest rank.

    Raises:
        TopologyError: a name that is no text, no group, an empty group, or a rank that is not a
            whole number.
    """
    if not isinstance(name, str) or not name:
        raise TopologyError(f"a level's name must be a non-empty text, got {name!r}")
    given = elements(groups, f"the groups of level {name!r}")
    canonical = tuple(sorted(_canonical_group(group, name) for group in given))
    if not canonical or not canonical[0]:
        raise TopologyError(f"level {name!r} must have at least one group, and no empty one")
    return canonical


def check_levels(names: Sequence[str], partitions: Sequence[Groups]) -> None:
    """Check canonical groups of all levels, from the inside out.

    Raises:
        TopologyError: as the module says.
    """
    if not names:
        raise TopologyError("a topology needs at least one level, got none")
    if len(set(names)) != len(names):
        raise TopologyError(f"levels need different names, got {', '.join(names)}")
    if len(partitions[-1]) != 1:
        raise TopologyError(
            f"the last level must be one group of all ranks, "
            f"but {names[-1]!r} has {len(partitions[-1])} groups"
        )
    size = max(group[-1] for groups in partitions for group in groups) + 1
    for name, groups in zip(names, partitions, strict=True):
        _check_partition(name, groups, size)
    for level in range(len(names) - 1):
        _check_nesting(names[level : level + 2], partitions[level], partitions[level + 1])


def elements(value: object, what: str) -> list[Any]:
    """Return the elements of a list or another iterable; a text is not one."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TopologyError(f"{what} must be a list, got {value!r}")
    return list(value)


def _canonical_group(group: object, name: str) -> tuple[int, ...]:
    ranks = elements(group, f"a group of level {name!r}")
    try:
        return tuple(sorted(operator.index(rank) for rank in ranks))
    except TypeError:
        raise TopologyError(
            f"a group of level {name!r} must hold ranks (whole numbers), got {ranks}"
        ) from None


def _check_partition(name: str, groups: Groups, size: int) -> None:
    counts = Counter(rank for group in groups for rank in group)
    problem = _misplaced(counts, size)
    if problem:
        sizes = " + ".join(str(len(group)) for group in groups[:8])
        more = " + …" if len(groups) > 8 else ""
        raise TopologyError(
            f"level {name!r} must hold every rank from 0 to {size - 1} once, but rank {problem} "
            f"(its groups hold {sizes}{more} = {counts.total()} ranks, {size} are expected)"
        )


def _misplaced(counts: Counter[int], size: int) -> str | None:
    if min(counts) < 0:
        return f"{min(counts)} is below zero"
    repeated = min((rank for rank in counts if counts[rank] > 1), default=None)
    if repeated is not None:
        return f"{repeated} is there {counts[repeated]} times"
    if len(counts) < size:
        return f"{next(rank for rank in range(size) if rank not in counts)} is missing"
    return None


def _check_nesting(names: Sequence[str], inner: Groups, outer: Groups) -> None:
    home = {rank: index for index, group in enumerate(outer) for rank in group}
    for group in inner:
        astray = next((rank for rank in group if home[rank] != home[group[0]]), None)
        if astray is not None:
            raise TopologyError(
                f"levels must nest: ranks {group[0]} and {astray} share a group of level "
                f"{names[0]!r}, but not of the next level, {names[1]!r}"
            )
