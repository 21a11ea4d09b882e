"""The emulated cluster is one: links have the rate, nodes share no memory, ranks are where told."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

PROGRAMS = Path(__file__).parent / "programs"
TRIES = 3


def lines_of(run):
    assert run.returncode == 0, run.stderr
    return sorted(line for line in run.stdout.splitlines() if not line.startswith("#"))


def counters_of(run):
    found = re.findall(r"# link of node\d: (\d+) bytes left, (\d+) bytes entered", run.stdout)
    return [(int(left), int(entered)) for left, entered in found]


def received(cluster, bits):
    """Return what two nodes received from each other, per second and as parts of the rate."""
    flags = f"--nodes 2 --ranks-per-node 1 --rate {bits}bit --torch"
    lines = lines_of(cluster(flags, PROGRAMS / "rate.py", str(bits)))
    assert [line.split()[:2] for line in lines] == [["0", "node0"], ["1", "node1"]]
    return [float(line.split()[2]) / bits for line in lines]


def holds(parts):
    """Return whether the rate is held; more than it can never be, less if the machine is busy."""
    assert max(parts) < 1.1
    return min(parts) > 0.9


@pytest.mark.parametrize("bits", [200e6, 1e9])
def test_rate_holds_both_ways_at_once(cluster, bits):
    assert any(holds(received(cluster, int(bits))) for _ in range(TRIES))


def test_several_senders_share_the_link_of_one_receiver(cluster):
    bits = 200_000_000
    flags = f"--nodes 3 --ranks-per-node 1 --rate {bits}bit --torch --counters"
    for _ in range(TRIES):
        run = cluster(flags, PROGRAMS / "incast.py", str(bits // 2))
        (line,) = lines_of(run)
        expected = bits / 2 / 8
        (_, entered), *senders = counters_of(run)
        assert [entered, *(left for left, _ in senders)] == [
            pytest.approx(nbytes, rel=0.05) for nbytes in (2 * expected, expected, expected)
        ]
        if holds([float(line) / bits]):
            return
    pytest.fail(line)


def test_two_clusters_at_once_have_their_own_links(cluster):
    rates = [200_000_000, 300_000_000]
    with ThreadPoolExecutor() as pool:
        for _ in range(TRIES):
            both = list(pool.map(lambda bits: received(cluster, bits), rates))
            if all(holds(parts) for parts in both):
                return
    pytest.fail(f"rates are not held: {both}")


def test_measure_agrees_with_the_rate(cluster):
    for _ in range(TRIES):
        run = cluster("--measure --rate 200mbit --torch", "-c", "pass")
        (line,) = (line for line in run.stdout.splitlines() if "link measured" in line)
        rates = [float(text) for text in re.findall(r"\d\.\d+", line)]
        assert len(rates) == 3
        if holds([rate / 0.2 for rate in rates]):
            return
    pytest.fail(line)


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 2), (4, 1), (3, 1)])
def test_ranks_share_memory_inside_a_node_only(cluster, num_nodes, ranks_per_node):
    flags = f"--nodes {num_nodes} --ranks-per-node {ranks_per_node}"
    lines = lines_of(cluster(flags, PROGRAMS / "placement.py"))
    seen = sorted((json.loads(line) for line in lines), key=lambda rank: rank["rank"])
    ranks = range(num_nodes * ranks_per_node)
    nodes = [list(ranks[first : first + ranks_per_node]) for first in ranks[::ranks_per_node]]
    for rank, own in zip(ranks, (node for node in nodes for _ in node), strict=True):
        assert seen[rank]["host"] == f"node{rank // ranks_per_node}"
        assert seen[rank]["together"] == own
        assert seen[rank]["window"] == own[0]
        assert seen[rank]["files"] == [f"written-by-{other}" for other in own]
        assert seen[rank]["levels"] == [nodes, [list(ranks)]]
    assert len({rank["ipc"] for rank in seen}) == num_nodes


def test_counters_agree_with_what_zcomm_says_to_have_sent(cluster):
    run = cluster("--measure --counters --rate 1gbit", PROGRAMS / "traffic.py")
    sent = [int(line.split()[1]) for line in lines_of(run)]
    (left0, entered0), (left1, entered1) = counters_of(run)
    assert left0 == pytest.approx(sent[0] + sent[1], rel=0.05)
    assert left1 == pytest.approx(sent[2] + sent[3], rel=0.05)
    assert (entered0, entered1) == (pytest.approx(left1, rel=0.01), pytest.approx(left0, rel=0.01))


def test_gloo_runs_across_the_links(cluster):
    run = cluster("--torch --counters --rate 1gbit", PROGRAMS / "gloo.py")
    expected = [f"{rank} [10.0] node{rank // 2} {rank % 2} of 2 cubic" for rank in range(4)]
    assert lines_of(run) == expected
    # A node of two cannot know the sum of 4 MiB with less than that from the other.
    assert min(min(both) for both in counters_of(run)) > 4 * 2**20


@pytest.mark.parametrize(("flags", "packet"), [("", 16384), ("--cpu-bound", 65536)])
def test_packets_are_as_large_as_said(cluster, flags, packet):
    show = "import subprocess; subprocess.run('ip -details -json link show eth0'.split())"
    run = cluster(f"--ranks-per-node 1 --torch {flags}", "-c", show)
    for line in lines_of(run):
        (shown,) = json.loads(line)
        assert shown["gso_max_size"] == packet
    assert f"packets of up to {packet} bytes" in run.stdout


def test_versions_and_link_are_printed(cluster):
    run = cluster("--rate 1gbit --cpu-bound", "-c", "pass")
    assert "2 nodes x 2 ranks" in run.stdout
    assert "1000 Mbit/s each way, credit 131072 bytes, 1.05 ms" in run.stdout
    found = re.search(
        r"# versions: Linux (\S+), iproute2 (\S+), Python (\S+), MPICH (\S+)", run.stdout
    )
    assert found[1] == Path("/proc/sys/kernel/osrelease").read_text().strip()
    assert found[2] in subprocess.run(["ip", "-V"], capture_output=True, text=True).stdout
    assert found[3] == sys.version.split()[0]
