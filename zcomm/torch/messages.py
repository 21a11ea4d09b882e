"""Single messages between two ranks of a group: beside the collectives, never behind them.

A message is started at once, in the caller's thread, and moves on whenever somebody asks for it or
communicates: two ranks may send to each other before either receives.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from zcomm.errors import CollectiveTimeout
from zcomm.torch.works import NO_LIMIT

if TYPE_CHECKING:
    from mpi4py import MPI

SPINS = 100
FIRST_SLEEP = 10e-6
LONGEST_SLEEP = 500e-6


class Messages(Protocol):
    """The messages of one group."""

    def send(self, x: torch.Tensor, peer: int, tag: int, seconds: float) -> dist.Work:
        """Start sending a tensor, which is left alone until the work is done."""

    def receive(self, x: torch.Tensor, peer: int | None, tag: int, seconds: float) -> dist.Work:
        """Start receiving into a tensor from one rank, or from any."""

    def close(self) -> None:
        """Give up what was started and has not ended."""


class MpiMessages:
    """Messages through MPI, which has tags, any source, and messages to oneself."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._under_way: list[Message] = []

    def send(self, x: torch.Tensor, peer: int, tag: int, seconds: float) -> Message:
        """See :class:`Messages`."""
        words = f"send of {described(x)} to rank {peer}, tag {tag}"
        staged = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return self._keep(
            Message(self._comm.Isend(memory(staged), peer, tag), words, staged, seconds)
        )

    def receive(self, x: torch.Tensor, peer: int | None, tag: int, seconds: float) -> Message:
        """See :class:`Messages`."""
        from mpi4py import MPI

        origin = "any rank" if peer is None else f"rank {peer}"
        words = f"recv of {described(x)} from {origin}, tag {tag}"
        direct = x.device.type == "cpu" and x.is_contiguous()
        staged = x.detach() if direct else torch.empty(x.shape, dtype=x.dtype)
        source = MPI.ANY_SOURCE if peer is None else peer
        request = self._comm.Irecv(memory(staged), source, tag)
        deliver = None if direct else lambda: x.detach().copy_(staged)
        return self._keep(Message(request, words, staged, seconds, deliver, result=x))

    def _keep(self, message: Message) -> Message:
        """Hold what a message reads or writes, also where the caller drops it."""
        self._under_way = [each for each in self._under_way if not each.is_completed()]
        self._under_way.append(message)
        return message

    def close(self) -> None:
        """See :class:`Messages`."""
        for message in self._under_way:
            message.cancel()
        self._under_way.clear()


class Message(dist.Work):
    """One message on its way."""

    def __init__(
        self,
        request: MPI.Request,
        words: str,
        staged: torch.Tensor,
        seconds: float,
        deliver: Callable[[], Any] | None = None,
        result: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        from mpi4py import MPI

        self._request = request
        self._status = MPI.Status()
        self._words = words
        self._staged = staged
        self._seconds = seconds
        self._deliver = deliver
        self._result = result
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._future: Any = None

    def is_completed(self) -> bool:
        """Tell whether the message has ended, well or not."""
        with self._lock:
            if not self._done:
                self._test()
            return self._done

    def _test(self) -> None:
        try:
            if not self._request.Test(self._status):
                return
            if self._deliver is not None:
                self._deliver()
        except Exception as error:
            self._error = RuntimeError(f"{self._words}: {error}")
        self._done = True

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the message has arrived, or the tensor that was sent may be written.

        Raises:
            CollectiveTimeout: not within ``timeout``, or that of the group.
            RuntimeError: what MPI says, as when more was sent than the tensor holds.
        """
        given = timeout is not None and timeout > NO_LIMIT
        seconds = timeout.total_seconds() if given else self._seconds
        deadline = time.monotonic() + seconds
        pause, asked = FIRST_SLEEP, 0
        while not self.is_completed():
            asked += 1
            if asked < SPINS:
                os.sched_yield()
                continue
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"{self._words} has not ended within {seconds:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_SLEEP)
        if self._error is not None:
            raise self._error
        return True

    def is_success(self) -> bool:
        """Tell whether the message has arrived."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return what was received."""
        return [] if self._result is None else [self._result]

    def source_rank(self) -> int:
        """Return the rank that the message came from."""
        return int(self._status.Get_source())

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait, as ``wait`` does."""
        self.wait()

    def get_future(self) -> Any:
        """Return a future of the list of what was received; a thread waits for the message."""
        if self._future is None:
            self._future = torch.futures.Future()
            threading.Thread(target=self._fulfil, name="zcomm-message", daemon=True).start()
        return self._future

    def _fulfil(self) -> None:
        try:
            self.wait()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self.result())

    def cancel(self) -> None:
        """Give up a message that has not ended."""
        with self._lock:
            if not self._done:
                self._request.Cancel()
                self._error = RuntimeError(f"{self._words}: given up, the group was destroyed")
                self._done = True


def memory(x: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a contiguous CPU tensor."""
    flat = torch.as_strided(x, (x.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def described(x: torch.Tensor) -> str:
    """Return dtype and shape, for messages."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
