"""Rounds: every rank of a group sends each other one small message, of a size known to it alone.

The *table* of a round has one row per rank, in the order of the group: a message to everybody is
written into the own row, those of the others arrive in theirs, and rows are valid until the next
round starts. Where each rank is sent a message of its own, they are written to the *outbox*, a
table of the same form. A row is as long as the largest message: whatever a peer sends is received
whole, so that ranks that mean different things find that out from what arrived, not from a message
that was cut.

Waiting is for small calls that everybody makes at about the same time: test at once and often, the
core given away between tests, and sleep only after about a millisecond. A reader must not assume
that a round is finished where it was started: encoding may lie between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from zcomm import patience
from zcomm.device import HostMemory

if TYPE_CHECKING:
    from mpi4py import MPI

SPINS = 3
"""Tests without a pause. More gain nothing on idle cores, where a yield returns at once, and keep
the core from the peer, or from the kernel that has its message, on busy ones."""

YIELDS = 1000
"""Tests with the core given away after each: about a millisecond where nobody takes it."""

FIRST_SLEEP = 10e-6
LONGEST_SLEEP = 200e-6
TAG = 6
MOST_SIZES = 64
"""Sizes of messages for which requests are kept."""


Nbytes = int | tuple[int, ...]
"""Bytes of a message to everybody, or of the message to each rank."""


class Rounds(Protocol):
    """The rounds of one group; one is under way at a time."""

    def start(self, nbytes: Nbytes) -> list[int]:
        """Send the first ``nbytes`` bytes of the own row to all others, and receive theirs.

        Several numbers, one per rank, are those of the rows of the outbox, which are sent instead.
        A round that ran out of time is finished first.

        Returns:
            The ranks that are still late for that one, see :meth:`finish`: nothing was started.
        """

    def finish(self, *, patient: bool = False) -> list[int]:
        """Wait until the messages of all others have arrived.

        Returns:
            The ranks of the group that have not sent theirs after ``ZCOMM_TIMEOUT`` seconds: none,
            usually, and none ever where ``patient``.
        """

    def sent(self) -> bool:
        """Tell whether the own messages have left, so that rows may be written again."""


def message_to(
    rank: int, nbytes: Nbytes, own: HostMemory, outbox: Sequence[HostMemory]
) -> HostMemory:
    """Return the message to a rank of the group."""
    return own[:nbytes] if isinstance(nbytes, int) else outbox[rank][: nbytes[rank]]


class MpiRounds:
    """Rounds over persistent requests of MPI: set up once, started at each round."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        me: int,
        table: Sequence[HostMemory],
        outbox: Sequence[HostMemory],
    ) -> None:
        self._comm = comm
        self._own = table[me]
        self._outbox = outbox
        self._others = [rank for rank in range(len(ranks)) if rank != me]
        self._peers = [ranks[rank] for rank in self._others]
        self._incoming = [comm.Recv_init(table[rank], ranks[rank], TAG) for rank in self._others]
        self._by_size: dict[Nbytes, list[MPI.Prequest]] = {}
        self._requests: list[MPI.Prequest] = []
        self._active = False

    def start(self, nbytes: Nbytes) -> list[int]:
        """See :class:`Rounds`."""
        late = self.finish() if self._active else []
        if late:
            return late
        requests = self._by_size.get(nbytes)
        if requests is None:
            requests = self._prepare(nbytes)
        self._active = True
        self._requests = requests
        for request in requests:  # sends come first, and receives while the others are on their way
            request.Start()
        return late

    def finish(self, *, patient: bool = False) -> list[int]:
        """See :class:`Rounds`."""
        waiting = None
        # What was sent is gone at once, as a rule; asking moves on what is to arrive.
        for request in self._requests:
            if not request.Test():
                waiting = waiting or _Waiting(patient)
                if not waiting.until(request.Test):
                    return self._late()
        self._active = False
        return []

    def sent(self) -> bool:
        """See :class:`Rounds`."""
        sends = self._requests[: len(self._peers)]
        return all(request.Test() for request in sends)

    def _late(self) -> list[int]:
        arrived = [request.Test() for request in self._incoming]
        late = [rank for rank, done in zip(self._others, arrived, strict=True) if not done]
        return late or self._others  # all have sent, but somebody does not receive

    def _prepare(self, nbytes: Nbytes) -> list[MPI.Prequest]:
        if len(self._by_size) >= MOST_SIZES:
            for requests in self._by_size.values():
                for request in requests[: len(self._peers)]:
                    request.Free()
            self._by_size.clear()
        pairs = zip(self._others, self._peers, strict=True)
        sends = [
            self._comm.Send_init(message_to(rank, nbytes, self._own, self._outbox), peer, TAG)
            for rank, peer in pairs
        ]
        self._by_size[nbytes] = [*sends, *self._incoming]
        return self._by_size[nbytes]


class _Waiting:
    """The patience of one round: it wears thin over all its messages together."""

    def __init__(self, patient: bool) -> None:
        self._patient = patient
        self._deadline: float | None = None

    def until(self, test: Callable[[], Any]) -> bool:
        """Wait for one message; tell whether it came in time."""
        for _ in range(SPINS):
            if test():
                return True
        for _ in range(YIELDS):
            os.sched_yield()
            if test():
                return True
        return self._asleep(test)

    def _asleep(self, test: Callable[[], Any]) -> bool:
        if not self._patient and self._deadline is None:
            self._deadline = time.monotonic() + patience.limit()
        pause = FIRST_SLEEP
        while not test():
            if self._deadline is not None and time.monotonic() > self._deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_SLEEP)
        return True
