"""What the plan says of the limited run, and how fast a rank of this machine computes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.infinity.rank import Job
from benchmarks.training.model import GPT, Block, Shape
from zero.estimate import Model
from zero.layout import find_units
from zero.offload_plan import Machine, Planned, plan
from zero.offload_probe import probe_disk, probe_send, probe_update

PROCESS_NBYTES = 350e6
"""What Python, torch and MPI take of a rank's memory, about."""

TIMED_SECONDS = 3.0
"""For which blocks are computed: longer than the processes start apart."""


@dataclass(frozen=True)
class Prediction:
    """Rates that were measured, and what follows.

    Attributes:
        machine: the rates.
        compute: seconds that a rank computes in a step.
        planned: of the limited run.
    """

    machine: Machine
    compute: float
    planned: Planned


def sizes(shape: Shape) -> Model:
    """Return the sizes of the model, which gets no memory."""
    with torch.device("meta"):
        model = GPT(shape)
    numels = [sum(p.numel() for _, p in unit.parameters) for unit in find_units(model, "auto")]
    return Model(sum(numels), max(numels[:-1]), numels[-1])


def predict(job: Job, num_ranks: int, nbytes: float) -> Prediction:
    """Measure disk, update and one block of the model, and plan the limited run."""
    assert job.folder is not None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = probe_disk(job.folder)
        machine = Machine(
            memory=nbytes - PROCESS_NBYTES,
            disk=rates.free,
            ranks=num_ranks,
            read=rates.read,
            mixed=rates.mixed,
            update=probe_update(num_ranks),
            send=probe_send(num_ranks),
        )
        compute = compute_seconds(job.shape, num_ranks)
    finally:
        torch.set_num_threads(threads)
    planned = plan(job.config, sizes(job.shape), machine, num_ranks=num_ranks, compute=compute)
    return Prediction(machine, compute, planned)


def compute_seconds(shape: Shape, num_ranks: int) -> float:
    """Return the seconds of forward, recomputation and backward of one sequence on each rank.

    A block is timed, in as many processes at once: they share caches and memory.
    """
    program = [sys.executable, "-m", "benchmarks.infinity.predict", json.dumps(asdict(shape))]
    running = [
        subprocess.Popen(program, stdout=subprocess.PIPE, text=True) for _ in range(num_ranks)
    ]
    seconds = [float(process.communicate()[0]) for process in running]
    return shape.depth * max(seconds)


def block_seconds(shape: Shape) -> float:
    """Return the seconds of a block, the median of those in a few seconds."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    # Two, in turns: the weights of a block that comes next are in no cache.
    blocks = [Block(replace(shape, depth=1), random).to(torch.bfloat16) for _ in range(2)]
    x = torch.randn(1, shape.context, shape.width, generator=random).requires_grad_()
    seconds: list[float] = []
    until = time.perf_counter() + TIMED_SECONDS
    while time.perf_counter() < until or len(seconds) < 3:
        start = time.perf_counter()
        block = blocks[len(seconds) % 2]
        checkpoint(block, x, use_reentrant=False).sum().backward()
        for parameter in block.parameters():
            parameter.grad = None
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    print(block_seconds(Shape(**json.loads(sys.argv[1]))))
