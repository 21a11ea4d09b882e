"""Kernels on a device: its memory, and a clock that the host cannot slow down.

Launching costs the host about as long as a fast kernel runs. So the queue is given other work
first, and a timing counts only if the device had not come to it when all of it was enqueued. Do not
assume that the device is warm: the first call of a kernel may compile it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from benchmarks.codecs.places import Call
from benchmarks.launch import UsageError
from zcomm.codecs.wire import Bytes
from zcomm.device import Device, DeviceMemory, from_host, on_host

CALLS_PER_TIMING = 10
FILL_NBYTES = 1 << 28
FIRST_FILLS, MOST_FILLS = 8, 512
"""Copies before a timing; a queue takes about a thousand entries before the host must wait."""


class TimedEvent(Protocol):
    """A point in a device's queue."""

    @property
    def done(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class QueueClock:
    """Seconds of a call on a device.

    ``record`` returns an event at the end of the queue, ``elapsed`` the milliseconds between two,
    ``fill`` enqueues other work.
    """

    def __init__(
        self,
        record: Callable[[], TimedEvent],
        elapsed: Callable[[Any, Any], float],
        fill: Call,
    ) -> None:
        self._record = record
        self._elapsed = elapsed
        self._fill = fill
        self._num_fills = FIRST_FILLS

    def __call__(self, call: Call) -> float:
        """Return the mean of some calls.

        Raises:
            UsageError: the host enqueues so slowly that the device waits for it.
        """
        call()
        self._record().synchronize()
        while self._num_fills <= MOST_FILLS:
            for _ in range(self._num_fills):
                self._fill()
            start = self._record()
            for _ in range(CALLS_PER_TIMING):
                call()
            end = self._record()
            in_time = not start.done
            end.synchronize()
            if in_time:
                return self._elapsed(start, end) / 1e3 / CALLS_PER_TIMING
            self._num_fills *= 2
        raise UsageError(
            f"the host needs longer for {CALLS_PER_TIMING} calls than {MOST_FILLS} copies"
        )


class OnDevice:
    """Memory and kernels of a device; calls are enqueued on the current stream."""

    def __init__(self, device: Device, title: str, seconds: Callable[[Call], float]) -> None:
        self.kernels = device.kernels()
        self.title = title
        self.seconds = seconds
        self._device = device

    def put(self, data: Bytes) -> DeviceMemory:
        memory = self._device.empty(data.nbytes)
        from_host(memory, data)
        return memory

    def get(self, memory: DeviceMemory) -> Bytes:
        return on_host(memory)

    def copy(self, target: DeviceMemory, source: DeviceMemory) -> Call:
        return partial(self._device.copy, target, source)


@contextmanager
def cuda() -> Iterator[OnDevice]:
    """Open the first CUDA device, with a stream of its own as the current one.

    Raises:
        ZcommError: CuPy, the driver or a device is missing; the message says which.
    """
    from zcomm.cuda import cuda_device

    device = cuda_device(0)
    stream = device.stream()
    events, elapsed = device.cupy.cuda.Event, device.cupy.cuda.get_elapsed_time

    def record() -> TimedEvent:
        event: TimedEvent = events()
        event.record(stream.for_cupy)  # type: ignore[attr-defined]
        return event

    with device.selected(), device.using(stream):
        source, target = (device.empty(FILL_NBYTES) for _ in range(2))
        clock = QueueClock(record, elapsed, partial(device.copy, target, source))
        yield OnDevice(device, _title(device), clock)


def _title(device: Any) -> str:
    cupy = device.cupy
    name = cupy.cuda.runtime.getDeviceProperties(device.index)["name"].decode()
    return f"{name}, driver {_driver(cupy)}, CuPy {cupy.__version__}"


def _driver(cupy: Any) -> str:
    """Return the version of the driver, or of the newest CUDA that it knows."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return str(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # NVML may be missing in many ways, and a benchmark does not need it
        version = cupy.cuda.runtime.driverGetVersion()
        return f"of CUDA {version // 1000}.{version % 1000 // 10}"
