"""The benchmark on devices: a clock on a played queue, and kernels that are emulated on the CPU.

The queue is a model of a device that works through entries one by one while the host goes on. What
stands in for CuPy shows that the benchmark passes what it means to pass. No time is one of a GPU.
"""

import sys
from contextlib import nullcontext
from datetime import date
from types import SimpleNamespace

import pytest

import zcomm.codecs.cuda
import zcomm.cuda
from benchmarks.codecs import device, speed
from benchmarks.codecs.cases import CASES
from benchmarks.codecs.device import CALLS_PER_TIMING, FIRST_FILLS, MOST_FILLS, QueueClock
from benchmarks.codecs.program import main
from benchmarks.launch import UsageError
from tests.cuda.emulator import EmulatedDevice, EmulatedStream, view
from zcomm import ZcommError, codecs


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


class Stream(EmulatedStream):
    """A stream that CuPy would know."""

    for_cupy = "the stream of the benchmark"


class Marker:
    """An event that is never passed before the host waits for it."""

    done = False

    def record(self, stream):
        assert stream == Stream.for_cupy

    def synchronize(self):
        pass


class Played(EmulatedDevice):
    """The emulated device with what the benchmark asks of CuPy; ten calls always take 1 ms."""

    index = 0
    cupy = SimpleNamespace(
        __version__="14.0",
        cuda=SimpleNamespace(
            Event=Marker,
            get_elapsed_time=lambda start, end: 1.0,
            runtime=SimpleNamespace(
                getDeviceProperties=lambda index: {"name": b"Played 1"},
                driverGetVersion=lambda: 13020,
            ),
        ),
    )

    def stream(self):
        return Stream()

    def selected(self):
        return nullcontext()


@pytest.fixture
def played(library, monkeypatch):
    monkeypatch.setattr(device, "FILL_NBYTES", 64)
    monkeypatch.setattr(zcomm.cuda, "cuda_device", lambda index: Played(library))
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.mark.slow
def test_every_kernel_is_compared_and_timed_on_the_device(played, capsys):
    assert main(["--device", "cuda", "-n", "1000", "-r", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    day = date.today()
    assert lines[0] == f"# codec kernels: Played 1, driver of CUDA 13.2, CuPy 14.0, {day}"
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [tuple(row[1:5]) for row in rows] == [
        (case.kernel, case.dtype, f"{case.wires}", case.codec) for case in CASES
    ]
    # int8 of 1000 floats: 4000 bytes to 1008 and 16, in the time of a copy of 4000.
    assert rows[0][8:] == [f"{(4000 + 1024) / 8000:.2f}"] * 2 + ["-", "0.90", "NO"]
    assert rows[0][5] == f"{(4000 + 1024) / 1e-4 / 1e9:.2f}"
    assert {row[-2] for row in rows if row[1].startswith("decode_reduce")} == {"0.80"}
    assert lines[-2] == f"# 0 of {len(CASES)} differ from the reference"


@pytest.mark.slow
def test_a_wrong_kernel_of_the_device_is_seen(played, monkeypatch, capsys):
    right = codecs.cuda.decode

    def wrong(codec, wire, starts, lengths, out, name):
        right(codec, wire, starts, lengths, out, name)
        view(out)[-1] ^= 1

    monkeypatch.setattr(codecs.cuda, "decode", wrong)
    monkeypatch.setattr(speed, "CASES", CASES[5:7])
    assert main(["--device", "cuda", "-n", "1000", "-r", "1"]) == 1
    assert "# 1 of 2 differ from the reference" in capsys.readouterr().out


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
