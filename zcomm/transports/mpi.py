"""Ranks that are MPI processes, through mpi4py: nonblocking point-to-point messages.

Host memory, and, for an MPI that was built for CUDA, device memory: MPI knows no streams, so the
host waits for the current one first, and for the messages after.

Waiting gives the core away: test, yield, and after a short spin sleep in steps that grow, because
the core that would be burnt is the one that computes. Messages over ``ZCOMM_MESSAGE_LIMIT`` bytes
travel in parts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zcomm import environment
from zcomm.device import Device, DeviceMemory, HostMemory, Memory, device_of
from zcomm.transports.rounds import MpiRounds
from zcomm.transports.windows import SharedWindows, Windows

if TYPE_CHECKING:
    from mpi4py import MPI

SPINS = 50
"""Tests, with a yield after each, before the first sleep: about 50 microseconds."""

FIRST_SLEEP = 10e-6
LONGEST_SLEEP = 200e-6
TAG = 7


class MpiTransport:
    """The ranks of an mpi4py communicator, on a duplicate of it."""

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.device: Device | None = None
        self._limit = environment.nbytes("ZCOMM_MESSAGE_LIMIT")
        self._shared = SharedWindows(self._comm)
        self._active: list[MPI.Request] = []
        self._owners: list[tuple[Requests, int]] = []
        self._received: list[bool] = []
        self._lost: list[MPI.Request] = []
        self._testsome = _testsome()

    def exchange(
        self,
        sends: Mapping[int, Memory],
        recvs: Mapping[int, Memory],
        *,
        timeout: float | None = None,
        tag: int = 0,
    ) -> frozenset[int]:
        """See :class:`zcomm.transports.base.Transport`."""
        memories = [*sends.values(), *recvs.values()]
        device = device_of(*memories) if memories else None
        if device is not None:
            device.synchronize()
        incoming: list[tuple[int, MPI.Request]] = []
        outgoing: list[MPI.Request] = []
        for peer, memory in recvs.items():
            incoming += [
                (peer, self._comm.Irecv(part, peer, TAG + tag)) for part in self._parts(memory)
            ]
        for peer, memory in sends.items():
            outgoing += [self._comm.Isend(part, peer, TAG + tag) for part in self._parts(memory)]
        requests = [request for _, request in incoming] + outgoing
        if not requests or _wait_all(requests, timeout):
            return frozenset()
        late = frozenset(peer for peer, request in incoming if not request.Test())
        self._lost += [request for request in requests if request]
        return late

    def send(self, sends: Mapping[int, HostMemory], tag: int) -> Requests:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._start(self._comm.Isend, sends, tag, receiving=False)

    def receive(self, recvs: Mapping[int, HostMemory], tag: int) -> Requests:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._start(self._comm.Irecv, recvs, tag, receiving=True)

    def _start(
        self,
        call: Callable[[Any, int, int], MPI.Request],
        memories: Mapping[int, Any],
        tag: int,
        *,
        receiving: bool,
    ) -> Requests:
        made = Requests()
        for peer, memory in memories.items():
            for part in self._parts(memory):
                self._active.append(call(part, peer, TAG + tag))
                self._owners.append((made, peer))
                self._received.append(receiving)
                made.add(peer)
        return made

    def cancel(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        for request, received in zip(self._active, self._received, strict=True):
            if received:
                request.Cancel()
            if not request.Test():  # a message that has begun to arrive cannot be given up
                self._lost.append(request)
        self._active, self._owners, self._received = [], [], []

    def poll(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        if not self._active:
            return
        for index in sorted(self._testsome(self._active) or (), reverse=True):
            del self._active[index]
            owner, peer = self._owners.pop(index)
            del self._received[index]
            owner.remove(peer)

    @property
    def windows(self) -> Windows | None:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._shared.windows

    def _parts(self, memory: Memory) -> Iterator[Any]:
        for start in range(0, memory.size, self._limit):
            yield _buffer(memory[start : start + self._limit])

    def rounds(
        self,
        ranks: Sequence[int],
        me: int,
        table: Sequence[HostMemory],
        outbox: Sequence[HostMemory],
    ) -> MpiRounds:
        """See :class:`zcomm.transports.base.Transport`."""
        return MpiRounds(self._comm, ranks, me, table, outbox)

    def abort(self, code: int) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        self._comm.Abort(code)

    def close(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        self._shared.close()
        self._comm.Free()


class Requests:
    """Messages on their way, to or from peers; the transport's ``poll`` removes what is done."""

    def __init__(self) -> None:
        self._peers: list[int] = []

    def add(self, peer: int) -> None:
        """Add a message to or from a peer."""
        self._peers.append(peer)

    def remove(self, peer: int) -> None:
        """Say that a message to or from a peer is done."""
        self._peers.remove(peer)

    def done(self) -> bool:
        """See :class:`zcomm.transports.base.Pending`."""
        return not self._peers

    def late(self) -> list[int]:
        """See :class:`zcomm.transports.base.Pending`."""
        return list(self._peers)

    def wait(self, seconds: float) -> None:
        """See :class:`zcomm.transports.base.Pending`."""
        time.sleep(seconds)


def _testsome() -> Callable[[list[MPI.Request]], list[int] | None]:
    from mpi4py import MPI

    return MPI.Request.Testsome


def _buffer(memory: Memory) -> Any:
    """Return what mpi4py takes for a run of bytes."""
    if not isinstance(memory, DeviceMemory):
        return memory
    from mpi4py import MPI

    return [MPI.buffer.fromaddress(memory.pointer, memory.size), MPI.BYTE]


def _wait_all(requests: list[MPI.Request], timeout: float | None) -> bool:
    """Wait for all requests; return whether they finished in time."""
    from mpi4py import MPI

    for _ in range(SPINS):
        if MPI.Request.Testall(requests):
            return True
        os.sched_yield()
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_SLEEP
    while not MPI.Request.Testall(requests):
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_SLEEP)
    return True
