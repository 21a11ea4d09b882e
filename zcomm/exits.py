"""One rank fails: all ranks end.

The hooks of ``zcomm.init(abort=True)``. An uncaught exception prints its traceback through the hook
that was there before, then aborts the job. A rank that leaves (``sys.exit``, the end of the script)
shakes hands once more, as the operation "leaving the job": the others do the same when they leave,
or are found in another operation, which ends them all. One that a signal's handler made leave in
the middle of an operation cannot: the others wait for messages of that, and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from zcomm.communicator import Communicator
from zcomm.worlds import World

STAGGER_SECONDS = 0.5
"""An error that all ranks raise is printed by the lowest, which ends the others before it is their
turn."""

LONGEST_STAGGER_SECONDS = 3.0
FORWARD_SECONDS = 0.25


@dataclass(frozen=True)
class _Job:
    """The job that this process is a rank of; its forked children are not."""

    world: World
    process: int

    def is_mine(self) -> bool:
        return os.getpid() == self.process

    def abort(self, text: str) -> None:
        print(f"zcomm[{self.world.rank}]: {text}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Launchers drop what they have not forwarded yet when they end the ranks.
        time.sleep(FORWARD_SECONDS)
        self.world.abort(1)


_OPEN: list[Communicator] = []
"""Held until they are closed: a program that leaves has let go of its own references."""
_JOBS: list[_Job] = []


def install(world: World) -> None:
    """Abort the job when an exception reaches the top of this process; once per process."""
    if _JOBS:
        return
    job = _Job(world, os.getpid())
    _JOBS.append(job)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not job.is_mine():
            previous(kind, error, trace)
            return
        time.sleep(min(world.rank * STAGGER_SECONDS, LONGEST_STAGGER_SECONDS))
        with _real_stderr():
            previous(kind, error, trace)
            job.abort(f"{kind.__name__} on this rank: ending all {world.size} ranks")

    sys.excepthook = hook
    atexit.register(_leave)


@contextlib.contextmanager
def _real_stderr() -> Iterator[None]:
    """Print at once: torch.distributed's hook lets those before it write to a text of its own."""
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        with contextlib.redirect_stderr(sys.__stderr__):
            yield
    else:
        yield


def watch(comm: Communicator) -> None:
    """Shake hands on this communicator when the process ends, unless it was closed before."""
    _OPEN[:] = [other for other in _OPEN if not other.closed]
    _OPEN.append(comm)


def _leave() -> None:
    job = _JOBS[0]
    if not job.is_mine():
        return
    for comm in _OPEN:
        if comm.was_left:
            job.abort("this rank left the job in the middle of an operation")
        try:
            comm.leave()
        except Exception as error:
            job.abort(f"this rank left the job, and {type(error).__name__}: {error}")
