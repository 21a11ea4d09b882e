"""One rank fails: all ranks end.

The hooks of ``zcomm.init(abort=True)``. An uncaught exception prints its traceback through the hook
that was there before, then aborts the job. A rank that leaves (``sys.exit``, the end of the script)
shakes hands once more, as the operation "exit": the others do the same when they leave, or are
found in another operation, which ends them all.
"""

from __future__ import annotations

import atexit
import sys
import time
from types import TracebackType

from zcomm.communicator import Communicator
from zcomm.errors import CollectiveMismatch
from zcomm.transports.base import Transport

STAGGER_SECONDS = 0.25
"""An error that all ranks raise is printed by the lowest, which ends the others before it is their
turn."""

LONGEST_STAGGER_SECONDS = 3.0
_OPEN: list[Communicator] = []
"""Held until they are closed: a program that leaves has let go of its own references."""
_INSTALLED: list[Transport] = []


def install(transport: Transport) -> None:
    """Abort the job through ``transport`` when an exception reaches the top of this process.

    Once per process.
    """
    if _INSTALLED:
        return
    _INSTALLED.append(transport)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        time.sleep(min(transport.rank * STAGGER_SECONDS, LONGEST_STAGGER_SECONDS))
        previous(kind, error, trace)
        _abort(transport, f"{kind.__name__} on this rank: ending all {transport.size} ranks")

    sys.excepthook = hook
    atexit.register(_leave)


def watch(comm: Communicator) -> None:
    """Shake hands on this communicator when the process ends, unless it was closed before."""
    _OPEN[:] = [other for other in _OPEN if not other.closed]
    _OPEN.append(comm)


def _leave() -> None:
    for comm in _OPEN:
        try:
            comm.leave()
        except CollectiveMismatch as error:
            _abort(_INSTALLED[0], f"this rank left while others did not: {error}")


def _abort(transport: Transport, text: str) -> None:
    print(f"zcomm[{transport.rank}]: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    transport.abort(1)
