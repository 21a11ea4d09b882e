"""``--slice K/N``, by which the runs of several commits share the long tests."""

from pathlib import Path

import pytest

COLLECT = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
MODULE = Path(__file__).with_name("test_environment.py")


def collected(run):
    return [line for line in run.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_slices_are_disjoint_and_together_everything(launch):
    everything = collected(launch(*COLLECT, MODULE))
    slices = [collected(launch(*COLLECT, MODULE, f"--slice={k}/3")) for k in range(3)]
    assert sorted(test for part in slices for test in part) == sorted(everything)
    assert [len(part) > 0 for part in slices] == [True] * 3


def test_bad_slice_is_one_line(launch):
    run = launch(*COLLECT, MODULE, "--slice=3/3")
    assert run.returncode == 4
    told = [line for line in run.stderr.splitlines() if "--slice" in line]
    assert "expected K/N with 0 <= K < N" in told[-1]
