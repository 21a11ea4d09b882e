"""The end of the process: threads that may be inside torch's code end, or rest, before Python does.

Ours are daemons, so that one which hangs keeps no process from ending. But a thread that asks for
the interpreter's lock in torch's code while Python ends is unwound there, through functions that
may not raise: the process is aborted ("terminate called without an active exception") after all
went well. Those of torch's gloo ask for it when they free what a collective sent, a little after
the collective has ended for those who wait (pytorch/pytorch issue 190489).

Do not assume that what was awaited has left torch's code: the last message that a rank sends is
awaited by nobody, and a thread may not have had a core since.
"""

from __future__ import annotations

import atexit
import time
import weakref
from pathlib import Path
from typing import Protocol

SECONDS = 2.0
"""For all together: what hangs must not keep the process from ending."""

GLOO_THREAD = "pt_gloo_runloop"
LOOKS = 3
LOOK_SECONDS = 1e-3
"""Between looks the interpreter's lock is given away: who slept for want of it runs at the next."""


class Stoppable(Protocol):
    """What has threads."""

    def stop(self, seconds: float | None = None) -> None:
        """Finish what is queued and end the threads; wait for that, or at most so long."""


OPERATIONS: list[weakref.ref[Stoppable]] = []
MESSAGES: list[weakref.ref[Stoppable]] = []
"""Operations are stopped first: what is queued there sends messages."""


def after(stage: list[weakref.ref[Stoppable]], stoppable: Stoppable) -> None:
    """Let the process end after something, as long as that exists."""
    stage.append(weakref.ref(stoppable, stage.remove))


@atexit.register
def _leave() -> None:
    """Wait for all; registered by the import of zcomm, this runs after what users do at the end."""
    end = time.monotonic() + SECONDS
    for stage in (OPERATIONS, MESSAGES):
        for stoppable in [reference() for reference in stage.copy()]:
            if stoppable is not None:
                stoppable.stop(max(end - time.monotonic(), 0.0))
    rest = 0
    while rest < LOOKS and time.monotonic() < end:
        states = _states(GLOO_THREAD)
        if not states:
            return
        rest = rest + 1 if set(states) == {"S"} else 0
        time.sleep(LOOK_SECONDS)


def _states(name: str) -> str:
    """Return the states, in Linux's letters, of this process's threads of a name; S is asleep."""
    states = ""
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            thread, _, rest = stat.read_text(errors="replace").partition("(")[2].rpartition(") ")
        except OSError:  # it ended meanwhile
            continue
        if thread == name:
            states += rest[0]
    return states
