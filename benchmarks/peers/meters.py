"""What the kernel knows: a thread's time, a process's memory, a network interface's bytes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.network import INTERFACE

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True)
class Times:
    """Seconds of one thread: that passed, on a core, and ready for one but without it."""

    wall: float
    core: float
    queue: float

    def since(self, before: Times) -> Times:
        """Return what has passed after ``before``."""
        return Times(self.wall - before.wall, self.core - before.core, self.queue - before.queue)


def times() -> Times:
    """Read the clocks of the calling thread."""
    account = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    core, queue, _ = account.split()
    return Times(time.perf_counter(), int(core) * 1e-9, int(queue) * 1e-9)


def link_nbytes(interface: str = INTERFACE) -> int:
    """Return the bytes that have left through this node's link, headers of packets included."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def reset_peak() -> None:
    """Forget the peak of this process's resident memory."""
    _CLEAR.write_text(_RESET_PEAK)


def peak_nbytes() -> int:
    """Return the most resident memory of this process since :func:`reset_peak`."""
    (line,) = (s for s in _STATUS.read_text().splitlines() if s.startswith("VmHWM:"))
    return int(line.split()[1]) * 2**10
