"""``python -m benchmarks.peers.rank PEER FOLDER``: one rank of one peer's launch; see driver.

It trains, and leaves what it measured as ``FOLDER/PEER.RANK.json``.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from benchmarks.peers import meters
from benchmarks.peers.options import Job
from benchmarks.peers.registry import ALONE, PEERS
from benchmarks.training.data import Batch

LEARNING_RATE = 1e-4
"""Small: there is no warm-up, and what a loss that rises at first does to peers is no rounding."""

BETAS = (0.9, 0.95)
JOB = "job.json"
BATCHES = "batches.npy"


class Training(Protocol):
    """What a peer's ``prepare(name, job)`` returns.

    Attributes:
        rank: of this process.
        local_rank: of this process among those of its node.
    """

    rank: int
    local_rank: int

    def step(self, batch: Batch) -> float:
        """Train one step on this rank's share of the batch; return its loss before the step."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def counted_nbytes(self) -> int | None:
        """Return what this rank says it has sent to other nodes so far, None if it does not."""

    def close(self) -> None:
        """Leave the process group."""


@dataclass(frozen=True)
class Report:
    """What one rank measured, over all measured steps where nothing else is said.

    ``steps`` are seconds of each: wall, core, queue. ``losses`` are those of all steps, of this
    rank's share. ``link_nbytes`` is that of its node.
    """

    rank: int
    local_rank: int
    steps: list[tuple[float, float, float]]
    losses: list[float]
    link_nbytes: int
    counted_nbytes: int | None
    peak_nbytes: int


def measure(training: Training, job: Job, batches: list[Batch]) -> Report:
    """Train ``warmup`` and ``steps`` steps and measure the latter."""
    steps = []
    losses = [training.step(batch) for batch in batches[: job.warmup]]
    training.barrier()
    meters.reset_peak()
    link, counted = meters.link_nbytes(), training.counted_nbytes()
    before = meters.times()
    for batch in batches[job.warmup :]:
        losses.append(training.step(batch))
        now = meters.times()
        step, before = now.since(before), now
        steps.append((step.wall, step.core, step.queue))
    counted_now = training.counted_nbytes()
    training.barrier()
    return Report(
        training.rank,
        training.local_rank,
        steps,
        losses,
        meters.link_nbytes() - link,
        None if counted is None or counted_now is None else counted_now - counted,
        meters.peak_nbytes(),
    )


def read_batches(path: Path, rank: int, num_ranks: int) -> list[Batch]:
    """Read this rank's share of the batches of all steps."""
    tokens = torch.from_numpy(np.load(path))
    return [Batch(step[..., :-1], step[..., 1:]).part(rank, num_ranks) for step in tokens]


def main(name: str, folder: Path) -> None:
    """Be one rank of a peer."""
    peer = (PEERS | {ALONE.name: ALONE})[name]
    job = Job.load(folder / JOB)
    prepare: Callable[[str, Job], Training]
    prepare = importlib.import_module(f"benchmarks.peers.{peer.module}").prepare
    training = prepare(name, job)
    num_ranks = len(np.load(folder / BATCHES, mmap_mode="r")[0]) // job.sequences
    batches = read_batches(folder / BATCHES, training.rank, num_ranks)
    report = measure(training, job, batches)
    written = folder / f"{name}.{report.rank}.json"
    written.write_text(json.dumps(asdict(report)), encoding="utf-8")
    training.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
