"""The latency benchmark: right rows, and an exit code that says when a value is wrong."""

import pytest

from benchmarks import latency
from benchmarks.launch import UsageError
from tests.marks import slow

FLAGS = ["--sizes", "8", "4100", "--calls", "3"]


def rows_of(text):
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("arrays", ["numpy", slow("torch")])
def test_rows(launch, arrays):
    run = launch("-m", "benchmarks.latency", *FLAGS, "--arrays", arrays, num_ranks=2, timeout=100)
    assert run.returncode == 0, run.stderr
    rows = rows_of(run.stdout)
    sizes = [["8", "4100"]] * 3 + [["0"]]
    expected = [[n, op] for op, each in zip(latency.OPERATIONS, sizes, strict=True) for n in each]
    assert [row[:2] for row in rows] == expected
    for row in rows:
        raw, raw_tail, ours, tail, ratio, difference = map(float, row[2:])
        assert 0 < raw <= raw_tail
        assert 0 < ours <= tail
        # Times and differences are printed to 0.1, ratios to 0.01: each is half of that off.
        half = 0.05 + 1e-9
        assert (ours - half) / (raw + half) - 0.1 * half <= ratio
        assert ratio <= (ours + half) / (raw - half) + 0.1 * half
        assert abs(difference - (ours - raw)) <= 3 * half


WRONG = """
import sys
import zcomm
from benchmarks import latency, launch
right = zcomm.Communicator.all_reduce
def wrong(self, x, **how):
    right(self, x, **how)
    if self.rank == 1:
        x[0] += 1
    return x
zcomm.Communicator.all_reduce = wrong
sys.exit(launch.main("latency", latency.parse, latency.run, sys.argv[1:]))
"""


def test_a_wrong_value_on_one_rank_is_said_and_fails(launch):
    flags = ["--operations", "all_reduce", "--sizes", "8", "--calls", "2"]
    run = launch("-c", WRONG, *flags, num_ranks=2, timeout=100)
    assert run.returncode != 0
    assert [row[-1] for row in rows_of(run.stdout)] == ["WRONG"]


@pytest.mark.parametrize("flags", [["--calls", "0"], ["--sizes", "6"], ["--operations", "send"]])
def test_what_cannot_be_measured(flags):
    with pytest.raises(UsageError):
        latency.parse(flags)


def test_defaults():
    options = latency.parse([])
    assert options.operations == latency.OPERATIONS
    assert (min(options.sizes), max(options.sizes)) == (8, 65536)
