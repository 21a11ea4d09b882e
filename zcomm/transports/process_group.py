"""Ranks that are those of a torch.distributed process group: point-to-point messages over gloo.

gloo says that a message has arrived only to a thread that waits for it, and a wait that times out
breaks the connections of all ranks. So every peer has two threads here, one for what it sends and
one for what it is sent: each waits, without a limit, for one message after the other, in the order
in which they were started. Time limits belong to those who wait for the threads.

Do not assume that a message can be given up: one that was started and has not arrived will be
written to its memory when it does. A transport that had to give messages up carries nothing more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from zcomm import environment, leaving, patience
from zcomm.device import HostMemory
from zcomm.errors import PeerLost
from zcomm.transports.rounds import Nbytes, message_to
from zcomm.transports.windows import Windows

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

FOREVER = timedelta(days=365)
POLL_SECONDS = 0.05
SHORTEST_WAIT = 0.5e-3
"""A message that arrives ends a wait at once; only what arrives through a window has to be polled,
and every wake-up takes the core from those who compute."""
ROUND = 1
TAG = 2
"""Tags of gloo: those of rounds, and the first of the others."""


def host_group(group: ProcessGroup | None) -> ProcessGroup:
    """Make a gloo group of the ranks of a group, which call this in one order.

    A group of our own: its messages meet no others, whatever the backend and the use of ``group``.
    """
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)  # type: ignore[no-any-return]


class ProcessGroupTransport:
    """The ranks of a gloo group that nobody else sends messages in.

    ``group``: a ProcessGroup, or torch's ProcessGroupGloo itself. ``release`` is called at the end.
    """

    name = "process_group"

    def __init__(self, group: Any, release: Callable[[], None] | None = None) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.moved = threading.Condition()
        """Notified whenever a message is done."""
        self.windows: Windows | None = None
        self._group = group
        self._release = release
        self._limit = environment.nbytes("ZCOMM_MESSAGE_LIMIT")
        self._lines: dict[tuple[str, int], SimpleQueue[_Message | None]] = {}
        self._threads: list[threading.Thread] = []
        self._num_pending = 0
        self._failure: str | None = None
        self._process = os.getpid()
        leaving.after(leaving.MESSAGES, self)

    def exchange(
        self,
        sends: Mapping[int, HostMemory],
        recvs: Mapping[int, HostMemory],
        *,
        timeout: float | None = None,
        tag: int = 0,
    ) -> frozenset[int]:
        """See :class:`zcomm.transports.base.Transport`."""
        incoming, outgoing = self.receive(recvs, tag), self.send(sends, tag)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (incoming.done() and outgoing.done()):
            self.poll()
            if deadline is not None and time.monotonic() > deadline:
                return frozenset(incoming.late())
            (outgoing if incoming.done() else incoming).wait(POLL_SECONDS)
        return frozenset()

    def send(self, sends: Mapping[int, HostMemory], tag: int) -> Messages:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._start("send", sends, TAG + tag)

    def receive(self, recvs: Mapping[int, HostMemory], tag: int) -> Messages:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._start("recv", recvs, TAG + tag)

    def _start(self, kind: str, memories: Mapping[int, HostMemory], tag: int) -> Messages:
        made = Messages(self)
        for peer, memory in memories.items():
            for part in self._parts(memory):
                self.start(kind, peer, part, tag, made)
        return made

    def start(self, kind: str, peer: int, memory: HostMemory, tag: int, made: Messages) -> None:
        """Start to ``send`` or ``recv`` one message, as one of ``made``."""
        self.poll()
        tensor, line = _tensor(memory), self._line(kind, peer)
        try:
            work = getattr(self._group, kind)([tensor], peer, tag)
        except RuntimeError as error:
            self.lost(peer, error)
            self.poll()
        with self.moved:
            made.peers.append(peer)
            self._num_pending += 1
        line.put(_Message(work, tensor, made))

    def _line(self, kind: str, peer: int) -> SimpleQueue[_Message | None]:
        if (kind, peer) not in self._lines:
            queue: SimpleQueue[_Message | None] = SimpleQueue()
            name = f"zcomm-{kind}-{peer}"
            serve = threading.Thread(target=self._serve, args=(peer, queue), name=name, daemon=True)
            serve.start()
            self._threads.append(serve)
            self._lines[kind, peer] = queue
        return self._lines[kind, peer]

    def _serve(self, peer: int, queue: SimpleQueue[_Message | None]) -> None:
        """Wait for the messages from or to a peer, in the order in which they were started."""
        while (message := queue.get()) is not None:
            try:
                message.work.wait(FOREVER)
            except RuntimeError as error:
                self.lost(peer, error)
                return
            made = message.made
            # First: torch's objects must not be freed while the process ends, and it may end then.
            del message
            with self.moved:
                made.peers.remove(peer)
                self._num_pending -= 1
                self.moved.notify_all()

    def lost(self, peer: int, error: Exception) -> None:
        """Say that a peer cannot be reached any more; the first who says so is believed."""
        words = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0]
        with self.moved:
            self._failure = self._failure or f"rank {self.rank} lost rank {peer}: {words}"
            self.moved.notify_all()

    def cancel(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        with self.moved:
            if self._num_pending:
                self._failure = self._failure or (
                    f"rank {self.rank} gave up messages of an operation that failed"
                )

    def poll(self) -> None:
        """See :class:`zcomm.transports.base.Transport`.

        Raises:
            PeerLost: a peer cannot be reached any more, or messages were given up.
        """
        if self._failure is not None:
            raise PeerLost(self._failure)

    def rounds(
        self,
        ranks: Sequence[int],
        me: int,
        table: Sequence[HostMemory],
        outbox: Sequence[HostMemory],
    ) -> ProcessGroupRounds:
        """See :class:`zcomm.transports.base.Transport`."""
        return ProcessGroupRounds(self, ranks, me, table, outbox)

    def abort(self, code: int) -> None:
        """See :class:`zcomm.transports.base.Transport`.

        The other ranks find their connections closed.
        """
        os._exit(code)

    def close(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        self.windows = None
        # What was given up arrives when the peer sends it, which may be never.
        self.stop(0.0 if self._num_pending else None)
        if self._release is not None:
            self._release()

    def stop(self, seconds: float | None = None) -> None:
        """End the threads when their messages have; wait for that, or at most so long."""
        if os.getpid() != self._process:  # a fork has no such threads
            return
        for queue in list(self._lines.values()):
            queue.put(None)
        if seconds is not None and self._failure is not None:
            seconds = 0.0  # what is on its way may never arrive
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(end - time.monotonic(), 0.0))
        # Whoever still sends, at the end of the process, gets new ones.
        self._lines.clear()
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _parts(self, memory: HostMemory) -> Iterator[HostMemory]:
        for start in range(0, memory.size, self._limit):
            yield memory[start : start + self._limit]


class _Message:
    """One message on its way; gloo does not hold the memory, so this does."""

    def __init__(self, work: Any, tensor: torch.Tensor, made: Messages) -> None:
        self.work = work
        self.tensor = tensor
        self.made = made


class Messages:
    """Messages on their way; ``peers`` are those whose message is not done."""

    def __init__(self, transport: ProcessGroupTransport) -> None:
        self.peers: list[int] = []
        self._moved = transport.moved

    def done(self) -> bool:
        """See :class:`zcomm.transports.base.Pending`."""
        return not self.peers

    def late(self) -> list[int]:
        """See :class:`zcomm.transports.base.Pending`."""
        with self._moved:
            return list(self.peers)

    def wait(self, seconds: float) -> None:
        """Wait until any message is done; see :class:`zcomm.transports.base.Pending`."""
        with self._moved:
            if self.peers:
                self._moved.wait(max(seconds, SHORTEST_WAIT))


class ProcessGroupRounds:
    """Rounds over messages of a process group; see :class:`zcomm.transports.rounds.Rounds`."""

    def __init__(
        self,
        transport: ProcessGroupTransport,
        ranks: Sequence[int],
        me: int,
        table: Sequence[HostMemory],
        outbox: Sequence[HostMemory],
    ) -> None:
        self._transport = transport
        self._own = table[me]
        self._outbox = outbox
        self._table = table
        self._peers = {number: rank for number, rank in enumerate(ranks) if number != me}
        self._incoming = self._outgoing = Messages(transport)

    def start(self, nbytes: Nbytes) -> list[int]:
        """See :class:`zcomm.transports.rounds.Rounds`."""
        late = self.finish()
        if late:
            return late
        moves = self._transport
        self._incoming, self._outgoing = Messages(moves), Messages(moves)
        for number, peer in self._peers.items():
            # Room for the longest there may be; gloo takes a shorter one.
            moves.start("recv", peer, self._table[number], ROUND, self._incoming)
        for number, peer in self._peers.items():
            # gloo reads a message when the peer asks for it, and a late one asks after the next
            # round has been written.
            message = message_to(number, nbytes, self._own, self._outbox).copy()
            moves.start("send", peer, message, ROUND, self._outgoing)
        return []

    def finish(self, *, patient: bool = False) -> list[int]:
        """See :class:`zcomm.transports.rounds.Rounds`."""
        deadline = None
        while not (self._incoming.done() and self._outgoing.done()):
            self._transport.poll()
            if deadline is None and not patient:
                deadline = time.monotonic() + patience.limit()
            if deadline is not None and time.monotonic() > deadline:
                return self._late()
            (self._outgoing if self._incoming.done() else self._incoming).wait(POLL_SECONDS)
        return []

    def sent(self) -> bool:
        """See :class:`zcomm.transports.rounds.Rounds`: copies travel."""
        return True

    def _late(self) -> list[int]:
        # Where all have sent, somebody does not receive.
        peers = set(self._incoming.late() or self._outgoing.late())
        return [number for number, peer in self._peers.items() if peer in peers]


def _tensor(memory: HostMemory) -> torch.Tensor:
    import torch

    # A read-only array is sent, never written.
    return torch.from_numpy(memory if memory.flags.writeable else memory.copy())
