"""How long an operation takes and what it sends.

The loop is that of the NCCL tests: warm up, barrier, start the clock, all iterations without a
pause, stop; the time of an iteration is the mean over iterations, then over ranks. Traffic and the
split of the time come from the communicator's own counters over the same iterations.

A timed loop reduces its own result again and again where the operation works in place; what the
values become does not matter, and only ``check`` looks at values.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.collectives.cases import Case
from benchmarks.collectives.inputs import normal
from benchmarks.collectives.perform import Perform, poisoned, source_span, to_tensor
from zcomm import Communicator

# What a communicator does beside the operation that is measured.
OVERHEAD = frozenset({"guard", "values", "barrier"})


@dataclass(frozen=True)
class Timing:
    """One operation, of the mean rank where nothing else is said. Seconds and bytes.

    ``inside_nbytes`` and ``between_nbytes`` are wire bytes that the busiest rank sends inside its
    node and between nodes; ``logical_nbytes`` is what the same elements hold in the caller's type,
    both kinds together.
    """

    seconds: float
    slowest: float
    encode: float
    comm: float
    decode: float
    inside_nbytes: int
    between_nbytes: int
    logical_nbytes: int

    @property
    def ratio(self) -> float | None:
        """Logical bytes over wire bytes: what the codec saves; None where nothing was sent."""
        wire = self.inside_nbytes + self.between_nbytes
        return self.logical_nbytes / wire if wire else None


def measure(
    comm: Communicator, case: Case, perform: Perform, *, iterations: int, warmup: int
) -> Timing:
    """Time ``case`` on all ranks."""
    span = source_span(case, comm.rank)
    source, out = to_tensor(normal(case.dtype, 1, comm.rank, *span), case.dtype), poisoned(case)
    _repeat(comm, case, perform, source, out, warmup)
    comm.barrier()
    comm.traffic.reset()
    comm.clock.reset()
    start = time.perf_counter()
    _repeat(comm, case, perform, source, out, iterations)
    seconds = time.perf_counter() - start
    phases = comm.clock.snapshot()
    own = [seconds, phases["encode"], phases["comm"], phases["decode"], *_sent(comm)]
    everyone = comm.all_gather_values(np.array(own, np.float64)) / iterations
    mean, most = everyone.mean(axis=0), everyone.max(axis=0)
    return Timing(
        seconds=float(mean[0]),
        slowest=float(most[0]),
        encode=float(mean[1]),
        comm=float(mean[2]),
        decode=float(mean[3]),
        inside_nbytes=round(most[4]),
        between_nbytes=round(most[5]),
        logical_nbytes=round(most[6]),
    )


def _repeat(
    comm: Communicator,
    case: Case,
    perform: Perform,
    source: torch.Tensor,
    out: torch.Tensor | None,
    times: int,
) -> None:
    with np.errstate(all="ignore"):
        for _ in range(times):
            perform(comm, case, source, out)


def _sent(comm: Communicator) -> tuple[int, int, int]:
    """Return what this rank sent: wire bytes inside its node, between nodes, logical bytes."""
    inside, between, logical = 0, 0, 0
    outermost = len(comm.topology.levels) - 1
    for (operation, level), counter in comm.traffic.snapshot().items():
        if operation in OVERHEAD:
            continue
        logical += counter.logical_nbytes
        # A topology of one level is one node.
        if level == outermost > 0:
            between += counter.wire_nbytes
        else:
            inside += counter.wire_nbytes
    return inside, between, logical
