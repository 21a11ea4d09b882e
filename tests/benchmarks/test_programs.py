"""The benchmarks as programs under mpirun: exit codes, what is printed, and by whom."""

import json
import re

import pytest

from tests.marks import slow

COLLECTIVES = ["-m", "benchmarks.collectives"]
TRAINING = ["-m", "benchmarks.training"]


def rows_of(text):
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def words_of_ranks(stderr):
    """Return what ranks wrote; Open MPI adds between rules which of them ended the job."""
    return "".join(re.split(r"^-{70,}\n", stderr, flags=re.MULTILINE)[::2])


@pytest.mark.slow
def test_the_table_is_printed_once(launch, tmp_path):
    flags = ["all_gather", "-b", "4K", "-e", "8K", "-f", "2", "-n", "2", "--codec", "int8"]
    place = ["--topology", "2x1", "-J", tmp_path / "lines"]
    done = launch(*COLLECTIVES, *flags, *place, num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert [row[0] for row in rows_of(done.stdout)] == ["4096", "8192"]
    # 512 and 1024 floats a rank: that many codes, and two or four scales in 16 bytes.
    assert [row[14] for row in rows_of(done.stdout)] == ["528", "1040"]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "lines").read_text().splitlines()]
    assert kinds == ["header", "row", "row", "summary"]


@pytest.mark.parametrize(
    ("program", "words", "part"),
    [
        (COLLECTIVES, ["all_gather", "--topology", "2x3"], "2 x 3 = 6"),
        slow(TRAINING, ["--data", "/nonexistent/text"], "/nonexistent/text"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(launch, program, words, part):
    done = launch(*program, *words, num_ranks=2)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = words_of_ranks(done.stderr).splitlines()
    assert line.startswith(program[1])
    assert part in line


def test_help_is_printed_once(launch):
    done = launch(*COLLECTIVES, "--help", num_ranks=2)
    assert done.returncode == 0
    assert done.stdout.count("usage:") == 1
    assert "--codec" in done.stdout


@pytest.mark.slow
def test_the_demonstration(launch, tmp_path):
    done = launch(*TRAINING, "--steps", "2", "--output", tmp_path, num_ranks=4, timeout=280)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "results.json").read_text())
    exact, quantised = (content["trainings"][name]["counted"] for name in ("stage 3", "ZeRO++"))
    assert content["trainings"]["stage 0"]["counted"]["losses"] == exact["losses"]
    assert exact["levels"][-1] / quantised["levels"][-1] > 3.8
    assert len(content["collectives"]) == 12
    assert all(row["outcome"]["num_wrong"] == 0 for row in content["collectives"])
    for path in (tmp_path / "loss.png", tmp_path / "results.json"):
        assert done.stdout.count(str(path)) == 1
        assert path.stat().st_size > 1000
    assert done.stdout.count("wire MB per step between nodes") == 1
