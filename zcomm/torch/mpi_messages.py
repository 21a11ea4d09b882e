"""Single messages through MPI, which has tags, any source, and messages to oneself.

They move on whenever somebody asks for one of them or communicates otherwise.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from zcomm.errors import CollectiveTimeout
from zcomm.torch.messages import Message, Staged, to_receive, to_send
from zcomm.torch.works import NO_LIMIT

if TYPE_CHECKING:
    from mpi4py import MPI

SPINS = 100
FIRST_SLEEP = 10e-6
LONGEST_SLEEP = 500e-6


class MpiMessages:
    """The messages among the ranks of an MPI communicator, see ``Messages``."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._under_way: list[MpiMessage] = []

    def send(self, x: torch.Tensor, peer: int, tag: int, seconds: float) -> MpiMessage:
        """See :class:`zcomm.torch.messages.Messages`."""
        staged = to_send(x, peer, tag)
        return self._keep(staged, self._comm.Isend(staged.memory, peer, tag), seconds)

    def receive(self, x: torch.Tensor, peer: int | None, tag: int, seconds: float) -> MpiMessage:
        """See :class:`zcomm.torch.messages.Messages`."""
        from mpi4py import MPI

        staged = to_receive(x, peer, tag)
        source = MPI.ANY_SOURCE if peer is None else peer
        return self._keep(staged, self._comm.Irecv(staged.memory, source, tag), seconds)

    def _keep(self, staged: Staged, request: MPI.Request, seconds: float) -> MpiMessage:
        """Hold what a message reads or writes, also where the caller drops it."""
        self._under_way = [each for each in self._under_way if not each.is_completed()]
        self._under_way.append(MpiMessage(staged, request, seconds))
        return self._under_way[-1]

    def close(self) -> None:
        """See :class:`zcomm.torch.messages.Messages`."""
        for message in self._under_way:
            message.cancel()
        self._under_way.clear()


class MpiMessage(Message):
    """One message of MPI."""

    def __init__(self, staged: Staged, request: MPI.Request, seconds: float) -> None:
        super().__init__(staged, seconds)
        from mpi4py import MPI

        self._request = request
        self._status = MPI.Status()
        self._lock = threading.Lock()

    def is_completed(self) -> bool:
        """Tell whether the message has ended, well or not; moves it on."""
        with self._lock:
            if not self._done:
                self._test()
            return self._done

    def _test(self) -> None:
        try:
            ended = self._request.Test(self._status)
        except Exception as error:  # MPI's own, as of a message longer than its memory
            self._fail(error)
            return
        if ended:
            self._end(self._staged.deliver)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the message has arrived, or the tensor that was sent may be written.

        Raises:
            CollectiveTimeout: not within ``timeout``, or that of the group.
            RuntimeError: what MPI says, as when more was sent than the tensor holds.
        """
        seconds = self._limit(timeout)
        deadline = time.monotonic() + seconds
        pause, asked = FIRST_SLEEP, 0
        while not self.is_completed():
            asked += 1
            if asked < SPINS:
                os.sched_yield()
                continue
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"{self._staged.words} has not ended within {seconds:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_SLEEP)
        if self._error is not None:
            raise self._error
        return True

    def source_rank(self) -> int:
        """Return the rank that the message came from."""
        return int(self._status.Get_source())

    _source_rank = source_rank

    def cancel(self) -> None:
        """Give up a message that has not ended."""
        with self._lock:
            if not self._done:
                self._request.Cancel()
                self._fail("given up, the group was destroyed")
