"""Ranks that are threads of one process: unit tests, notebooks, simulations of hundreds.

Messages are copied when they are sent, so that a sender never waits. A rank that fails closes the
*hub*, which ends the wait of all others with ``PeerLost``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue

import numpy as np

from zcomm import environment
from zcomm.arrays import HostMemory
from zcomm.errors import PeerLost
from zcomm.transports.rounds import Nbytes, message_to

POLL_SECONDS = 0.05


class Hub:
    """The mailboxes of ``size`` ranks, and the reason why the job ended, if it did."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure: str | None = None
        self._boxes: dict[tuple[int, int], SimpleQueue[HostMemory]] = {
            (source, target): SimpleQueue() for source in range(size) for target in range(size)
        }

    def box(self, source: int, target: int) -> SimpleQueue[HostMemory]:
        """Return the messages on their way from one rank to another."""
        return self._boxes[source, target]

    def fail(self, reason: str) -> None:
        """End the job: every rank that waits raises ``PeerLost``.

        The first reason stays.
        """
        self.failure = self.failure or reason


class LocalTransport:
    """One rank of a :class:`Hub`."""

    name = "local"

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank = rank
        self.size = hub.size
        self._hub = hub

    def exchange(
        self,
        sends: Mapping[int, HostMemory],
        recvs: Mapping[int, HostMemory],
        *,
        timeout: float | None = None,
    ) -> frozenset[int]:
        """See :class:`zcomm.transports.base.Transport`."""
        for peer, memory in sends.items():
            if memory.size:
                self._hub.box(self.rank, peer).put(memory.copy())
        deadline = None if timeout is None else time.monotonic() + timeout
        late = [
            peer
            for peer, memory in recvs.items()
            if memory.size and not self._receive(peer, memory, deadline)
        ]
        return frozenset(late)

    def rounds(
        self,
        ranks: Sequence[int],
        me: int,
        table: Sequence[HostMemory],
        outbox: Sequence[HostMemory],
    ) -> LocalRounds:
        """See :class:`zcomm.transports.base.Transport`."""
        return LocalRounds(self, ranks, me, table, outbox)

    def post(self, peer: int, memory: HostMemory) -> None:
        """Send a copy of some bytes, perhaps none."""
        self._hub.box(self.rank, peer).put(memory.copy())

    def _receive(self, peer: int, memory: HostMemory, deadline: float | None) -> bool:
        message = self.take(peer, deadline)
        if message is None:
            return False
        if message.size != memory.size:
            raise PeerLost(
                f"rank {peer} sent {message.size} bytes, rank {self.rank} expects {memory.size}"
            )
        np.copyto(memory, message)
        return True

    def take(self, peer: int, deadline: float | None) -> HostMemory | None:
        """Return the next message of a peer, None where the time ran out."""
        box = self._hub.box(peer, self.rank)
        while True:
            try:
                return box.get(timeout=POLL_SECONDS)
            except Empty:
                if self._hub.failure is not None:
                    raise PeerLost(self._hub.failure) from None
                if deadline is not None and time.monotonic() > deadline:
                    return None

    def abort(self, code: int) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        self._hub.fail(f"rank {self.rank} aborted the job with code {code}")

    def close(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""


class LocalRounds:
    """Rounds among threads; see :class:`zcomm.transports.rounds.Rounds`."""

    def __init__(
        self,
        transport: LocalTransport,
        ranks: Sequence[int],
        me: int,
        table: Sequence[HostMemory],
        outbox: Sequence[HostMemory],
    ) -> None:
        self._transport = transport
        self._outbox = outbox
        self._peers = {number: rank for number, rank in enumerate(ranks) if number != me}
        self._table = table
        self._own = table[me]
        self._awaited: list[int] = []

    def start(self, nbytes: Nbytes) -> list[int]:
        """See :class:`zcomm.transports.rounds.Rounds`."""
        late = self.finish() if self._awaited else []
        if late:
            return late
        for number, peer in self._peers.items():
            self._transport.post(peer, message_to(number, nbytes, self._own, self._outbox))
        self._awaited = list(self._peers)
        return late

    def finish(self, *, patient: bool = False) -> list[int]:
        """See :class:`zcomm.transports.rounds.Rounds`."""
        seconds = None if patient else environment.seconds("ZCOMM_TIMEOUT")
        deadline = None if seconds is None else time.monotonic() + seconds
        for number in list(self._awaited):
            message = self._transport.take(self._peers[number], deadline)
            if message is not None:
                self._fill(number, message)
                self._awaited.remove(number)
        return list(self._awaited)

    def _fill(self, number: int, message: HostMemory) -> None:
        row = self._table[number]
        if message.size > row.size:
            raise PeerLost(
                f"rank {self._peers[number]} sent {message.size} bytes in a round of {row.size}"
            )
        row[: message.size] = message
