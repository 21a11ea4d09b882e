"""The overlap benchmark: its ratios, its sockets, its program, and wrong results found."""

import json
import socket
import threading

import pytest

from benchmarks import overlap
from benchmarks.launch import UsageError

PROGRAM = ["-m", "benchmarks.overlap"]
SMALL = ["-b", "64K", "-n", "2", "--matrix", "16"]


def result_of(communication, computing, both):
    seconds = {"communication": communication, "computing": computing, "both": both}
    return overlap.Result("zcomm int8", "zcomm", "int8", 10, 0.001, seconds)


def test_ratio_is_over_the_longer_and_hidden_of_the_shorter():
    result = result_of((4.0, 4.0, 9.0), (3.0,), (5.0,))
    assert result.ratio == 5 / 4
    assert result.hidden == pytest.approx((4 + 3 - 5) / 3)
    assert result_of((2.0,), (2.0,), (4.0,)).hidden == 0
    assert result_of((2.0,), (2.0,), (2.0,)).hidden == result_of((2.0,), (2.0,), (2.0,)).ratio == 1


@pytest.mark.parametrize(
    ("rate", "codec", "aimed"),
    [(10**9, None, 1.3), (10**9, "int8", 1.4), (2 * 10**8, "int8", 1.2), (10**10, "int8", None)],
)
def test_targets(rate, codec, aimed):
    result = overlap.Result("zcomm", "zcomm", codec, 1, 0.0, {})
    assert overlap._target(result, rate) == aimed
    assert overlap._target(result, None) is None
    assert overlap._target(overlap.Result("s", "sockets", codec, 1, 0.0, {}), rate) is None


def test_sockets_receive_all_or_say_what_is_missing():
    here, there = socket.socketpair()
    target = bytearray(300_000)
    sender = threading.Thread(
        target=lambda: there.sendall(bytes(range(256)) * 1000 + b"x" * 44_000)
    )
    sender.start()
    overlap._receive(here, memoryview(target))
    sender.join()
    assert target == bytes(range(256)) * 1000 + b"x" * 44_000
    there.sendall(b"12")
    there.close()
    with pytest.raises(ConnectionError, match="left 3 bytes"):
        overlap._receive(here, memoryview(bytearray(5)))
    here.close()


def test_rows(launch, tmp_path):
    path = tmp_path / "lines"
    done = launch(*PROGRAM, *SMALL, "-J", path, num_ranks=2)
    assert done.returncode == 0, done.stderr
    rows = [item for line in path.read_text().splitlines() if (item := json.loads(line))]
    rows = [item for item in rows if item["kind"] == "row"]
    names = ["zcomm exact", "zcomm int8", "sockets, bytes of exact", "sockets, bytes of int8"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert set(row["seconds"]) == set(overlap.KINDS)
        assert all(len(times) == 2 and min(times) > 0 for times in row["seconds"].values())
        assert row["ratio"] > 0
        assert row["cpu"] > 0
        assert row["num_products"] >= 1


WRONG = """
import sys
import zcomm
from benchmarks import launch, overlap
right = zcomm.Communicator.all_gather
def wrong(self, shard, out=None, **how):
    work = right(self, shard, out, **how)
    if self.rank == 1 and out is not None:
        work.wait()
        out[-1] = 7
    return work
zcomm.Communicator.all_gather = wrong
sys.exit(launch.main("overlap", overlap.parse, overlap.run, sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_wrong_element_on_one_rank_is_said_and_fails(launch):
    done = launch("-c", WRONG, *SMALL, "--codec", "none", "--no-sockets", num_ranks=2)
    assert done.returncode != 0
    assert "1 elements are WRONG" in done.stdout


@pytest.mark.slow
def test_one_rank_has_nobody(launch):
    done = launch(*PROGRAM, *SMALL, num_ranks=1)
    assert done.returncode == 2
    assert "nobody" in done.stderr


@pytest.mark.parametrize("words", [["-n", "0"], ["-d", "int8"], ["--codec", "int8,int4"]])
def test_what_cannot_be_measured(words):
    with pytest.raises(UsageError):
        overlap.parse(words)
