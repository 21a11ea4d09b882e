"""The topology's words by definition, slowly, from nested lists of ranks; and random nested lists.

``levels`` is a list from the inside out of partitions; nothing here uses the package under test.
"""

from itertools import product
from math import prod
from typing import Any

from hypothesis import strategies as st

Partition = list[list[int]]


def ranks(levels: list[Partition]) -> list[int]:
    return [rank for members in levels[0] for rank in members]


def group(levels: list[Partition], level: int, rank: int) -> set[int]:
    return next(set(members) for members in levels[level] if rank in members)


def coordinates(levels: list[Partition], rank: int) -> tuple[int, ...]:
    finest = [[member] for member in ranks(levels)]
    result = []
    for inner, outer in zip([finest, *levels], levels, strict=False):
        mine = next(set(members) for members in outer if rank in members)
        siblings = sorted(min(members) for members in inner if set(members) <= mine)
        result.append(siblings.index(min(next(members for members in inner if rank in members))))
    return tuple(result)


def uniform(levels: list[Partition]) -> bool:
    return all(len({len(members) for members in partition}) == 1 for partition in levels)


def distance(levels: list[Partition], a: int, b: int) -> int:
    shared = [any({a, b} <= set(members) for members in partition) for partition in levels]
    return shared.index(True)


def rail(levels: list[Partition], level: int, rank: int) -> tuple[int, ...]:
    mine = coordinates(levels, rank)
    found = {}
    for other in ranks(levels):
        theirs = coordinates(levels, other)
        if all(theirs[k] == mine[k] for k in range(len(levels)) if k != level):
            found[theirs[level]] = other
    return tuple(found[position] for position in sorted(found))


def shape(levels: list[Partition]) -> tuple[int, ...]:
    """Count the different values of each coordinate."""
    columns = zip(*(coordinates(levels, rank) for rank in ranks(levels)), strict=True)
    return tuple(len(set(column)) for column in columns)


def shard_of(extents: tuple[int, ...], position: tuple[int, ...]) -> int:
    """Number a rank of the grid ``extents``: the first coordinate is worth the most."""
    return sum(position[k] * prod(extents[k + 1 :]) for k in range(len(extents)))


@st.composite
def nested(draw: Any, max_size: int = 24, max_levels: int = 4) -> list[Partition]:
    """Draw levels whose groups have any sizes and hold any ranks."""
    size = draw(st.integers(1, max_size))
    levels = [[draw(st.permutations(range(size)))]]
    for _ in range(draw(st.integers(0, max_levels - 1))):
        levels.insert(0, [part for members in levels[0] for part in draw(_cut(members))])
    return [draw(st.permutations(partition)) for partition in levels]


@st.composite
def nested_uniform(draw: Any, max_size: int = 64, max_levels: int = 4) -> list[Partition]:
    """Draw levels of equal groups, ranks placed anywhere."""
    extents = draw(
        st.lists(st.integers(1, 8), min_size=1, max_size=max_levels).filter(
            lambda extents: prod(extents) <= max_size
        )
    )
    placed = draw(st.permutations(range(prod(extents))))
    levels = []
    for level in range(len(extents)):
        step = prod(extents[: level + 1])
        levels.append([placed[start : start + step] for start in range(0, len(placed), step)])
    return [draw(st.permutations(partition)) for partition in levels]


@st.composite
def _cut(draw: Any, members: list[int]) -> Partition:
    marks = draw(st.lists(st.booleans(), min_size=len(members) - 1, max_size=len(members) - 1))
    parts = [[members[0]]]
    for member, starts in zip(members[1:], marks, strict=True):
        if starts:
            parts.append([member])
        else:
            parts[-1].append(member)
    return parts


def factorisations(size: int, num_factors: int) -> list[tuple[int, ...]]:
    """Return all ordered ways to write ``size`` as a product of ``num_factors`` numbers."""
    divisors = [number for number in range(1, size + 1) if size % number == 0]
    heads = product(divisors, repeat=num_factors - 1)
    return [(*head, size // prod(head)) for head in heads if size % prod(head) == 0]
