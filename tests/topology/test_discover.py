"""Discovery: a played cluster with any placement, and the MPI that runs the tests."""

import logging
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology import Level, Topology, discover, parse
from topology.discover import contradiction

SHARED = 17


class Cluster:
    """Ranks as threads; ``nodes[rank]`` and ``hosts[rank]`` say where each one is."""

    def __init__(self, nodes, hosts=None):
        self.nodes = nodes
        self.hosts = hosts or [f"host{node}" for node in nodes]
        self.rank_of_thread = {}
        self.live_communicators = 0
        self.lock = threading.Lock()

    def run(self, function):
        """Return what ``function(comm)`` gives on every rank."""
        world = Group(self, range(len(self.nodes)))
        results = [None] * len(self.nodes)

        def work(rank):
            self.rank_of_thread[threading.get_ident()] = rank
            results[rank] = function(world.member(rank))

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.nodes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        return results

    @property
    def mpi4py(self):
        """The part of the module that discovery may use."""
        names = SimpleNamespace(
            COMM_TYPE_SHARED=SHARED,
            Get_processor_name=lambda: self.hosts[self.rank_of_thread[threading.get_ident()]],
        )
        return SimpleNamespace(MPI=names)


class Group:
    """What the members of one communicator share."""

    def __init__(self, cluster, ranks):
        self.cluster = cluster
        self.ranks = list(ranks)
        self.barrier = threading.Barrier(len(self.ranks), timeout=20)
        self.posted = {}
        self.nodes = {}

    def member(self, world_rank):
        return FakeComm(self, self.ranks.index(world_rank))

    def exchange(self, rank, value):
        self.barrier.wait()
        self.posted[rank] = value
        self.barrier.wait()
        return [self.posted[member] for member in range(len(self.ranks))]

    def node_of(self, world_rank, keys):
        """Return the group of the node, made by whoever comes first; ordered by key, as in MPI."""
        node = self.cluster.nodes[world_rank]
        with self.cluster.lock:
            if node not in self.nodes:
                members = [
                    (key, member, rank)
                    for member, (rank, key) in enumerate(zip(self.ranks, keys, strict=True))
                    if self.cluster.nodes[rank] == node
                ]
                self.nodes[node] = Group(self.cluster, [rank for _, _, rank in sorted(members)])
            return self.nodes[node]


class FakeComm:
    """The buffer calls of an mpi4py communicator; what would pickle does not exist."""

    def __init__(self, group, rank):
        self.group = group
        self.rank = rank
        with group.cluster.lock:
            group.cluster.live_communicators += 1

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return len(self.group.ranks)

    def Split_type(self, split_type, key=0):
        assert split_type == SHARED
        keys = self.group.exchange(self.rank, key)
        world_rank = self.group.ranks[self.rank]
        return self.group.node_of(world_rank, keys).member(world_rank)

    def Bcast(self, buffer, root=0):
        buffer[:] = self.group.exchange(self.rank, bytes(buffer))[root]

    def Allgather(self, send, receive):
        receive[:] = b"".join(self.group.exchange(self.rank, bytes(send)))

    def Free(self):
        with self.group.cluster.lock:
            self.group.cluster.live_communicators -= 1


def discovered(cluster, function=discover):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mpi4py", cluster.mpi4py)
        results = cluster.run(function)
    assert all(isinstance(result, Topology) for result in results)
    assert len({result.digest() for result in results}) == 1, "ranks disagree"
    assert cluster.live_communicators == len(cluster.nodes), "a communicator was not freed"
    return results[0]


