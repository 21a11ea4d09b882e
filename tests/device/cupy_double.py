"""Stand-ins for CuPy and torch without a driver: the names that ``zcomm.cuda`` uses, no more.

They run on a ``FakeDevice``, late and in the order of events. They are not the real ones: they show
that ``CudaDevice`` calls what it means to call, with the device selected, on the stream it means.
"""

import contextlib
import ctypes
import threading
import types

import numpy as np

from tests.device.fake import FakeArray, FakeEvent, FakeStream, c_strides, place

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3


class Double:
    """The module: ``install`` it as ``cupy``."""

    def __init__(self, fake, index=0):
        self.fake = fake
        self.index = index
        self.thread = threading.local()
        self.streams = {0: fake.default}
        self.events = {}
        self.copies = []
        double = self

        class Device:
            compute_capability = "90"
            pci_bus_id = "0000:00:00.0"

            def __init__(self, number):
                assert number == index
                self.id = number
                self.attributes = {"MultiProcessorCount": 4}

            def __enter__(self):
                double.selected().append(self.id)
                return self

            def __exit__(self, *_):
                double.selected().pop()

            def use(self):
                double.selected().append(self.id)

        class Event:
            def __init__(self, *, disable_timing):
                assert disable_timing
                double.check()
                self.event = None
                self.ptr = id(self)
                double.events[self.ptr] = self

            @property
            def done(self):
                return self.event.passed

            def synchronize(self):
                self.event.synchronize()

        class Stream:
            def __init__(self, *, non_blocking):
                assert non_blocking
                double.check()
                self.stream = FakeStream(fake)
                self.ptr = self.stream.pointer
                double.streams[self.ptr] = self.stream

            @classmethod
            def from_external(cls, given):
                version, pointer = given.__cuda_stream__()
                assert version == 0
                made = cls.__new__(cls)
                made.ptr, made.stream = pointer, double.streams[pointer]
                return made

            def __enter__(self):
                double.check()
                double.stack().append(self)
                fake.thread.stream = self.stream
                return self

            def __exit__(self, *_):
                double.stack().pop()
                fake.thread.stream = double.stack()[-1].stream if double.stack() else None

        null = Stream.__new__(Stream)
        null.ptr, null.stream = 0, fake.default
        self.null = null
        self.cuda = types.SimpleNamespace(
            Device=Device,
            Event=Event,
            Stream=Stream,
            alloc=self.alloc,
            alloc_pinned_memory=self.alloc_pinned_memory,
            get_current_stream=lambda: self.stack()[-1] if self.stack() else null,
            is_available=lambda: True,
            runtime=types.SimpleNamespace(
                getDeviceCount=lambda: 1,
                getDeviceProperties=lambda i: {"name": b"a double"},
                eventRecord=self.event_record,
                streamWaitEvent=self.stream_wait_event,
                memcpyAsync=self.memcpy_async,
                streamSynchronize=lambda stream: self.streams[stream].record().synchronize(),
            ),
        )
        self.Array = type("ndarray", (CupyArray,), {"double": self})
        self.ndarray = self.Array

    def stack(self):
        return self.thread.__dict__.setdefault("stack", [])

    def selected(self):
        return self.thread.__dict__.setdefault("selected", [])

    def check(self):
        assert self.selected(), "the device was not selected in this thread"

    def alloc(self, nbytes):
        self.check()
        memory = self.fake.empty(nbytes)
        return types.SimpleNamespace(ptr=memory.pointer, owner=memory.owner)

    def alloc_pinned_memory(self, nbytes):
        self.check()
        memory = self.fake.pinned(nbytes)
        address = memory.ctypes.data
        held = (ctypes.c_uint8 * nbytes).from_address(address)
        held.owner = memory
        return held

    def event_record(self, event, stream):
        self.check()
        self.events[event].event = self.streams[stream].record()

    def stream_wait_event(self, stream, event):
        self.check()
        waited = self.events[event].event
        assert isinstance(waited, FakeEvent)
        self.streams[stream].wait(waited)

    def memcpy_async(self, target, source, size, kind, stream):
        self.check()
        inside = [0 <= at - self.fake.base < len(self.fake.bytes) for at in (target, source)]
        assert inside == [True, True]
        self.copies.append(kind)
        at = self.fake.at
        self.streams[stream].tasks.append(lambda: np.copyto(at(target, size), at(source, size)))

    def empty(self, shape, dtype):
        self.check()
        numel = int(np.prod(shape, dtype=int))
        block = self.fake.block(numel * np.dtype(dtype).itemsize)
        return self.Array(self.fake, block, shape, str(np.dtype(dtype)))

    def array(self, values):
        """Return an array that will hold these values once CuPy's current stream gets there."""
        with self.cuda.Device(self.index):
            made = self.empty(values.shape, values.dtype)
        made.write(values)
        return made

    def ascontiguousarray(self, x):
        made = self.empty(x.shape, x.dtype)
        self.copyto(made, x, casting="unsafe")
        return made

    def copyto(self, target, source, casting):
        self.check()
        pointer, fake = source.block.memory.pointer, self.fake
        like = FakeArray(fake, None, source.shape, source.dtype, source.strides)
        target.task(lambda values: np.copyto(values, place(fake, pointer, like), casting=casting))


