"""Several pieces of one operation at a time, so that encoding, hops and decoding overlap.

A collective is written for one piece, as a generator: it yields what it waits for. Here the
generators of all pieces run, in one thread, without a task of the operating system for any.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

from zcomm import environment
from zcomm.arrays import DeviceMemory, Memory
from zcomm.collectives.channel import Channel
from zcomm.collectives.courier import Courier, Direct, Posted, Written
from zcomm.collectives.wire import host_kernels
from zcomm.pieces import Piece, in_flight, logical_nbytes
from zcomm.plan import Plan
from zcomm.transports.base import Pending

SMALL_NBYTES = 64 * 1024
"""Up to this size an operation of one piece waits in plain exchanges: fewer calls."""

FIRST_SLEEP = 10e-6
LONGEST_SLEEP = 100e-6
BESIDE_SLEEP = 300e-6
"""The longest sleep in the worker thread, where every wake-up takes the core from computing."""

Steps = Generator[Pending, None, None]
Start = Callable[[Piece, Courier], Steps]


def run(channel: Channel, plan: Plan, like: Memory, start: Start, written: Written) -> None:
    """Run a collective: ``start`` makes the generator of a piece; arrays lie as ``like`` does.

    1. Start the next piece, unless enough are under way: it posts its receives.
    2. Go through them, the oldest first, and resume all whose messages have arrived. A piece that
       encodes first ends the round, so that older ones are looked at again before the next.
    3. After a round in which something moved give the core away once; otherwise sleep, longer each
       time. After ``ZCOMM_TIMEOUT`` seconds in which nothing moves, say who is late.

    Device memory goes piece by piece through exchanges, over NCCL the whole as one.
    """
    if isinstance(like, DeviceMemory):
        whole = channel.transport.device is not None
        for number, piece in enumerate(plan.whole if whole else plan.pieces):
            _drain(start(piece, Direct(channel, piece.plan, number)))
        return
    with host_kernels():
        _run_on_host(channel, plan, start, written)


def _run_on_host(channel: Channel, plan: Plan, start: Start, written: Written) -> None:
    pieces = plan.pieces
    if len(pieces) == 1 and logical_nbytes(plan) <= SMALL_NBYTES:
        _drain(start(pieces[0], Direct(channel, pieces[0].plan, 0)))
        return
    flights: deque[_Flight] = deque()
    try:
        _schedule(channel, plan, start, written, flights)
    except BaseException:
        for flight in flights:
            flight.steps.close()
        channel.transport.cancel()
        raise


def _drain(steps: Steps) -> None:
    for pending in steps:
        assert pending.done()


@dataclass
class _Flight:
    """A piece under way."""

    steps: Steps
    pending: Pending | None = None
    fresh: bool = True

    def begin(self) -> None:
        """Post the receives, where that is possible at once."""
        self.pending = next(self.steps, None)
        if self.pending is not None and self.pending.done():
            self.pending = next(self.steps, None)

    def resume(self) -> None:
        """Go on to the next wait."""
        self.fresh = False
        self.pending = next(self.steps, None)


def _schedule(
    channel: Channel, plan: Plan, start: Start, written: Written, flights: deque[_Flight]
) -> None:
    pieces = plan.pieces
    if channel.gate.waiting is not None:
        os.sched_yield()  # ranks that share this core begin their handshake before this one encodes
    number, most, idle = 0, in_flight(plan), _Idle(channel, plan)
    while flights or number < len(pieces):
        begun = number < len(pieces) and len(flights) < most
        if begun:
            courier = Posted(channel, pieces[number].plan, number, written)
            flights.append(_Flight(start(pieces[number], courier)))
            flights[-1].begin()
            number += 1
        channel.transport.poll()
        if _round(flights) or begun:
            idle.reset()
        else:
            idle.rest(flights[0].pending)
        while flights and flights[0].pending is None:
            flights.popleft()


def _round(flights: deque[_Flight]) -> bool:
    """Resume what can be resumed; tell whether anything was."""
    moved = False
    for flight in flights:
        fresh = flight.fresh
        while flight.pending is not None and flight.pending.done():
            flight.resume()
            moved = True
        if fresh and not flight.fresh:
            break
    return moved


class _Idle:
    """Gives the core away, and notices when nothing has happened for too long."""

    def __init__(self, channel: Channel, plan: Plan) -> None:
        beside = threading.current_thread() is not threading.main_thread()
        self._longest = BESIDE_SLEEP if beside else LONGEST_SLEEP
        self._channel = channel
        self._doing = plan.counted_as
        self._timeout = environment.seconds("ZCOMM_TIMEOUT")
        self._sleep = FIRST_SLEEP
        self._since: float | None = None

    def reset(self) -> None:
        """Something has moved."""
        self._sleep, self._since = FIRST_SLEEP, None
        os.sched_yield()

    def rest(self, pending: Pending | None) -> None:
        """Nothing has moved; ``pending`` is what the oldest piece waits for.

        Raises:
            CollectiveTimeout: not for ``ZCOMM_TIMEOUT`` seconds.
        """
        if pending is None:
            return
        with self._channel.clock.measure("comm"):
            pending.wait(self._sleep)
        self._sleep = min(self._sleep * 1.5, self._longest)
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since > self._timeout and not pending.done():
            raise self._channel.timed_out(self._doing, self._timeout, pending.late())
