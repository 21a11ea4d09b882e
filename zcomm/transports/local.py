"""Ranks that are threads of one process: unit tests, notebooks, simulations of hundreds.

Messages are copied when they are sent, so that a sender never waits. A rank that fails closes the
*hub*, which ends the wait of all others with ``PeerLost``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue

import numpy as np

from zcomm import patience
from zcomm.arrays import HostMemory
from zcomm.errors import PeerLost
from zcomm.transports.rounds import Nbytes, message_to
from zcomm.transports.windows import Windows

POLL_SECONDS = 0.05
ROUND = -1
"""The tag of the messages of rounds."""

Letter = tuple[int, HostMemory]
"""A tag and a message."""


class Hub:
    """The mailboxes of ``size`` ranks, and the reason why the job ended, if it did."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure: str | None = None
        self.windows: dict[int, Windows] = {}
        self._boxes: dict[tuple[int, int], SimpleQueue[Letter]] = {
            (source, target): SimpleQueue() for source in range(size) for target in range(size)
        }

    def box(self, source: int, target: int) -> SimpleQueue[Letter]:
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
        self._letters: dict[tuple[int, int], deque[HostMemory]] = {}

    def exchange(
        self,
        sends: Mapping[int, HostMemory],
        recvs: Mapping[int, HostMemory],
        *,
        timeout: float | None = None,
        tag: int = 0,
    ) -> frozenset[int]:
        """See :class:`zcomm.transports.base.Transport`."""
        self.send(sends, tag)
        incoming = self.receive(recvs, tag)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not incoming.done():
            if deadline is not None and time.monotonic() > deadline:
                return frozenset(incoming.late())
            incoming.wait(POLL_SECONDS)
        return frozenset()

    def send(self, sends: Mapping[int, HostMemory], tag: int) -> Arrivals:
        """See :class:`zcomm.transports.base.Transport`."""
        for peer, memory in sends.items():
            if memory.size:
                self._hub.box(self.rank, peer).put((tag, memory.copy()))
        return Arrivals(self, {}, tag)

    def receive(self, recvs: Mapping[int, HostMemory], tag: int) -> Arrivals:
        """See :class:`zcomm.transports.base.Transport`."""
        return Arrivals(self, {peer: m for peer, m in recvs.items() if m.size}, tag)

    def cancel(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""

    def poll(self) -> None:
        """See :class:`zcomm.transports.base.Transport`.

        Raises:
            PeerLost: the job has ended.
        """
        if self._hub.failure is not None:
            raise PeerLost(self._hub.failure)

    @property
    def windows(self) -> Windows | None:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._hub.windows.get(self.rank)

    def fetch(self, peer: int, tag: int) -> HostMemory | None:
        """Return the next message of a tag from a peer, None where there is none yet."""
        letters = self._letters.setdefault((peer, tag), deque())
        while not letters and self._sort(peer, 0.0):
            pass
        return letters.popleft() if letters else None

    def wait(self, peer: int, seconds: float) -> None:
        """Wait for any message from a peer.

        Raises:
            PeerLost: the job has ended.
        """
        if not self._sort(peer, seconds) and self._hub.failure is not None:
            raise PeerLost(self._hub.failure)

    def _sort(self, peer: int, seconds: float) -> bool:
        """Put the next letter from a peer to the others of its tag; tell whether there was one."""
        box = self._hub.box(peer, self.rank)
        try:
            tag, message = box.get(timeout=seconds) if seconds else box.get_nowait()
        except Empty:
            return False
        self._letters.setdefault((peer, tag), deque()).append(message)
        return True

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
        """Send a copy of some bytes, perhaps none, in a round."""
        self._hub.box(self.rank, peer).put((ROUND, memory.copy()))

    def take(self, peer: int, deadline: float | None) -> HostMemory | None:
        """Return the next message of a peer in a round, None where the time ran out."""
        while (message := self.fetch(peer, ROUND)) is None:
            if deadline is not None and time.monotonic() > deadline:
                return None
            self.wait(peer, POLL_SECONDS)
        return message

    def abort(self, code: int) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        self._hub.fail(f"rank {self.rank} aborted the job with code {code}")

    def close(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""


class Arrivals:
    """Messages that a rank waits for."""

    def __init__(self, transport: LocalTransport, missing: dict[int, HostMemory], tag: int) -> None:
        self._transport = transport
        self._missing = missing
        self._tag = tag

    def done(self) -> bool:
        """See :class:`zcomm.transports.base.Pending`."""
        for peer, memory in list(self._missing.items()):
            message = self._transport.fetch(peer, self._tag)
            if message is None:
                continue
            if message.size != memory.size:
                raise PeerLost(
                    f"rank {peer} sent {message.size} bytes, rank {self._transport.rank} expects "
                    f"{memory.size}"
                )
            np.copyto(memory, message)
            del self._missing[peer]
        return not self._missing

    def late(self) -> list[int]:
        """See :class:`zcomm.transports.base.Pending`."""
        return list(self._missing)

    def wait(self, seconds: float) -> None:
        """Wait until the first missing peer says anything."""
        self._transport.wait(next(iter(self._missing)), POLL_SECONDS)


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
        seconds = None if patient else patience.limit()
        deadline = None if seconds is None else time.monotonic() + seconds
        for number in list(self._awaited):
            message = self._transport.take(self._peers[number], deadline)
            if message is not None:
                self._fill(number, message)
                self._awaited.remove(number)
        return list(self._awaited)

    def sent(self) -> bool:
        """See :class:`zcomm.transports.rounds.Rounds`."""
        return True

    def _fill(self, number: int, message: HostMemory) -> None:
        row = self._table[number]
        if message.size > row.size:
            raise PeerLost(
                f"rank {self._peers[number]} sent {message.size} bytes in a round of {row.size}"
            )
        row[: message.size] = message