class CupyArray(FakeArray):
    """Stands for a cupy.ndarray."""

    double = None

    def __init__(self, fake, block, shape, dtype, strides=None):
        super().__init__(fake, block, shape, dtype, strides)
        self.data = types.SimpleNamespace(ptr=block.memory.pointer if block else 0)
        self.flags = types.SimpleNamespace(
            c_contiguous=0 in self.shape or self.strides == c_strides(self.shape)
        )

    @property
    def device(self):
        return self.double.cuda.Device(self.double.index)

    @device.setter
    def device(self, fake):
        self.fake = fake

    @property
    def nbytes(self):
        return int(np.prod(self.shape, dtype=int)) * np.dtype(self.dtype).itemsize

    def reshape(self, _):
        return type(self)(self.fake, self.block, (int(np.prod(self.shape, dtype=int)),), self.dtype)

    def transposed(self):
        return type(self)(self.fake, self.block, self.shape[::-1], self.dtype, self.strides[::-1])

    def astype(self, dtype):
        made = self.double.empty(self.shape, dtype)
        self.double.copyto(made, self, casting="unsafe")
        return made

    def fill(self, value):
        self.task(lambda values: values.fill(value))

    def task(self, function):
        pointer, fake = self.block.memory.pointer, self.fake
        like = FakeArray(fake, None, self.shape, self.dtype, self.strides)
        stream = self.double.cuda.get_current_stream().stream
        stream.tasks.append(lambda: function(place(fake, pointer, like)))

    def numpy(self):
        found = []
        self.task(lambda values: found.append(values.copy()))
        self.double.cuda.get_current_stream().stream.record().synchronize()
        return found[0]


class TorchDouble:
    """Stands for torch where it has started CUDA, on the same device as a ``Double``."""

    uint8 = "uint8"

    def __init__(self, double):
        torch = self
        self.double = double
        self.thread = threading.local()

        class Stream:
            def __init__(self, device):
                assert device == double.index
                self.stream = FakeStream(double.fake)
                self.cuda_stream = self.stream.pointer
                double.streams[self.cuda_stream] = self.stream

        class ExternalStream(Stream):
            def __init__(self, pointer, device):
                assert pointer != 0, "torch makes a new stream of a null pointer"
                self.stream, self.cuda_stream = double.streams[pointer], pointer

        class Tensor:
            def __init__(self, nbytes):
                self.block = double.fake.block(nbytes)
                self.recorded = []
                self.made_on = torch.current()

            def data_ptr(self):
                return self.block.memory.pointer

            def record_stream(self, stream):
                self.recorded.append(stream.cuda_stream)

        self.Tensor = Tensor
        self.default = Stream(double.index)
        self.default.stream, self.default.cuda_stream = double.fake.default, 0
        self.cuda = types.SimpleNamespace(
            Stream=Stream,
            ExternalStream=ExternalStream,
            stream=self.stream,
            current_stream=lambda index: self.current(),
            default_stream=lambda index: self.default,
            is_initialized=lambda: True,
            is_available=lambda: True,
            set_device=lambda index: None,
        )

    def empty(self, nbytes, dtype, device):
        assert (dtype, device) == (self.uint8, f"cuda:{self.double.index}")
        return self.Tensor(nbytes)

    def current(self):
        return getattr(self.thread, "current", self.default)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.thread.current = self.current(), stream
        try:
            yield
        finally:
            self.thread.current = before