def two_levels(*nodes):
    everyone = tuple(sorted(rank for node in nodes for rank in node))
    return Topology((Level("node", nodes), Level("network", (everyone,))))


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("AAAABBBB", parse("2x4")),
        ("ABABABAB", two_levels((0, 2, 4, 6), (1, 3, 5, 7))),
        ("ABCABC", two_levels((0, 3), (1, 4), (2, 5))),
        ("BBAACCDD", parse("4x2")),
        ("CABBAC", two_levels((0, 5), (1, 4), (2, 3))),
        ("AAABBBBB", parse("3+5")),
        ("ABABBBAB", two_levels((0, 2, 6), (1, 3, 4, 5, 7))),
        ("AAAA", parse("1x4")),
        ("ABCD", parse("4x1")),
        ("A", parse("1x1")),
    ],
)
def test_placements(placement, expected):
    assert discovered(Cluster(placement)) == expected


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8))
@settings(max_examples=40)
def test_any_placement(nodes):
    topology = discovered(Cluster(nodes))
    for rank, node in enumerate(nodes):
        same = tuple(other for other, place in enumerate(nodes) if place == node)
        assert topology.group(0, rank) == same
        assert topology.coordinates(rank)[0] == same.index(rank)
        assert topology.group(1, rank) == tuple(range(len(nodes)))


def test_round_robin_rails_hold_one_rank_of_each_node():
    topology = discovered(Cluster("ABCABCABC"))
    assert topology.rail(1, 4) == (3, 4, 5)
    assert topology.rail(0, 4) == (1, 4, 7)
    assert topology.ownership() == tuple(range(9))


@pytest.mark.parametrize(
    ("nodes", "hosts", "message"),
    [
        ("AABB", "aaaa", "ranks 0 and 2 are on host 'a', but do not share memory"),
        ("AAAA", "aabb", "ranks 0 and 2 share memory, but on hosts 'a', 'b'"),
    ],
)
def test_mpi_is_believed_and_a_contradiction_is_said_once(nodes, hosts, message, caplog):
    with caplog.at_level(logging.WARNING, logger="zcomm"):
        topology = discovered(Cluster(nodes, hosts))
    assert topology == discovered(Cluster(nodes))
    assert [record.getMessage() for record in caplog.records] == [
        f"{message}; nodes are as MPI says, topology= or ZCOMM_TOPOLOGY overrides"
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc")), min_size=1, max_size=7))
def test_contradiction_is_found_exactly_where_partitions_differ(ranks):
    nodes, hosts = zip(*ranks, strict=True)
    size = range(len(ranks))
    same = all((nodes[a] == nodes[b]) == (hosts[a] == hosts[b]) for a in size for b in size)
    assert (contradiction(nodes, hosts) is None) == same


def test_host_names_of_any_length_and_alphabet():
    names = ["ä" * 400, "x" * 256, "", "node-1.example"]
    assert discovered(Cluster("ABCD", names)) == parse("4x1")


@pytest.mark.mpi(min_size=1)
def test_this_job():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    topology = discover(world)
    assert {topology.digest()} == set(world.allgather(topology.digest()))
    assert (topology.size, len(topology.levels)) == (world.size, 2)
    shared = world.Split_type(MPI.COMM_TYPE_SHARED)
    assert topology.group(0, world.rank) == tuple(sorted(shared.allgather(world.rank)))
    shared.Free()


@pytest.mark.mpi(min_size=1)
def test_part_of_this_job_in_another_order():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    reverse = world.Split(color=world.rank % 2, key=-world.rank)
    topology = discover(reverse)
    kept = reverse.allgather(world.rank)
    assert kept == sorted(kept, reverse=True)
    assert topology == discover(world).restrict(kept)
    reverse.Free()


PROGRAM = """
from mpi4py import MPI
import topology
world = MPI.COMM_WORLD
found = world.gather(topology.discover(world).to_json())
if world.rank == 0:
    print(*sorted(set(found)), sep="\\n")
"""


@pytest.mark.parametrize(
    ("variable", "num_ranks", "expected"),
    [
        ("MPIR_CVAR_ODD_EVEN_CLIQUES", 4, two_levels((0, 2), (1, 3))),
        ("MPIR_CVAR_ODD_EVEN_CLIQUES", 3, two_levels((0, 2), (1,))),
        ("MPIR_CVAR_NOLOCAL", 2, parse("2x1")),
    ],
)
def test_nodes_that_mpich_plays(launch, mpi_vendor, variable, num_ranks, expected):
    if mpi_vendor != "MPICH":
        pytest.skip(f"{mpi_vendor} cannot play several nodes on one; tests/cluster does")
    child = launch("-c", PROGRAM, num_ranks=num_ranks, env={variable: "1"})
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == [expected.to_json()]
    assert "do not share memory; nodes are as MPI says" in child.stderr
