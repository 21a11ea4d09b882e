"""The benchmark on devices: a clock on a played queue, and a device that is emulated.

The queue is a model of a device that works through entries one by one while the host goes on; no
time in it is one of a GPU.
"""

import pytest

import zcomm.cuda
from benchmarks.codecs.cases import CASES
from benchmarks.codecs.device import CALLS_PER_TIMING, FIRST_FILLS, MOST_FILLS, QueueClock
from benchmarks.codecs.program import main
from benchmarks.launch import UsageError
from zcomm import ZcommError


class Queue:
    """A device in seconds: the host needs ``host`` to enqueue, the device ``device`` per entry."""

    def __init__(self, host, kernel, fill):
        self.host, self.kernel, self.filling = host, kernel, fill
        self.now = self.free = 0.0
        self.num_fills = 0

    def _enqueue(self, seconds):
        self.now += self.host
        self.free = max(self.free, self.now) + seconds

    def call(self):
        self._enqueue(self.kernel)

    def fill(self):
        self.num_fills += 1
        self._enqueue(self.filling)

    def record(self):
        return Event(self, max(self.free, self.now))


class Event:
    def __init__(self, queue, at):
        self.queue, self.at = queue, at

    @property
    def done(self):
        return self.queue.now >= self.at

    def synchronize(self):
        self.queue.now = max(self.queue.now, self.at)


def clock_of(queue):
    return QueueClock(queue.record, lambda a, b: 1e3 * (b.at - a.at), queue.fill)


@pytest.mark.parametrize("host", [1e-6, 70e-6, 300e-6, 1e-3])
def test_the_time_is_the_devices_however_slow_the_host(host):
    queue = Queue(host, kernel=80e-6, fill=1.1e-3)
    assert clock_of(queue)(queue.call) == pytest.approx(80e-6)


def test_a_timing_that_the_host_slowed_is_repeated_behind_more_work():
    queue = Queue(500e-6, kernel=80e-6, fill=600e-6)
    clock = clock_of(queue)
    # A fill wins 100 us on the host, which needs 10 calls of 500: 64 fills are enough, not 32.
    assert clock(queue.call) == pytest.approx(80e-6)
    assert queue.num_fills == FIRST_FILLS + 16 + 32 + 64
    clock(queue.call)
    assert queue.num_fills == FIRST_FILLS + 16 + 32 + 64 + 64


def test_a_host_that_is_slower_than_copies_is_told():
    queue = Queue(1e-3, kernel=80e-6, fill=100e-6)
    with pytest.raises(UsageError, match=f"{CALLS_PER_TIMING} calls.*{MOST_FILLS} copies"):
        clock_of(queue)(queue.call)


@pytest.mark.gpu
def test_kernels_on_a_gpu_are_right_and_timed(capsys):
    try:
        zcomm.cuda.cuda_device(0)
    except ZcommError as error:
        pytest.skip(str(error))
    assert main(["--device", "cuda", "-n", "1000000", "-r", "1"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "CuPy" in first
    assert sum(not line.startswith("#") for line in lines) == len(CASES)
