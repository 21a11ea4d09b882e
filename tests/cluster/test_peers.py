"""All peers that are installed train a tiny model on a cluster, two steps, and agree."""

import json
import statistics

import pytest
import torch

from benchmarks.peers import driver
from benchmarks.peers.options import parse
from benchmarks.peers.rank import BATCHES, read_batches
from benchmarks.peers.registry import ALONE, PEERS, ZEROPP
from benchmarks.peers.results import EXACT_BOUND, QUANTISED_BOUND
from benchmarks.training.model import GPT

# Seven launches of torch, 10 to 20 s each where another test runs beside.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ZERO = {"zero3", "zeropp"}
# Model and batch of which a node sends megabytes, so that handshakes and acknowledgements are few.
SIZE = "--width 256 --depth 2 --tokens 32 --steps 2 --warmup 1 --rate 1gbit"


@pytest.fixture(scope="module")
def objects(launch, cluster, tmp_path_factory):
    path = tmp_path_factory.mktemp("peers") / "rows.jsonl"
    run = launch("-m", "benchmarks.peers", *SIZE.split(), "-J", path, timeout=280)
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


@pytest.fixture(scope="module")
def first_loss(tmp_path_factory):
    """Return the loss before the first step, by one process: the mean over the ranks' batches."""
    options, folder = parse(SIZE.split()), tmp_path_factory.mktemp("batches")
    driver.prepare(options, folder)
    model = GPT(options.job.shape, options.job.seed).to(torch.bfloat16)
    num_ranks = options.num_ranks
    batches = [read_batches(folder / BATCHES, rank, num_ranks)[0] for rank in range(num_ranks)]
    with torch.no_grad():
        return statistics.fmean(model(batch.inputs, batch.targets).item() for batch in batches)


def test_losses_agree_and_fall(objects, rows, first_loss):
    judged = objects[-1]["losses"]
    assert {verdict["name"] for verdict in judged} == set(rows) - {ALONE.name, "fsdp2"}
    assert all(verdict["holds"] for verdict in judged)
    for name in set(rows) - {ALONE.name}:
        assert len(rows[name]["losses"]) == 3
        bound = QUANTISED_BOUND if name == ZEROPP.name else EXACT_BOUND
        assert rows[name]["losses"][0] == pytest.approx(first_loss, rel=bound)
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
    # every shard to every rank, of which half are on the other node. FSDP2 keeps the root's own few
    # parameters after forward.
    for name, volumes in (("ddp", 3), ("fsdp2", 6)):
        assert 0.99 * volumes * numel <= rows[name]["link_bytes"] <= 1.1 * volumes * numel
    assert rows[ALONE.name]["link_bytes"] < 0.01 * numel
    assert rows["zeropp"]["link_bytes"] < 0.3 * rows["zero3"]["link_bytes"]


def test_a_step_is_divided_whole(rows):
    for row in rows.values():
        parts = row["compute_s"], row["comm_s"], row["other_s"]
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(row["step_s"])
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["step_s"])
        assert row["peak_rss"] > 50e6
