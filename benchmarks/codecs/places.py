"""Where kernels run: memory of one kind, the kernels for it, and a clock.

Everything that is timed goes through :class:`Place`, so host and device share their cases and
calls. Do not assume that a call is done when it returns: on a device it is enqueued.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from benchmarks.collectives import record
from zcomm.codecs import Kernels
from zcomm.codecs.wire import Bytes

Call = Callable[[], object]


class Place(Protocol):
    """Memory, kernels that work on it, and the time that they take."""

    kernels: Any

    @property
    def title(self) -> str:
        """What the kernels run on, for the reader."""

    def put(self, data: Bytes) -> Any:
        """Return memory that holds ``data``."""

    def get(self, memory: Any) -> Bytes:
        """Return the bytes of memory, when everything before is done."""

    def copy(self, target: Any, source: Any) -> Call:
        """Return a call that copies bytes as fast as the machine can."""

    def seconds(self, call: Call) -> float:
        """Return how long one call takes."""


class Host:
    """This process's memory, and one core: seconds are CPU time of the calling thread."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @property
    def title(self) -> str:
        """The instruction set and the processor."""
        instructions = getattr(self.kernels, "instruction_set", lambda: "numpy")()
        return f"{instructions}, one core of {record.cpu_name()}"

    def put(self, data: Bytes) -> Bytes:
        return data

    def get(self, memory: Bytes) -> Bytes:
        return memory

    def copy(self, target: Bytes, source: Bytes) -> Call:
        return partial(_memcpy, target, source)

    def seconds(self, call: Call) -> float:
        start = time.thread_time()
        call()
        return time.thread_time() - start


def _memcpy(target: Bytes, source: Bytes) -> None:
    ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


def ones(nbytes: int) -> Bytes:
    """Return memory whose pages exist: a first touch would be timed otherwise."""
    return np.ones(nbytes, np.uint8)
