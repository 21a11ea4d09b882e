"""Handles of operations as torch knows them, and the queue that runs the operations of one group.

Operations of a group run one after the other in the order in which they were issued: in the
caller's thread where nothing is queued and the caller waits anyway, else in the group's worker. On
a CUDA device they run on a stream of the group's, after what the caller had enqueued; waiting makes
the caller's current stream wait, not the host.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zcomm import patience
from zcomm.errors import CollectiveTimeout
from zcomm.work import Stream

logger = logging.getLogger("zcomm")
NO_LIMIT = timedelta(0)
"""What torch passes to ``wait`` where the caller names no limit."""


class Handle(dist.Work):
    """One operation on its way; ``results`` are the tensors that it writes."""

    def __init__(self, words: str, results: Sequence[Any], side: torch.cuda.Stream | None) -> None:
        super().__init__()
        self._words = words
        self._results = list(results)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._future: Any = None
        self._side = side
        self._before = (
            None if side is None else torch.cuda.current_stream(side.device).record_event()
        )
        self._passed: torch.cuda.Event | None = None

    def run(self, execute: Callable[[], None], seconds: float) -> None:
        """Run the operation in this thread; what it raises is kept for those who wait."""
        try:
            if self._side is not None and self._before is not None:
                self._side.wait_event(self._before)
            with patience.limited(seconds), _on(self._side):
                execute()
        except BaseException as error:
            self._error = error
        self._end()

    def _end(self) -> None:
        if self._side is not None:
            self._passed = self._side.record_event()
        with self._lock:
            self._ended.set()
            future = self._future
        if future is not None:
            self._settle(future)

    def _settle(self, future: Any) -> None:
        if self._error is None:
            with _on(self._side):
                future.set_result(self._results)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the results may be used; raises what the operation raised.

        Raises:
            CollectiveTimeout: it has not ended within ``timeout``.
        """
        seconds = timeout.total_seconds() if timeout is not None and timeout > NO_LIMIT else None
        if not self._ended.wait(seconds):
            raise CollectiveTimeout(f"{self._words} has not ended within {seconds:g} s")
        if self._error is not None:
            raise self._error
        if self._passed is not None:
            torch.cuda.current_stream(self._passed.device).wait_event(self._passed)
        return True

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future`` of the list of results."""
        with self._lock:
            if self._future is not None:
                return self._future
            devices: list[int | str | torch.device] = (
                [] if self._side is None else [self._side.device]
            )
            self._future = torch.futures.Future(devices=devices)
            ended = self._ended.is_set()
        if ended:
            self._settle(self._future)
        return self._future

    def is_completed(self) -> bool:
        """Tell whether the operation has ended, well or not."""
        if not self._ended.is_set():
            return False
        return self._passed is None or bool(self._passed.query())  # type: ignore[no-untyped-call]

    def is_success(self) -> bool:
        """Tell whether the operation has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what the operation raised."""
        return self._error

    def result(self) -> list[Any]:
        """Return the tensors that the operation wrote."""
        return self._results

    def synchronize(self) -> None:
        """Wait, as ``wait`` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Let what is enqueued next on the current stream come after the operation."""
        self.wait()


class Queue:
    """The operations of one group."""

    def __init__(self) -> None:
        self._stream = Stream()
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._running = threading.local()

    def issue(
        self,
        words: str,
        execute: Callable[[], None],
        results: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        *,
        seconds: float,
        async_op: bool,
    ) -> Handle:
        """Run an operation in its turn; wait for it here unless it is asynchronous.

        ``tensors`` are all that it reads or writes; nobody frees their memory before it has ended.
        """
        side = self._side_of(tensors)
        handle = Handle(words, results, side)

        def run() -> None:
            self._running.here = True
            try:
                handle.run(execute, seconds)
            finally:
                self._running.here = False
            if async_op and handle.exception() is not None:
                logger.error("%s failed: %r", words, handle.exception())

        if getattr(self._running, "here", False):
            # The callback of an operation's future issues this one, in the thread of the queue.
            handle.run(execute, seconds)
        elif async_op:
            self._stream.submit(run)
        else:
            self._stream.call(run)
        return handle

    def _side_of(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.Stream | None:
        device = next((x.device for x in tensors if x.device.type == "cuda"), None)
        if device is None:
            return None
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for x in tensors:
            x.record_stream(self._sides[device])
        return self._sides[device]

    def close(self) -> None:
        """Finish what was issued, and end the worker."""
        self._stream.stop()


def _on(side: torch.cuda.Stream | None) -> Any:
    return nullcontext() if side is None else torch.cuda.stream(side)
