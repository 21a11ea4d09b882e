"""Partitions of a graph of links: what is connected, and what is really all-to-all.

Blink (Wang et al., MLSys 2020) shows that what a job gets of a cube mesh or of bridged pairs is
seldom all-to-all, and that rings over it fall back to PCIe. So the innermost level of a topology is
an **island**, a set of GPUs of which each has a direct link to each other.

Graphs are ``{vertex: {neighbour: number of links}}``, symmetric. Do not assume that islands are the
best partition of a large irregular graph: the search for equal ones is given up after ``BUDGET``
steps.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations

Weights = dict[int, dict[int, int]]
Partition = tuple[tuple[int, ...], ...]

BUDGET = 20_000


def connected(graph: Mapping[int, Mapping[int, int]]) -> Partition:
    """Return the connected components, vertices ascending, ordered by the smallest."""
    seen: set[int] = set()
    found = []
    for start in sorted(graph):
        if start in seen:
            continue
        component, waiting = {start}, [start]
        while waiting:
            new = set(graph[waiting.pop()]) - component
            component |= new
            waiting.extend(new)
        seen |= component
        found.append(tuple(sorted(component)))
    return tuple(found)


def all_to_all(graph: Mapping[int, Mapping[int, int]]) -> Partition:
    """Return a partition into sets of which every two members are linked.

    1. A component that is all-to-all is one island.
    2. Another is cut into equal islands, as large as possible, and of those cuts into the one that
       keeps the most links inside.
    3. Where no equal ones exist, the largest that is found is taken away, and so on.
    """
    islands: list[tuple[int, ...]] = []
    for component in connected(graph):
        islands += _cut(graph, component)
    return tuple(sorted(islands))


def _cut(
    graph: Mapping[int, Mapping[int, int]], component: tuple[int, ...]
) -> list[tuple[int, ...]]:
    if all(len(graph[vertex]) == len(component) - 1 for vertex in component):
        return [component]
    steps = iter(range(BUDGET))
    for size in range(len(component) // 2, 1, -1):
        if len(component) % size == 0:
            covers = list(_covers(graph, frozenset(component), size, steps))
            if covers:
                return max(covers, key=lambda cover: sum(_inside(graph, group) for group in cover))
    return _greedy(graph, component)


def _covers(
    graph: Mapping[int, Mapping[int, int]],
    left: frozenset[int],
    size: int,
    steps: Iterator[int],
) -> Iterator[list[tuple[int, ...]]]:
    """Yield the partitions of ``left`` into islands of one size, until the steps are used up."""
    if not left:
        yield []
        return
    first = min(left)
    for others in combinations(sorted(left & set(graph[first])), size - 1):
        if next(steps, None) is None:
            return
        if all(b in graph[a] for a, b in combinations(others, 2)):
            for rest in _covers(graph, left - {first, *others}, size, steps):
                yield [(first, *others), *rest]


def _greedy(
    graph: Mapping[int, Mapping[int, int]], component: tuple[int, ...]
) -> list[tuple[int, ...]]:
    left, found = set(component), []
    while left:
        grown = [_grow(graph, seed, left) for seed in sorted(left)]
        best = max(grown, key=lambda group: (len(group), _inside(graph, group)))
        found.append(tuple(sorted(best)))
        left -= set(best)
    return found


def _grow(
    graph: Mapping[int, Mapping[int, int]], seed: int, left: Collection[int]
) -> tuple[int, ...]:
    """Add to a seed, as long as possible, the vertex with the most neighbours that still fit."""
    group = [seed]
    fitting = set(graph[seed]) & set(left)
    while fitting:
        chosen = max(
            sorted(fitting),
            key=lambda v: (len(fitting & set(graph[v])), sum(graph[v][u] for u in group)),
        )
        group.append(chosen)
        fitting &= set(graph[chosen])
    return tuple(group)


def _inside(graph: Mapping[int, Mapping[int, int]], group: Collection[int]) -> int:
    return sum(graph[a][b] for a, b in combinations(group, 2) if b in graph[a])
