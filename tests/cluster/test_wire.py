"""benchmarks.wire and benchmarks.overlap where they belong: between nodes, beside their peers."""

import json

import pytest

pytestmark = pytest.mark.cluster

PLACE = "--nodes 2 --ranks-per-node 2 --rate 1gbit"


def rows_of(path):
    items = [json.loads(line) for line in path.read_text().splitlines()]
    return {(item["operation"], item["name"]): item for item in items if item["kind"] == "row"}


def test_all_variants_beside_the_floor(cluster, tmp_path):
    path = tmp_path / "lines"
    words = ["reduce_scatter", "all_gather", "-b", "256K", "-n", "2", "-J", path]
    run = cluster(PLACE, "-m", "benchmarks.wire", *words)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = rows_of(path)
    assert len(rows) == 9
    for (operation, name), row in rows.items():
        assert row["num_wrong"] == 0
        assert (row["num_nodes"], row["nominal_rate"]) == (2, 10**9)
        assert 0.8e9 < row["rate"] < 1.05e9
        # No call is faster than its bytes on the wire, less what a link lets pass at once.
        assert min(row["seconds"]) > row["floor"] - 32768 * 8 / 1e9, (operation, name)
    exact, int8 = (rows["all_gather", f"zcomm {name}"] for name in ("exact", "int8"))
    # Half of 256 KiB leaves a node; with int8 half of that, and a scale of 2 bytes in 256.
    assert exact["floor"] == pytest.approx(131072 * 8 / exact["rate"])
    assert exact["level_nbytes"][-1] == 131072
    assert int8["floor"] < 0.52 * exact["floor"]
    # The interface counts the same bytes, and headers: 66 to each 1448, or to larger packets.
    for row in (exact, int8):
        assert row["level_nbytes"][-1] <= row["interface_nbytes"] < 1.2 * row["level_nbytes"][-1]


def test_links_for_the_processor_have_their_credit_taken_off(cluster, tmp_path):
    path = tmp_path / "lines"
    words = ["all_gather", "-b", "1M", "-n", "1", "--peers", "none", "--codec", "none", "-J", path]
    run = cluster(f"{PLACE} --cpu-bound", "-m", "benchmarks.wire", *words)
    assert run.returncode == 0, run.stdout + run.stderr
    (row,) = rows_of(path).values()
    assert row["credit_nbytes"] == 131072
    assert row["floor"] == pytest.approx((524288 - 131072) * 8 / row["rate"])


def test_overlap(cluster, tmp_path):
    path = tmp_path / "lines"
    words = ["-b", "256K", "-n", "2", "-J", path]
    place = "--nodes 2 --ranks-per-node 1 --rate 1gbit --cpu-bound"
    run = cluster(place, "-m", "benchmarks.overlap", *words)
    assert run.returncode == 0, run.stdout + run.stderr
    items = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [item for item in items if item["kind"] == "row"]
    assert [row["target"] for row in rows] == [1.3, 1.4, None, None]
