"""What the plan says of the limited run, and how fast a rank of this machine computes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch

from benchmarks.infinity.rank import Job
from benchmarks.training.model import GPT, Block, Shape
from zero.estimate import Model
from zero.layout import find_units
from zero.offload_plan import Machine, Planned, plan
from zero.offload_probe import probe_disk, probe_send, probe_update

PROCESS_NBYTES = 350e6
"""What Python, torch and MPI take of a rank's memory, about."""


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
        compute = compute_seconds(job.shape)
    finally:
        torch.set_num_threads(threads)
    planned = plan(job.config, sizes(job.shape), machine, num_ranks=num_ranks, compute=compute)
    return Prediction(machine, compute, planned)


def compute_seconds(shape: Shape) -> float:
    """Return the seconds of forward, recomputation and backward of one sequence, a block timed."""
    random = torch.Generator().manual_seed(0)
    block = Block(replace(shape, depth=1), random).to(torch.bfloat16)
    x = torch.randn(1, shape.context, shape.width, generator=random).requires_grad_()
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        with torch.no_grad():
            block(x)
        block(x).sum().backward()
        seconds.append(time.perf_counter() - start)
    return shape.depth * statistics.median(seconds[1:])
