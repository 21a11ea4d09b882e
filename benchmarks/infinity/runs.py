"""Runs of the ranks: under a limit, or free."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.infinity.limit import WATCHDOG, Group, groups
from benchmarks.infinity.rank import Job, Trained
from benchmarks.launch import UsageError

SETTINGS = {
    "OMP_NUM_THREADS": "1",  # a core for each rank
    "ZCOMM_LOG": "warning",
    # Where the threshold moves, as it does by default, freed tensors stay in the heap of glibc.
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
"""The environment of the ranks, where it says nothing else."""


@dataclass(frozen=True)
class Limited:
    """A run under a limit.

    Attributes:
        trained: what it measured; None when it did not end well.
        enforcer: who held the limit, in words.
        charged: what the kernel counted at most, by rank, page cache included; of a watchdog none.
        num_killed: processes that the kernel killed.
    """

    trained: Trained | None
    enforcer: str
    charged: list[int]
    num_killed: int


def free(job: Job, num_ranks: int) -> Trained | None:
    """Run without a limit."""
    return _run(job, [], num_ranks)


def limited(job: Job, num_ranks: int, nbytes: int) -> Limited:
    """Run with ``nbytes`` of memory for each rank."""
    with groups(num_ranks, nbytes) as made:
        paths = [str(group.path) for group in made] or [WATCHDOG] * num_ranks
        enter = [sys.executable, "-m", "benchmarks.infinity.limit", str(nbytes), *paths, "--"]
        trained = _run(job, enter, num_ranks)
        return Limited(
            trained,
            enforcer(made),
            [group.charged for group in made],
            sum(group.num_killed for group in made),
        )


def enforcer(made: Sequence[Group]) -> str:
    """Say who holds a limit."""
    if not made:
        return "a watchdog that kills above the resident size (no control group can be made here)"
    first = made[0]
    return f"the kernel: {first.setting} of a control group for each rank (cgroup v{first.version})"


def _mpirun() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UsageError("there is no mpirun beside this Python, nor on the PATH")
    return found


def call(before: Sequence[str], module: Sequence[str], num_ranks: int) -> int:
    """Run a module with its arguments on all ranks, behind ``before``; return the exit code."""
    words = [_mpirun(), "-n", str(num_ranks), *before, sys.executable, "-m", *module]
    return subprocess.call(words, env=SETTINGS | os.environ)


def _run(job: Job, before: Sequence[str], num_ranks: int) -> Trained | None:
    output = Path(job.output)
    output.unlink(missing_ok=True)
    code = call(before, ["benchmarks.infinity.rank", job.to_text()], num_ranks)
    if code or not output.exists():
        return None
    return Trained(**json.loads(output.read_text()))
