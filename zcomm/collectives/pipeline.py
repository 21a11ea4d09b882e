"""Several pieces of one operation at a time, so that encoding, hops and decoding overlap.

A collective writes one *script* for each piece, once for a plan: which jobs the kernels do, which
messages travel. Its steps are a generator, which yields what it waits for. Here the generators of
all pieces run, in one thread, without a task of the operating system for any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from zcomm.arrays import DeviceMemory, HostMemory, View
from zcomm.codecs.backend import kernels
from zcomm.collectives.channel import Channel
from zcomm.collectives.courier import Courier, Direct, Mail, Posted, Ways, Written
from zcomm.collectives.idle import Idle
from zcomm.collectives.memories import Bind, Memories, Numbers
from zcomm.collectives.wire import host_kernels
from zcomm.pieces import Piece, in_flight, logical_nbytes
from zcomm.plan import Plan
from zcomm.seeds import Draws
from zcomm.traffic import Counter, Tally
from zcomm.transports.base import Pending

SMALL_NBYTES = 64 * 1024
"""Up to this size an operation of one piece waits in plain exchanges: fewer calls."""

Steps = Generator[Pending, None, None]


class Script(Protocol):
    """What one rank does for a piece, worked out once: it holds for any arrays of some dtypes."""

    mail: Mail
    scratch_nbytes: int

    def steps(self, channel: Channel, courier: Courier, memories: Memories, draws: Draws) -> Steps:
        """Run the piece."""


Write = Callable[[Piece, Ways, bool], Script]
"""Writes the script of a piece, given the ways of its messages, and whether as few launches as
possible matter more than an early start."""


class Prepared:
    """A collective over one plan, for arrays of some dtypes: all that does not depend on the call.

    Which kernels work in host memory is decided here, once.
    """

    def __init__(self, channel: Channel, plan: Plan, write: Write, written: Written) -> None:
        self._channel = channel
        self._plan = plan
        self._write = write
        self._written = written
        chosen = kernels()
        self._bind: Bind | None = getattr(chosen, "bind", None)
        self._most = in_flight(plan)

    def run(self, views: Sequence[View], draws: Draws) -> None:
        """Run it on the caller's arrays.

        1. Start the next piece, unless enough are under way: it posts its receives.
        2. Go through them, the oldest first, and resume all whose messages have arrived. A piece
           that encodes first ends the round, so that older ones are looked at again before the
           next.
        3. After a round in which something moved give the core away once; otherwise sleep, longer
           each time. After ``ZCOMM_TIMEOUT`` seconds in which nothing moves, say who is late.

        Device memory goes piece by piece through exchanges, over NCCL the whole as one.
        """
        if isinstance(views[0].memory, DeviceMemory):
            whole = self._channel.transport.device is not None
            scripts = self._whole if whole else self._exchanged
            self._exchange(scripts, Memories.of_call(views, None), draws)
            return
        memories = Memories.of_call(views, self._bind)
        if self._small:
            self._exchange(self._exchanged, memories, draws)
        elif self._bind is not None:
            self._pipeline(memories, draws)
        else:
            with host_kernels():
                self._pipeline(memories, draws)

    def _pipeline(self, memories: Memories, draws: Draws) -> None:
        how = self._most, self._bind, self._scratch_nbytes
        loop = _Loop(self._channel, self._plan, self._posted, memories, draws, *how)
        try:
            loop.run()
        except BaseException:
            loop.give_up()
            raise
        self._tally.calls += 1

    def _exchange(
        self, scripts: Sequence[tuple[Piece, Script]], memories: Memories, draws: Draws
    ) -> None:
        """Run piece after piece, hop after hop."""
        channel = self._channel
        for number, (piece, script) in enumerate(scripts):
            scratch = channel.pool.take(script.scratch_nbytes, memories.like)
            own = memories.of_piece([scratch[:0], scratch], self._bind)
            courier = Direct(channel, piece.plan, number, own, script.mail)
            for pending in script.steps(channel, courier, own, draws):
                assert pending.done()
            channel.pool.give(scratch)

    @cached_property
    def _small(self) -> bool:
        plan = self._plan
        return len(plan.pieces) == 1 and logical_nbytes(plan) <= SMALL_NBYTES

    @cached_property
    def _posted(self) -> list[Script]:
        return [script for _, script in self._scripts(self._plan.pieces, self._channel)]

    @cached_property
    def _scratch_nbytes(self) -> int:
        return max(script.scratch_nbytes for script in self._posted)

    @cached_property
    def _exchanged(self) -> list[tuple[Piece, Script]]:
        return self._scripts(self._plan.pieces, None)

    @cached_property
    def _whole(self) -> list[tuple[Piece, Script]]:
        return self._scripts(self._plan.whole, None)

    def _scripts(
        self, pieces: Sequence[Piece], windowed: Channel | None
    ) -> list[tuple[Piece, Script]]:
        """Write the scripts of pieces; without a channel that has windows every message is sent."""
        made, numbers = [], Numbers(2 * len(self._plan.layouts))
        for piece in pieces:
            ways = Ways(windowed, piece.plan, self._written, numbers)
            made.append((piece, self._write(piece, ways, windowed is None)))
        return made

    @cached_property
    def _tally(self) -> Tally:
        """The tally of what calls send in pieces."""
        plan, me = self._plan, self._channel.rank
        counters: dict[tuple[str, int], list[int]] = {}
        for index in range(len(plan.hops)):
            for level in {message.level for message in plan.messages(index, me)}:
                counters.setdefault((plan.counted_as, level), [0, 0, 0])[0] += 1
            for piece in plan.pieces:
                for message in piece.plan.messages(index, me):
                    counter = counters[plan.counted_as, message.level]
                    counter[1] += message.logical_nbytes
                    counter[2] += message.wire_nbytes
        sums = {key: Counter(*values) for key, values in counters.items()}
        return self._channel.traffic.tally(sums)


@dataclass
class _Flight:
    """A piece under way; ``stage`` is the number of waits behind it."""

    steps: Steps
    pending: Pending | None = None
    stage: int = 0

    def begin(self) -> None:
        """Post the receives, where that is possible at once."""
        self.pending = next(self.steps, None)
        if self.pending is not None and self.pending.done():
            self.resume()

    def resume(self) -> None:
        """Go on to the next wait."""
        self.stage += 1
        self.pending = next(self.steps, None)


class _Seat(NamedTuple):
    """What the pieces work in that use one slot, one after the other."""

    peers: tuple[int, ...]
    scratch: HostMemory
    memories: Memories


FRESH = 1
"""The stage of a piece that has posted its receives and not encoded."""


class _Loop:
    """The pieces of one call under way, see :meth:`Prepared.run`."""

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        scripts: Sequence[Script],
        memories: Memories,
        draws: Draws,
        most: int,
        bind: Bind | None,
        scratch_nbytes: int,
    ) -> None:
        self._channel = channel
        self._plan = plan
        self._windows = channel.transport.windows
        self._bind = bind
        self._scratch_nbytes = scratch_nbytes
        self._scripts = scripts
        self._memories = memories
        self._draws = draws
        self._most = most
        self._flights: deque[_Flight] = deque()
        self._seats: list[_Seat] = []
        self._number = 0

    def run(self) -> None:
        """Run all pieces."""
        channel, flights, idle = self._channel, self._flights, Idle(self._channel, self._plan)
        while flights or self._number < len(self._scripts):
            begun = self._begin()
            channel.transport.poll()
            if self._round() or begun:
                idle.reset()
            else:
                idle.rest(flights[0].pending, self._number - len(flights))
            while flights and flights[0].pending is None:
                flights.popleft()
        channel.pool.give(*[seat.scratch for seat in self._seats])

    def give_up(self) -> None:
        """Leave all that is under way; memory that a message may still reach is not used again."""
        for flight in self._flights:
            flight.steps.close()
        self._channel.transport.cancel()

    def _begin(self) -> bool:
        """Start the next piece, unless enough are under way; tell whether it was started."""
        if self._number == len(self._scripts) or len(self._flights) == self._most:
            return False
        channel, number, script = self._channel, self._number, self._scripts[self._number]
        memories = self._seat(script).memories
        courier = Posted(channel, number, self._most, memories, script.mail)
        flight = _Flight(script.steps(channel, courier, memories, self._draws))
        self._flights.append(flight)
        flight.begin()
        self._number += 1
        return True

    def _seat(self, script: Script) -> _Seat:
        """Return what the next piece works in: what the piece before in the same slot did."""
        place, peers = self._number % self._most, script.mail.ways.peers
        if place == len(self._seats):
            scratch = self._channel.pool.take(self._scratch_nbytes, self._memories.like)
            assert not isinstance(scratch, DeviceMemory)
            self._seats.append(_Seat(peers, scratch, self._place(place, peers, scratch)))
        seat = self._seats[place]
        if seat.peers != peers:
            memories = self._place(place, peers, seat.scratch)
            seat = self._seats[place] = _Seat(peers, seat.scratch, memories)
        return seat

    def _place(self, slot: int, peers: Sequence[int], scratch: HostMemory) -> Memories:
        """Return the memories of a piece: the slot of this rank, scratch, and those of peers."""
        channel, windows, most = self._channel, self._windows, self._most
        own = [scratch[:0], scratch]
        if windows is not None:
            own[0] = windows.slot(channel.transport.rank, slot, most)
            own += [windows.slot(channel.ranks[peer], slot, most) for peer in peers]
        return self._memories.of_piece(own, self._bind)

    def _round(self) -> bool:
        """Resume what can be resumed; tell whether anything was.

        Messages of one hop arrive in the order of the pieces: one that is not there yet holds back
        the younger ones.
        """
        moved = False
        waiting = 0
        for flight in self._flights:
            fresh = flight.stage == FRESH
            while flight.pending is not None and not waiting >> flight.stage & 1:
                if not flight.pending.done():
                    waiting |= 1 << flight.stage
                    break
                flight.resume()
                moved = True
            if fresh and flight.stage > FRESH:
                break
        return moved
