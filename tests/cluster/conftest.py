"""Emulated clusters for tests; where there can be none, those tests are skipped with the reason."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.traces import MARK, marked

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ("-m", "benchmarks.cluster")
# One write: two ranks that write at the same time could put their lines into each other.
WAIT = "import sys, time; sys.stdout.write('up\\n'); sys.stdout.flush(); time.sleep(600)"


@pytest.fixture(scope="session")
def cluster(launch):
    """Run a Python program on a cluster: ``cluster(flags, program, *arguments)``."""
    tried = launch(*DRIVER, "--nodes", "1", "--ranks-per-node", "1", "--", "true")
    if tried.returncode == 2:
        pytest.skip(tried.stderr.strip())
    assert tried.returncode == 0, tried.stderr

    def run(flags, *program):
        words = [*DRIVER, *flags.split(), "--", sys.executable, *program]
        return launch(*words, timeout=60)

    return run


@pytest.fixture
def running(cluster):
    """Start a driver in a process group of its own, every process marked with ``mark``."""

    @contextlib.contextmanager
    def start(mark, flags="--ranks-per-node 1"):
        driver = subprocess.Popen(
            [sys.executable, *DRIVER, *flags.split(), "--", sys.executable, "-c", WAIT],
            cwd=ROOT,
            env=os.environ | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Tests that a shell started in the background inherit that SIGINT is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            yield driver
        finally:
            for process in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            driver.communicate()

    return start
