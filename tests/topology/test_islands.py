"""Partitions of graphs: every two of an island are linked, and no equal cut has larger islands."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.topology.nvml_double import CUBE
from topology.islands import all_to_all, connected


def graph_of(size, edges):
    graph = {vertex: {} for vertex in range(size)}
    for (a, b), links in edges.items():
        graph[a][b] = graph[b][a] = links
    return graph


@st.composite
def graphs(draw):
    size = draw(st.integers(1, 8))
    pairs = list(combinations(range(size), 2))
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return graph_of(size, {pair: draw(st.integers(1, 4)) for pair in chosen})


def partitions(items, size):
    """Yield all cuts into sets of one size, by brute force."""
    if not items:
        yield ()
        return
    for others in combinations(items[1:], size - 1):
        rest = [item for item in items[1:] if item not in others]
        for more in partitions(rest, size):
            yield ((items[0], *others), *more)


def is_island(graph, group):
    return all(b in graph[a] for a, b in combinations(group, 2))


def links_inside(graph, cut):
    return sum(graph[a][b] for group in cut for a, b in combinations(group, 2))


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_islands_are_the_best_equal_cut(graph):
    islands = all_to_all(graph)
    assert sorted(vertex for island in islands for vertex in island) == sorted(graph)
    assert all(is_island(graph, island) for island in islands)
    for component in connected(graph):
        found = [island for island in islands if set(island) <= set(component)]
        assert sum(map(len, found)) == len(component)
        sizes = [size for size in range(len(component), 1, -1) if len(component) % size == 0]
        for size in sizes:
            cuts = [
                cut
                for cut in partitions(list(component), size)
                if all(is_island(graph, group) for group in cut)
            ]
            if cuts:
                assert {len(island) for island in found} == {size}
                assert links_inside(graph, found) == max(links_inside(graph, cut) for cut in cuts)
                break


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (range(8), ((0, 1, 2, 3), (4, 5, 6, 7))),
        ((0, 1, 2, 3), ((0, 1, 2, 3),)),
        ((0, 1, 4, 5), ((0, 4), (1, 5))),
        ((0, 5), ((0,), (5,))),
        ((0, 1, 2), ((0, 1, 2),)),
        ((0, 3, 4), ((0, 3), (4,))),
    ],
)
def test_parts_of_a_cube_mesh(gpus, expected):
    graph = {a: {b: n for b, n in CUBE[a].items() if b in gpus} for a in gpus}
    assert all_to_all(graph) == expected


def test_a_large_irregular_graph_ends():
    """The search for equal islands is given up, and what is found are still islands."""
    edges = {(a, b): 1 for a, b in combinations(range(48), 2) if (a * 7 + b * 11) % 5}
    graph = graph_of(48, edges)
    islands = all_to_all(graph)
    assert sorted(vertex for island in islands for vertex in island) == list(range(48))
    assert all(is_island(graph, island) for island in islands)
