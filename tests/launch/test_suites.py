"""A test that fails on one rank ends the whole run with its text, before any time limit (T3)."""

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
PYTEST = ("-m", "pytest", "--with-mpi", "-v", "-p", "no:cacheprovider", "--color=no")
REPORT = "=== rank 1 of 3 failed: "


def lines_with(text, output):
    return [line for line in output.splitlines() if text in line]


@pytest.mark.parametrize(
    ("test", "where"),
    [
        ("test_assertion", "suite.py::test_assertion (call)"),
        ("test_teardown", "suite.py::test_teardown (teardown)"),
        ("test_exit", "the run was interrupted"),
    ],
)
def test_failure_on_one_rank_is_reported_and_ends_all(launch, test, where):
    selection = f"test_before or {test} or test_after"
    run = launch(*PYTEST, PROGRAMS / "suite.py", "-k", selection, num_ranks=3, timeout=60)
    assert run.returncode != 0
    assert [where in line for line in lines_with(REPORT, run.stderr)] == [True]
    assert lines_with("the words of rank 1", run.stderr) != []
    assert "suite.py::test_before PASSED" in run.stdout
    assert "test_after PASSED" not in run.stdout


def test_report_holds_what_the_test_printed(launch):
    run = launch(*PYTEST, PROGRAMS / "suite.py", "-k", "assertion", num_ranks=3, timeout=60)
    assert "assert 1 + 1 == 3" in run.stderr
    assert "printed by the test" in run.stderr.splitlines()


def test_module_that_one_rank_cannot_import(launch):
    run = launch(*PYTEST, PROGRAMS / "broken_suite.py", num_ranks=3, timeout=60)
    assert run.returncode != 0
    assert [
        "collecting tests/launch/programs/broken_suite.py" in line
        for line in lines_with(REPORT, run.stderr)
    ] == [True]
    assert lines_with("the words of rank 1", run.stderr) != []


def test_rank_that_hangs_inside_mpi_is_ended_by_the_time_limit_of_its_test(launch):
    arguments = (*PYTEST, PROGRAMS / "suite.py", "-k", "hang", "--timeout=2")
    run = launch(*arguments, num_ranks=2, timeout=60)
    assert run.returncode != 0
    assert lines_with("=== rank 1 of 2 failed: ", run.stderr) == [
        "=== rank 1 of 2 failed: tests/launch/programs/suite.py::test_hang took longer than 2.0 s"
    ]
    assert lines_with("in test_hang", run.stderr) != []


def test_passing_run_is_reported_by_rank_0_only(launch):
    run = launch(*PYTEST, PROGRAMS / "suite.py", "-k", "before or after", num_ranks=3, timeout=60)
    assert run.returncode == 0
    assert [line.split(" in ")[0] for line in lines_with(" passed", run.stdout)] == [
        "======================= 2 passed, 4 deselected"
    ]
