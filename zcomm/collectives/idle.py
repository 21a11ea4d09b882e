"""Waiting without burning a core, and noticing that nothing has happened for too long.

Where the caller waits for an operation, its thread or the worker's sleeps briefly, so that what
arrives is seen soon. Where the caller computes meanwhile, every wake-up of the worker thread takes
the core from computing (20 to 30 microseconds, more than a message is worth): there it sleeps about
half as long as a piece takes, which leaves enough pieces under way to keep a link busy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import cached_property

from zcomm import patience
from zcomm.collectives.channel import Channel
from zcomm.plan import Plan
from zcomm.transports.base import Pending

FIRST_SLEEP = 10e-6
LONGEST_SLEEP = 100e-6

FIRST_SLEEP_BESIDE = 50e-6
LONGEST_SLEEP_BESIDE = 500e-6
"""Beyond, messages that are too large for what MPI holds itself wait for one another."""

SHARE_BESIDE = 0.5
"""A sleep beside computing is this part of the time between the ends of two pieces."""


class _Beside(threading.local):
    """What a thread knows of its caller: ``computing`` tells whether that does something else."""

    computing: Callable[[], bool] = staticmethod(lambda: False)


beside = _Beside()


class Idle:
    """Gives the core away, and notices when nothing has happened for too long."""

    def __init__(self, channel: Channel, plan: Plan) -> None:
        self._channel = channel
        self._doing = plan.counted_as
        self._sleep = FIRST_SLEEP
        self._since: float | None = None
        self._begin = time.monotonic()
        self._computing = beside.computing

    @cached_property
    def _timeout(self) -> float:
        return patience.limit()

    def reset(self) -> None:
        """Something has moved."""
        self._sleep, self._since = FIRST_SLEEP, None
        if not self._computing():
            os.sched_yield()

    def rest(self, pending: Pending | None, num_ended: int = 0) -> None:
        """Nothing has moved; ``pending`` is what the oldest piece waits for.

        ``num_ended`` pieces have ended since this was made.

        Raises:
            CollectiveTimeout: not for ``ZCOMM_TIMEOUT`` seconds.
        """
        if pending is None:
            return
        with self._channel.clock.measure("comm"):
            pending.wait(self._pause(num_ended))
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since > self._timeout and not pending.done():
            raise self._channel.timed_out(self._doing, self._timeout, pending.late())

    def _pause(self, num_ended: int) -> float:
        if self._computing():
            apart = (time.monotonic() - self._begin) / (num_ended + 1)
            return min(max(SHARE_BESIDE * apart, FIRST_SLEEP_BESIDE), LONGEST_SLEEP_BESIDE)
        pause = self._sleep
        self._sleep = min(pause * 1.5, LONGEST_SLEEP)
        return pause
