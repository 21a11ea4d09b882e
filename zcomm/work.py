"""The ordered stream of operations, and the handle of one that was started and not yet awaited.

All communicators of a rank share one stream: operations run in the order in which they were issued,
so that two ranks that issue the same operations meet in each of them. A synchronous call runs
inline where nothing is queued or running; otherwise it queues like the rest and waits.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from zcomm import leaving
from zcomm.collectives.idle import beside
from zcomm.device import Device, Lane
from zcomm.errors import ZcommError

T = TypeVar("T")
logger = logging.getLogger("zcomm")


_FORKS = [0]
"""How many forks lie between the first process and this one: cheaper to ask for than its id."""


def _forked() -> None:
    _FORKS[0] += 1


os.register_at_fork(after_in_child=_forked)


class Work(Generic[T]):
    """One operation on its way.

    Leave its inputs alone, and its outputs unread, until :meth:`wait` returns. On a device that
    means: what the caller enqueues after it comes after the operation; the host does not wait.
    """

    def __init__(
        self,
        function: Callable[[], T],
        waiting: list[int],
        join: Callable[[], None] | None = None,
    ) -> None:
        self._function: Callable[[], T] | None = function
        self._waiting = waiting
        self._join = join
        self._finished = threading.Event()
        self._result: T | None = None
        self.error: BaseException | None = None
        self.awaited = False

    def run(self) -> None:
        """Run the operation; the stream calls this once, and then :meth:`finish`."""
        assert self._function is not None
        try:
            self._result = self._function()
        except BaseException as error:
            self.error = error
        self._function = None

    def finish(self) -> None:
        """Let those go on who wait for the operation."""
        self._finished.set()

    def done(self) -> bool:
        """Tell whether the operation has ended, well or not; on a device: was enqueued."""
        return self._finished.is_set()

    def wait(self) -> T:
        """Wait for the operation and return its result; raises what it raised."""
        if not self._finished.is_set():
            self._waiting.append(1)
            try:
                self._finished.wait()
            finally:
                self._waiting.pop()
        self.awaited = True
        if self.error is not None:
            raise self.error
        if self._join is not None:
            self._join()
        return self._result  # type: ignore[return-value]


class Stream:
    """A queue of operations; its worker thread starts with the first asynchronous one.

    Operations on device arrays run on one device stream, the *lane*, per device.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._queue: deque[Work[object]] = deque()
        self._failed: list[Work[object]] = []
        self._running = False
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._forks = _FORKS[0]
        self._lanes: dict[int, Lane] = {}
        self._waiting: list[int] = []
        """As long as there are threads that wait for an operation: appended to and popped whole."""
        leaving.after(leaving.OPERATIONS, self)

    def lane(self, device: Device) -> Lane:
        """Return the lane of a device, the same at every call."""
        if id(device) not in self._lanes:
            self._lanes[id(device)] = Lane(device)
        return self._lanes[id(device)]

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run an operation in its turn and return its result."""
        if self._forks != _FORKS[0]:
            self._check_process()
        with self._lock:
            inline = not self._queue and not self._running
            if inline:
                self._running = True
        if not inline:
            return self.submit(partial(function, *arguments)).wait()
        try:
            return function(*arguments)
        finally:
            with self._lock:
                self._running = False
                if self._thread is not None:
                    self._condition.notify_all()

    def submit(self, function: Callable[[], T], join: Callable[[], None] | None = None) -> Work[T]:
        """Queue an operation and return at once; ``join`` is called when it is awaited."""
        self._check_process()
        work = Work(function, self._waiting, join)
        with self._condition:
            if self._stopped:
                raise ZcommError("the communicator is closed")
            self._queue.append(work)  # type: ignore[arg-type]
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="zcomm-stream", daemon=True
                )
                self._thread.start()
            self._condition.notify_all()
        return work

    def raise_unawaited(self) -> None:
        """Raise the error of an operation that failed and whose end nobody awaited."""
        failed = [work for work in self._failed if not work.awaited]
        self._failed.clear()
        if failed:
            failed[0].wait()

    def stop(self, seconds: float | None = None) -> None:
        """Finish what is queued and end the worker thread; wait for that, or at most so long."""
        if os.getpid() != self._process:  # a fork has no such thread, and may have its lock taken
            return
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    def _serve(self) -> None:
        beside.computing = lambda: not self._waiting
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: not self._running and (self._queue or self._stopped)
                )
                if not self._queue:
                    return
                work = self._queue.popleft()
                self._running = True
            work.run()
            if work.error is not None:
                logger.error("asynchronous operation failed: %r", work.error)
                self._failed.append(work)
            with self._lock:
                # Together, so that who goes on now finds the stream idle, and hops to no thread.
                self._running = False
                work.finish()
                self._condition.notify_all()
            del work  # its result may be large, and the next may be long in coming

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ZcommError(
                f"process {os.getpid()} was forked from {self._process}, which communicates: "
                "a forked child (a DataLoader worker, say) cannot communicate"
            )
