"""How long a rank waits for the others: ``ZCOMM_TIMEOUT``, or what the caller of an operation said.

The limit belongs to the thread that runs an operation, for as long as a :func:`limited` block lasts
in it. A reader must not assume that it is the same in two threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from zcomm import environment

_LIMIT: ContextVar[float | None] = ContextVar("zcomm_time_limit", default=None)


def limit() -> float:
    """Return the seconds after which an operation gives up waiting."""
    chosen = _LIMIT.get()
    return environment.seconds("ZCOMM_TIMEOUT") if chosen is None else chosen


def source() -> str:
    """Say where the limit comes from, for messages."""
    return (
        "ZCOMM_TIMEOUT sets the limit"
        if _LIMIT.get() is None
        else "the caller's timeout sets the limit"
    )


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Let the operations of this block, in this thread, give up after so many seconds."""
    token = _LIMIT.set(seconds)
    try:
        yield
    finally:
        _LIMIT.reset(token)
