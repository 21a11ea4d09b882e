"""All peers that are installed train a tiny model on a cluster, two steps, and agree."""

import json

import pytest

from benchmarks.peers.registry import ALONE, PEERS

pytestmark = pytest.mark.cluster

ZERO = {"zero3", "zeropp"}
# Model and batch of which a node sends megabytes, so that handshakes and acknowledgements are few.
SIZE = "--width 256 --depth 2 --tokens 32 --steps 2 --warmup 1 --rate 1gbit"


@pytest.fixture(scope="module")
def objects(launch, cluster, tmp_path_factory):
    path = tmp_path_factory.mktemp("peers") / "rows.jsonl"
    run = launch("-m", "benchmarks.peers", *SIZE.split(), "-J", path, timeout=110)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(objects):
    return {item["name"]: item for item in objects if item["kind"] == "row"}


def test_every_peer_has_a_row_or_says_why_not(objects, rows):
    absent = {item["name"] for item in objects if item["kind"] == "absent"}
    assert absent == {name for name, peer in PEERS.items() if peer.absent()}
    assert set(rows) == {ALONE.name, *PEERS} - absent
    assert set(rows) >= ZERO


def test_losses_agree_and_fall(objects, rows):
    judged = objects[-1]["losses"]
    assert {verdict["name"] for verdict in judged} == set(rows) - {ALONE.name, "fsdp2"}
    assert all(verdict["holds"] for verdict in judged)
    for name in set(rows) - {ALONE.name}:
        assert len(rows[name]["losses"]) == 3
        # Bytes are guessed at random before the first step.
        assert rows[name]["losses"][0] == pytest.approx(5.545, rel=0.1)
        assert rows[name]["losses"][2] < rows[name]["losses"][0]


def test_the_interface_carried_what_zcomm_counted_and_little_more(rows):
    for name in ZERO:
        counted, link = rows[name]["counted_bytes"], rows[name]["link_bytes"]
        assert counted <= link <= 1.1 * counted


def test_link_bytes_are_those_of_theory(rows):
    numel = 2 * (12 * 256**2 + 4 * 256) + (256 + 32) * 256 + 2 * 256
    # Half of a volume of 16 bits leaves a node of two for each gather and reduction.
    assert rows["zero3"]["counted_bytes"] == pytest.approx(3 * numel, rel=0.05)
    # Gloo's all_reduce is a ring, twice three quarters of a volume; its other collectives send
    # every shard to every rank, of which half are on the other node.
    assert rows["ddp"]["link_bytes"] == pytest.approx(3 * numel, rel=0.1)
    assert rows["fsdp2"]["link_bytes"] == pytest.approx(6 * numel, rel=0.1)
    assert rows[ALONE.name]["link_bytes"] < 0.01 * numel
    assert rows["zeropp"]["link_bytes"] < 0.3 * rows["zero3"]["link_bytes"]


def test_a_step_is_divided_whole(rows):
    for row in rows.values():
        parts = row["compute_s"], row["comm_s"], row["other_s"]
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(row["step_s"])
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["step_s"])
        assert row["peak_rss"] > 50e6
