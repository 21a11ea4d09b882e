"""However a cluster ends, its exit code says how and nothing of it stays."""

import json
import os
import signal
import time
import uuid

import pytest

from tests.cluster.traces import MARK, marked, names_on_the_machine, network_namespaces

pytestmark = pytest.mark.cluster

LAUNCHERS = ["", "--torch"]
RANK_1_FAILS = """
import os, sys, time
rank = int(os.environ.get("RANK") or os.environ["PMI_RANK"])
if rank == 1:
    {how}
time.sleep({others})
"""


def wait_until_gone(mark):
    deadline = time.monotonic() + 10
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


@pytest.fixture
def mark():
    return uuid.uuid4().hex


@pytest.fixture(autouse=True)
def _nothing_named_is_left():
    before = names_on_the_machine()
    yield
    assert names_on_the_machine() == before


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("pass", 0),
        ("sys.exit(7)", 7),
        ("raise ArithmeticError('the words of rank 1')", 1),
    ],
)
def test_exit_code_of_the_program(cluster, launcher, how, code):
    program = RANK_1_FAILS.format(how=how, others=0)
    run = cluster(f"--ranks-per-node 1 {launcher}", "-c", program)
    assert run.returncode == code
    assert ("the words of rank 1" in run.stderr) == (code == 1)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_killed_rank_ends_the_cluster(cluster, launcher, mark, monkeypatch):
    monkeypatch.setenv(MARK, mark)
    program = RANK_1_FAILS.format(how="os.kill(os.getpid(), 9)", others=600)
    start = time.monotonic()
    run = cluster(f"--ranks-per-node 1 {launcher}", "-c", program)
    assert run.returncode != 0
    assert time.monotonic() - start < 30
    assert marked(mark) == []


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_words_of_the_program_arrive_unchanged(cluster, launcher):
    words = ["two words", "$HOME", "it's", '"', "*", "", "--", "\\"]
    program = "import json, sys; sys.stdout.write(json.dumps(sys.argv[1:]) + '\\n')"
    run = cluster(f"--ranks-per-node 1 {launcher}", "-c", program, *words)
    lines = [line for line in run.stdout.splitlines() if not line.startswith("#")]
    assert [json.loads(line) for line in lines] == [words, words]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_before_the_driver_returns(running, mark, launcher, number):
    with running(mark, f"--ranks-per-node 1 {launcher}") as driver:
        wait_until_up(driver)
        # The driver and its parts in four namespaces: switch, two nodes, and the machine's own.
        assert len(network_namespaces(marked(mark))) == 4
        os.killpg(driver.pid, number)  # as a terminal does
        driver.wait(20)
        assert driver.returncode == 128 + number
        assert marked(mark) == []


def test_killed_driver_leaves_nothing_and_the_next_run_works(running, cluster, mark):
    with running(mark) as driver:
        wait_until_up(driver)
        driver.kill()
        driver.wait()
        wait_until_gone(mark)
    assert cluster("--ranks-per-node 1", "-c", "pass").returncode == 0


@pytest.mark.parametrize("seconds", [0.15, 0.3, 0.45, 0.6, 0.75])
def test_killed_at_any_moment_of_the_set_up(running, mark, seconds):
    with running(mark) as driver:
        time.sleep(seconds)
        driver.kill()
        driver.wait()
        wait_until_gone(mark)


def wait_until_up(driver):
    """Read what the driver prints until both ranks have said that they run."""
    num_up = 0
    for line in driver.stdout:
        num_up += line == "up\n"
        if num_up == 2:
            return
    pytest.fail(driver.stderr.read())
