"""What people write, read outermost first."""

from itertools import accumulate
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topology import oracle
from topology import Level, Topology, from_shape, parse
from topology.spec import level_names

extents = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(extents)
def test_a_product_is_read_outermost_first(outermost_first):
    topology = parse("x".join(map(str, outermost_first)), prod(outermost_first))
    assert topology.shape == tuple(reversed(outermost_first))
    for rank in range(topology.size):
        position, rest = [], rank
        for extent in reversed(outermost_first):
            rest, coordinate = divmod(rest, extent)
            position.append(coordinate)
        assert topology.coordinates(rank) == tuple(position)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_a_sum_lists_the_nodes(sizes):
    topology = parse("+".join(map(str, sizes)), sum(sizes))
    ends = list(accumulate(sizes))
    nodes = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
    network = (tuple(range(sum(sizes))),)
    assert topology.levels == (Level("node", nodes), Level("network", network))
    assert topology.uniform == (len(set(sizes)) == 1)


@pytest.mark.parametrize("text", ["2x4", " 2x4 ", "2 x 4", "2X4", "02x4", "4+4"])
def test_ways_to_write_the_same(text):
    assert parse(text, 8) == from_shape((4, 2))


def test_names_of_levels():
    assert level_names(1) == ("node",)
    assert level_names(2) == ("node", "network")
    assert level_names(3) == ("domain", "node", "network")
    assert level_names(5) == ("level0", "level1", "domain", "node", "network")
    for num_levels in range(1, 5):
        topology = parse("x".join("2" * num_levels))
        assert tuple(level.name for level in topology.levels) == level_names(num_levels)


def test_a_topology_is_returned_as_it_is():
    topology = parse("2x4")
    assert parse(topology, 8) is topology
    assert parse(topology, None) is topology


@given(oracle.nested(max_size=9))
def test_files(tmp_path_factory, levels):
    topology = Topology(tuple(Level(f"L{k}", groups) for k, groups in enumerate(levels)))
    path = tmp_path_factory.mktemp("topology") / "job.json"
    path.write_text(topology.to_json())
    assert parse(path, topology.size) == parse(str(path)) == topology


def test_a_file_written_by_hand(tmp_path, monkeypatch):
    text = """{
        "levels": [
            {"name": "node", "groups": [[3, 1], [2, 0]]},
            {"name": "network", "groups": [[0, 1, 2, 3]]}
        ],
        "schema": "zcomm.topology/1"
    }"""
    (tmp_path / "2x2").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert parse("./2x2", 4).group(0, 0) == (0, 2)
    assert parse("2x2", 4).group(0, 0) == (0, 1), "a shape is never taken for a file"


def test_import_brings_no_heavy_package(launch):
    heavy = "{'torch', 'cupy', 'mpi4py', 'numpy', 'zcomm', 'zero'}"
    child = launch("-c", f"import sys, topology; print({heavy} & set(sys.modules))")
    assert child.stdout == "set()\n"
