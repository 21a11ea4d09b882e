"""Topologies against their definition, for random nested groups and for every size up to 64."""

import dataclasses
import hashlib
import pickle
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.topology import oracle
from topology import Level, Topology, TopologyError, flat, from_shape, parse

UP_TO_64 = range(1, 65)


def build(levels):
    return Topology(tuple(Level(f"level {k}", groups) for k, groups in enumerate(levels)))


@given(oracle.nested())
def test_groups_coordinates_and_distances_are_as_defined(levels):
    topology = build(levels)
    size = len(oracle.ranks(levels))
    assert topology.size == size
    assert topology.uniform == oracle.uniform(levels)
    for rank in range(size):
        assert topology.coordinates(rank) == oracle.coordinates(levels, rank)
        for level in range(len(levels)):
            assert topology.group(level, rank) == tuple(sorted(oracle.group(levels, level, rank)))
    for a, b in product(range(size), repeat=2):
        assert topology.distance(a, b) == oracle.distance(levels, a, b)


@given(oracle.nested())
def test_coordinates_tell_ranks_apart_whatever_the_groups(levels):
    topology = build(levels)
    assert len({topology.coordinates(rank) for rank in range(topology.size)}) == topology.size


@given(oracle.nested_uniform(max_size=32))
def test_rails_and_shape_are_as_defined(levels):
    topology = build(levels)
    assert topology.shape == oracle.shape(levels)
    for rank, level in product(range(topology.size), range(len(levels))):
        assert topology.rail(level, rank) == oracle.rail(levels, level, rank)
        assert topology.rail(level, rank)[topology.coordinates(rank)[level]] == rank


@given(oracle.nested_uniform())
def test_the_innermost_coordinate_is_the_most_significant_of_ownership(levels):
    topology = build(levels)
    extents = oracle.shape(levels)
    for shard, rank in enumerate(topology.ownership()):
        assert shard == oracle.shard_of(extents, oracle.coordinates(levels, rank))


@given(oracle.nested())
def test_ownership_without_a_grid_is_ascending(levels):
    assume(not oracle.uniform(levels))
    assert build(levels).ownership() == tuple(range(len(oracle.ranks(levels))))


@pytest.mark.parametrize("size", UP_TO_64)
def test_block_placement_of_every_grid(size):
    for num_nodes, num_local in oracle.factorisations(size, 2):
        topology = parse(f"{num_nodes}x{num_local}", size)
        for rank in range(size):
            node, local = divmod(rank, num_local)
            assert topology.coordinates(rank) == (local, node)
            first = node * num_local
            assert topology.group(0, rank) == tuple(range(first, first + num_local))
            assert topology.rail(1, rank) == tuple(range(local, size, num_local))
            assert topology.rail(0, rank) == topology.group(0, rank)
            assert topology.ownership()[local * num_nodes + node] == rank
            assert topology.distance(0, rank) == (0 if node == 0 else 1)


@pytest.mark.parametrize("size", UP_TO_64)
def test_round_robin_placement_of_every_grid(size):
    for num_nodes, _ in oracle.factorisations(size, 2):
        nodes = tuple(tuple(range(node, size, num_nodes)) for node in range(num_nodes))
        topology = Topology((Level("node", nodes), Level("network", (tuple(range(size)),))))
        for rank in range(size):
            local, node = divmod(rank, num_nodes)
            assert topology.coordinates(rank) == (local, node)
            first = local * num_nodes
            assert topology.rail(1, rank) == tuple(range(first, first + num_nodes))
        # Round-robin ranks meet the owners' order: shard l·n + k is rank l·n + k.
        assert topology.ownership() == tuple(range(size))


