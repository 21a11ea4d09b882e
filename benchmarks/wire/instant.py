"""Timing one call on all ranks: from an agreed instant to the end of the last rank.

All processes of one kernel share ``CLOCK_MONOTONIC``, those of an emulated cluster too, and a
barrier's own skew of up to 2 ms stays out of the time. Ranks of several machines share no clock:
there a call starts after a barrier, and lasts as long as on its slowest rank.

Between calls ranks sleep while they wait: one that is early must not take the core of another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

_LEAD_SECONDS = 0.002
_WAKE_SECONDS = 0.0003
_NAP_SECONDS = 0.0002

now = time.monotonic


def kernel() -> int:
    """Return a number that ranks have in common when they share ``CLOCK_MONOTONIC``."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = os.readlink("/proc/self/ns/time")
    except OSError:
        return crc32(os.uname().nodename.encode())
    return crc32(f"{boot}{space}".encode())


@dataclass
class Pace:
    """Starts calls of all ranks together; ``world`` is MPI's. Collective.

    ``late``: the calls that this rank could not start at their instant, being told too late.
    """

    world: Any
    shared: bool
    late: int = field(default=0, init=False)

    def time(self, call: Callable[[], object]) -> tuple[float, float]:
        """Run a call; return its instant, equal on all ranks, and this rank's end, both in seconds.

        Without a shared clock the instant is 0 and the end this rank's duration.
        """
        instant = self.meet() + _LEAD_SECONDS
        if not self.shared:
            self.world.Barrier()
            start = now()
            call()
            return 0.0, now() - start
        time.sleep(max(0.0, instant - _WAKE_SECONDS - now()))
        if now() > instant:
            self.late += 1
        while now() < instant:
            os.sched_yield()
        call()
        return instant, now()

    def meet(self) -> float:
        """Return when all ranks are here: the clock of the last one, the same number on all."""
        from mpi4py import MPI

        clock = np.array([now()])
        request = self.world.Iallreduce(MPI.IN_PLACE, clock, MPI.MAX)
        while not request.Test():
            time.sleep(_NAP_SECONDS)
        return float(clock[0])


def durations(
    world: Any, instants: npt.NDArray[np.float64], ends: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return what calls took on their last ranks; equal on all ranks. Collective."""
    from mpi4py import MPI

    last = np.array(ends)
    world.Allreduce(MPI.IN_PLACE, last, MPI.MAX)
    return last - instants
