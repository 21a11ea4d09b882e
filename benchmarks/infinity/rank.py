"""One rank of a run: the model is made without memory, sharded unit by unit, and trained.

``mpirun -n 2 python -m benchmarks.infinity.rank '{"shape": ...}'``; rank 0 prints a line for each
step and writes what was measured.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zcomm
import zero
from benchmarks.infinity.limit import resident_nbytes
from benchmarks.training import data
from benchmarks.training.model import GPT, Shape
from zcomm import Communicator

LEARNING_RATE = 3e-6
"""A warm-up's: at 1e-5 the second step of this model overshoots."""
CLIP_NORM = 1.0
TEXT_NBYTES = 1 << 20


@dataclass(frozen=True)
class Job:
    """A run, as it travels to the ranks.

    Attributes:
        name: for the lines on the screen.
        shape: of the model.
        steps: of the training, one sequence a rank.
        seed: of weights and batches.
        folder: where parameters and optimizer are; None leaves them in memory.
        block_numel: ``offload_numel``.
        output: file for what was measured.
    """

    name: str
    shape: Shape
    steps: int
    seed: int
    folder: str | None
    block_numel: int
    output: str

    @staticmethod
    def block_for(limit: float) -> int:
        """Return the elements of a block of the step that suit a limit: three are 5 % of it."""
        return max(1 << 16, min(zero.Config.offload_numel, int(0.05 * limit / 36)))

    def to_text(self) -> str:
        """Return the job as one argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Job:
        """Undo :meth:`to_text`."""
        fields = json.loads(text)
        return cls(**{**fields, "shape": Shape(**fields["shape"])})

    @property
    def config(self) -> zero.Config:
        """How the run is sharded."""
        if self.folder is None:
            return zero.Config(stage=3)
        return zero.Config(
            stage=3,
            offload_optimizer="nvme",
            offload_params="nvme",
            nvme_path=self.folder,
            offload_numel=self.block_numel,
        )


@dataclass(frozen=True)
class Trained:
    """What a run gave. Lists by rank, but for ``losses``; seconds are those of rank 0.

    Attributes:
        losses: means over the ranks.
        sharding: seconds until the model was initialised and sharded.
        computing: seconds of forward and backward of each step, gathers included.
        stepping: seconds of each optimizer step.
        resident: the most that each process had in memory.
        read: bytes that each rank read from disk after sharding.
        written: bytes that each rank wrote after sharding.
    """

    losses: list[float]
    sharding: float
    computing: list[float]
    stepping: list[float]
    resident: list[int]
    read: list[int]
    written: list[int]


def text() -> data.Text:
    """Return the first files of the standard library."""
    found = b""
    for file in data.standard_library():
        found += file.read_bytes()
        if len(found) > TEXT_NBYTES:
            break
    return np.frombuffer(found, np.uint8)


def train(comm: Communicator, job: Job) -> Trained:
    """Train; collective."""
    say = print if comm.rank == 0 else lambda *_, **__: None
    start = time.perf_counter()
    torch.manual_seed(job.seed)
    with torch.device("meta"):
        model = GPT(job.shape).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True
    )
    zero.shard(model, optimizer, job.config, comm=comm)
    sharding = time.perf_counter() - start
    say(f"{job.name}: initialised and sharded in {sharding:.1f} s", flush=True)
    before = moved(model)
    source = text()
    losses, computing, stepping = [], [], []
    for step in range(job.steps):
        batch = data.batch(
            source,
            seed=job.seed,
            step=step,
            num_sequences=comm.size,
            num_tokens=job.shape.context,
        ).part(comm.rank, comm.size)
        began = time.perf_counter()
        loss = model(batch.inputs, batch.targets)
        loss.backward()
        computed = time.perf_counter()
        zero.clip_grad_norm_(optimizer, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        ended = time.perf_counter()
        losses.append(float(comm.all_gather_values(np.array([loss.item()])).mean()))
        computing.append(computed - began)
        stepping.append(ended - computed)
        say(
            f"{job.name}: step {step + 1}/{job.steps}, loss {losses[-1]:.6f},"
            f" {computing[-1]:.1f} s forward and backward, {stepping[-1]:.1f} s step",
            flush=True,
        )
    after = moved(model)
    mine = np.array([resident_nbytes(), after[0] - before[0], after[1] - before[1]])
    rows = comm.all_gather_values(mine)
    resident, read, written = (rows[:, i].tolist() for i in range(3))
    return Trained(losses, sharding, computing, stepping, resident, read, written)


def moved(model: torch.nn.Module) -> tuple[int, int]:
    """Return bytes read from and written to disk by this rank."""
    offload: Any = zero.engine.engine_of(model).offload
    if offload is None or offload.drive is None:
        return 0, 0
    stats = offload.drive.swap.stats
    return stats.read_nbytes, stats.written_nbytes


def main(argument: str) -> None:
    """Run one job on all ranks."""
    job = Job.from_text(argument)
    with zcomm.init() as comm:
        trained = train(comm, job)
        if comm.rank == 0:
            Path(job.output).write_text(json.dumps(asdict(trained)))


if __name__ == "__main__":
    main(sys.argv[1])
