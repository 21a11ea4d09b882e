"""What the plan says of the limited run, and how fast a rank of this machine computes."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import zcomm
from benchmarks.infinity import runs
from benchmarks.infinity.rank import Job
from benchmarks.launch import UsageError
from benchmarks.training.model import GPT, Block, Shape
from zcomm import Communicator
from zero.estimate import Model
from zero.layout import find_units
from zero.offload_plan import Machine, Planned, plan
from zero.offload_probe import probe_disk, probe_update

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
    output = Path(job.output).with_name("rates.json")
    words = ["benchmarks.infinity.predict", json.dumps(asdict(job.shape)), str(output)]
    if runs.call([], words, num_ranks) or not output.exists():
        raise UsageError("the ranks that measure how fast they compute did not end well")
    together = Rates(**json.loads(output.read_text()))
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
            send=together.send,
        )
    finally:
        torch.set_num_threads(threads)
    compute = job.shape.depth * together.block
    planned = plan(job.config, sizes(job.shape), machine, num_ranks=num_ranks, compute=compute)
    return Prediction(machine, compute, planned)


@dataclass(frozen=True)
class Rates:
    """What the ranks measured together, the slowest of them.

    Attributes:
        block: seconds of forward, recomputation and backward of a block.
        send: bytes per second that a rank receives in gathers and reductions of a block.
    """

    block: float
    send: float


def measure(comm: Communicator, shape: Shape) -> Rates:
    """Compute blocks, then send one; collective."""
    block = block_seconds(shape)
    with torch.device("meta"):
        numel = sum(p.numel() for p in GPT(replace(shape, depth=1)).blocks.parameters())
    each = -(-numel // comm.size)
    shard = torch.zeros(each, dtype=torch.bfloat16)
    full = torch.zeros(each * comm.size, dtype=torch.bfloat16)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        comm.all_gather(shard)
        comm.all_gather(shard)
        comm.reduce_scatter(full, op="avg")
        seconds.append(time.perf_counter() - start)
    received = 3 * (full.nbytes - shard.nbytes)
    mine = np.array([block, statistics.median(seconds[1:])])
    slowest = comm.all_gather_values(mine).max(axis=0)
    return Rates(float(slowest[0]), received / float(slowest[1]) if received else math.inf)


def block_seconds(shape: Shape) -> float:
    """Return the seconds of a block, the median of those in a few seconds."""
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


def main(shape: str, output: str) -> None:
    """Measure on all ranks; rank 0 writes the rates."""
    with zcomm.init() as comm:
        rates = measure(comm, Shape(**json.loads(shape)))
        if comm.rank == 0:
            Path(output).write_text(json.dumps(asdict(rates)))


if __name__ == "__main__":
    main(*sys.argv[1:])
