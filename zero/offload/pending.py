"""Writes and reads that were started: pieces of one tensor, each a future of a worker thread."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for


class Pending:
    """A write or a read that was started.

    Args:
        waited: is told the seconds for which a caller was blocked.
    """

    def __init__(self, waited: Callable[[float], None]) -> None:
        self._waited = waited
        self._futures: list[Future[None]] = []
        self.reported = False

    def add(self, piece: Future[None]) -> None:
        """Make it wait for one more piece."""
        self._futures.append(piece)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not: ``wait`` would return or raise at once."""
        return all(future.done() for future in self._futures)

    @property
    def error(self) -> BaseException | None:
        """Why it failed, of several pieces the first; blocks until it is done."""
        errors = [future.exception() for future in self._futures]
        return next((error for error in errors if error is not None), None)

    def wait(self) -> None:
        """Return when all bytes are where they should be; those read have been verified.

        The tensor may be changed or used from then on, also when this raises.

        Raises:
            OffloadError: they are not.
        """
        if not self.done:
            start = time.perf_counter()
            self.settle()
            self._waited(time.perf_counter() - start)
        self.reported = True
        error = self.error
        if error is not None:
            raise again(error)

    def settle(self) -> None:
        """Return when it has ended, well or not."""
        if not self.done:
            wait_for(self._futures)


def again(error: BaseException) -> BaseException:
    """Return an error to raise in the place of one that is kept.

    One that is raised gets the frames that it passes, and with them all that they hold: the model,
    which then would live as long as what keeps the error.
    """
    return copy.copy(error).with_traceback(error.__traceback__)
