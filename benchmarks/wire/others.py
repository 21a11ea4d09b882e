"""CPU time that other programs took meanwhile: what says whether figures are those of the machine.

``/proc/stat`` counts the whole machine, in a container too; less the ranks' own it is what was
taken from them. The kernel's work for packets is nobody's and left out; time that a hypervisor gave
to others counts.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

NOISY = 0.05
"""From this part of the machine's CPU time on, figures are called noisy."""

_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7
_SLOTS = 5


def busy_seconds(text: str, ticks: int) -> float:
    """Return the seconds of processes and of other guests in the first line of ``/proc/stat``."""
    fields = [int(field) for field in text.split("\n")[0].split()[1:]]
    return sum(fields[i] for i in (_USER, _NICE, _SYSTEM, _STEAL) if i < len(fields)) / ticks


class Watch:
    """Counts from its making on. ``machine``: the same number for ranks of one machine."""

    def __init__(self, machine: int) -> None:
        self._machine = machine
        self._start = self._read()

    def _read(self) -> tuple[float, float, float]:
        try:
            with open("/proc/stat", encoding="ascii") as file:
                busy = busy_seconds(file.read(), os.sysconf("SC_CLK_TCK"))
        except OSError:
            busy = np.nan
        return time.monotonic(), busy, time.process_time()

    def part(self, world: Any) -> float | None:
        """Return the part of the CPU time of the worst machine that others had. Collective.

        None where the system does not say.
        """
        elapsed, busy, own = (
            end - start for end, start in zip(self._read(), self._start, strict=True)
        )
        cores = float(os.cpu_count() or 1)
        rows = np.zeros((world.size, _SLOTS))
        world.Allgather(np.array([self._machine, elapsed, busy, own, cores]), rows)
        worst = others(rows)
        return None if np.isnan(worst) else worst


def others(rows: Any) -> float:
    """Return the largest part over machines; a row a rank: machine, elapsed, busy, own, cores."""
    parts = []
    for machine in np.unique(rows[:, 0]):
        ranks = rows[rows[:, 0] == machine]
        _, elapsed, busy, _, cores = ranks[0]
        parts.append((busy - ranks[:, 3].sum()) / (elapsed * cores))
    return float(max(0.0, np.max(parts)))