@pytest.mark.parametrize("size", UP_TO_64)
def test_three_levels_of_every_size(size):
    for num_nodes, num_domains, num_local in oracle.factorisations(size, 3):
        topology = parse(f"{num_nodes}x{num_domains}x{num_local}", size)
        assert topology.shape == (num_local, num_domains, num_nodes)
        for rank in {0, size // 3, size // 2, size - 1}:
            local, domain, node = topology.coordinates(rank)
            assert rank == (node * num_domains + domain) * num_local + local
            shard = (local * num_domains + domain) * num_nodes + node
            assert topology.ownership()[shard] == rank


@pytest.mark.parametrize("size", UP_TO_64)
def test_one_level_of_every_size(size):
    topology = flat(size)
    ranks = tuple(range(size))
    assert topology.levels == (Level("node", (ranks,)),)
    assert (topology.shape, topology.ownership()) == ((size,), ranks)
    assert all(topology.rail(0, rank) == topology.group(0, rank) == ranks for rank in ranks)


@given(oracle.nested(max_size=12), st.data())
def test_restrict_keeps_who_shares_a_group_at_every_level(levels, data):
    topology = build(levels)
    everyone = data.draw(st.permutations(range(topology.size)))
    kept = everyone[: data.draw(st.integers(1, topology.size))]
    part = topology.restrict(kept)
    assert part.size == len(kept)
    assert [level.name for level in part.levels] == [level.name for level in topology.levels]
    for level, (new, old) in product(range(len(levels)), enumerate(kept)):
        expected = oracle.group(levels, level, old)
        assert {kept[member] for member in part.group(level, new)} == expected & set(kept)
        assert new in part.group(level, new)


@given(oracle.nested(max_size=12), st.data())
def test_restrict_keeps_distances_so_level_indices_keep_their_meaning(levels, data):
    topology = build(levels)
    everyone = data.draw(st.permutations(range(topology.size)))
    kept = everyone[: data.draw(st.integers(1, topology.size))]
    part = topology.restrict(kept)
    for (a, old_a), (b, old_b) in product(enumerate(kept), repeat=2):
        assert part.distance(a, b) == topology.distance(old_a, old_b)


@given(oracle.nested(max_size=12), st.data())
def test_restrict_to_all_ranks_and_twice(levels, data):
    topology = build(levels)
    assert topology.restrict(range(topology.size)) == topology
    first = data.draw(st.permutations(range(topology.size)))
    second = data.draw(st.permutations(range(topology.size)))
    composed = [first[rank] for rank in second]
    assert topology.restrict(first).restrict(second) == topology.restrict(composed)


def test_restrict_to_a_rail_leaves_groups_of_one_rank_and_the_network():
    rail = parse("3x4").restrict((1, 5, 9))
    assert rail.levels == (Level("node", ((0,), (1,), (2,))), Level("network", ((0, 1, 2),)))
    assert rail.shape == (1, 3)


def test_restrict_to_a_node_leaves_a_network_that_it_has_to_itself():
    node = parse("3x4").restrict((4, 5, 6, 7))
    ranks = (0, 1, 2, 3)
    assert node.levels == (Level("node", (ranks,)), Level("network", (ranks,)))
    assert node.shape == (4, 1)


def test_uneven_nodes_have_coordinates_but_no_grid():
    topology = parse("3+5")
    assert not topology.uniform
    assert topology.coordinates(2) == (2, 0)
    assert topology.coordinates(7) == (4, 1)
    assert topology.distance(2, 3) == 1
    assert topology.ownership() == tuple(range(8))
    for question in (lambda: topology.shape, lambda: topology.rail(0, 0)):
        with pytest.raises(TopologyError, match=r"equal size, not node: 1 of size 3, 1 of size 5"):
            question()


def test_equal_nodes_with_uneven_domains_are_not_uniform():
    domains = ((0,), (1, 2, 3), (4, 5), (6, 7))
    nodes = ((0, 1, 2, 3), (4, 5, 6, 7))
    topology = build([domains, nodes, [range(8)]])
    assert not topology.uniform
    assert topology.coordinates(3) == (2, 1, 0)


@given(oracle.nested())
def test_json_round_trip(levels):
    topology = build(levels)
    again = Topology.from_json(topology.to_json())
    assert again == topology
    assert (again.to_json(), again.digest()) == (topology.to_json(), topology.digest())


def test_canonical_json_and_digest_are_pinned():
    text = (
        '{"levels":[{"groups":[[0,1],[2,3]],"name":"node"},'
        '{"groups":[[0,1,2,3]],"name":"network"}],"schema":"zcomm.topology/1"}'
    )
    assert parse("2x2").to_json() == text
    assert parse("2x2").digest() == hashlib.sha256(text.encode()).hexdigest()


@given(oracle.nested(), st.data())
def test_order_of_ranks_and_groups_means_nothing(levels, data):
    shuffled = [
        data.draw(st.permutations([data.draw(st.permutations(members)) for members in partition]))
        for partition in levels
    ]
    assert build(shuffled) == build(levels)
    assert build(shuffled).digest() == build(levels).digest()


@given(oracle.nested(max_size=6), oracle.nested(max_size=6))
def test_digests_are_equal_only_for_the_same_partitions(one, other):
    def canonical(levels):
        return [{frozenset(members) for members in partition} for partition in levels]

    same = canonical(one) == canonical(other)
    assert (build(one).digest() == build(other).digest()) == same
    assert (build(one) == build(other)) == same


def test_names_are_part_of_the_digest():
    ranks = ((0, 1),)
    assert Topology((Level("node", ranks),)).digest() != Topology((Level("rack", ranks),)).digest()


def test_a_topology_cannot_be_changed_and_can_be_a_key_or_sent():
    topology = parse("2x2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology.levels = ()
    assert {topology: 1}[parse("2x2")] == 1
    topology.rail(0, 0)
    assert pickle.loads(pickle.dumps(topology)) == topology


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (flat(1), "1 rank = 1 (node), block placement"),
        (parse("2x4"), "8 ranks = 2 x 4 (network x node), block placement"),
        (parse("2x2x2"), "8 ranks = 2 x 2 x 2 (network x node x domain), block placement"),
        (
            build([[(0, 2), (1, 3)], [range(4)]]),
            "4 ranks = 2 x 2 (level 1 x level 0), "
            "permuted placement (the first level 0 holds ranks 0 2)",
        ),
        (
            build([[range(0, 20, 2), range(1, 20, 2)], [range(20)]]),
            "20 ranks = 2 x 10 (level 1 x level 0), "
            "permuted placement (the first level 0 holds ranks 0 2 4 6 8 10 12 14 …)",
        ),
        (
            parse("3+5+5"),
            "13 ranks, not uniform (node: 1 of size 3, 2 of size 5): flat algorithms only",
        ),
    ],
)
def test_describe(topology, text):
    assert topology.describe() == text


def test_a_thousand_ranks():
    topology = from_shape((8, 4, 32))
    assert topology.size == 1024
    for rank in range(1024):
        local, domain, node = rank % 8, rank // 8 % 4, rank // 32
        assert topology.coordinates(rank) == (local, domain, node)
        assert topology.rail(2, rank) == tuple(range(rank % 32, 1024, 32))
        assert topology.ownership()[(local * 4 + domain) * 32 + node] == rank
    assert topology.rail(2, 5) is topology.rail(2, 37), "members of a rail share one tuple"
