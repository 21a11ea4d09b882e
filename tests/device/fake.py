"""A device that does not exist: work is enqueued, and done as late and as unordered as allowed.

``FakeDevice`` stands for a GPU, ``FakeArray`` for a CUDA tensor. Its memory is host memory; its
kernels are the NumPy reference, or the CUDA kernels under the emulator. What makes it a test:

- Nothing runs until a host waits, and then only what that wait needs: a stream that does not wait
  for an event reads what is not yet there.
- Tasks know addresses, not objects: memory that is freed too early is given out again, at once.
- It allocates as torch does (``records``: a block goes back to its stream once the streams that
  were named to it are done) or as CuPy does (it is told nothing, and reuses at once).
"""

import ctypes
import importlib
import itertools
import threading
import weakref
from collections import deque
from contextlib import contextmanager

import numpy as np

from zcomm import kinds
from zcomm.codecs import reference
from zcomm.device import DeviceMemory

ARENA_NBYTES = 1 << 25
ALIGNMENT = 512
NUMBERS = itertools.count()


class FakeEvent:
    def __init__(self, device, stream):
        self.device = device
        self.stream = stream
        self.passed = False

    def done(self):
        return self.passed

    def synchronize(self):
        self.device.run_until(self)


class FakeStream:
    def __init__(self, device):
        self.device = device
        self.pointer = next(NUMBERS)
        self.tasks = deque()

    def record(self):
        event = FakeEvent(self.device, self)
        self.tasks.append(event)
        return event

    def wait(self, event):
        self.tasks.append(("wait", event))


class Block:
    """One allocation: who may use it, and what happens when nobody holds it any more."""

    def __init__(self, device, start, nbytes, stream):
        self.device = device
        self.start = start
        self.streams = set()
        self.memory = DeviceMemory(device.base + start, nbytes, device, self)
        weakref.finalize(self, device.free, start, nbytes, stream, self.streams)
        self.memory.owner = None  # no cycle: arrays hold the block


class FakeKernels:
    """The reference, run when its turn comes. ``calls`` names what was launched."""

    def __init__(self, device):
        self.device = device

    def encode(self, codec, x, dtype, starts, lengths, out, seed=0):
        self._launch("encode", [x, out], codec, dtype, starts, lengths, seed)

    def encode_batch(self, codec, x, dtype, messages):
        self.device.launched.append("encode_batch")
        for starts, lengths, out, seed in messages:
            self._enqueue("encode", [x, out], codec, dtype, starts, lengths, seed)

    def decode_batch(self, codec, messages, out, dtype):
        self.device.launched.append("decode_batch")
        for wire, starts, lengths in messages:
            self._enqueue("decode", [wire, out], codec, starts, lengths, dtype)

    def decode(self, codec, wire, starts, lengths, out, dtype):
        self._launch("decode", [wire, out], codec, starts, lengths, dtype)

    def decode_reduce(self, codec, wires, starts, lengths, out, dtype, divisor):
        self._launch("decode_reduce", [*wires, out], codec, starts, lengths, dtype, divisor)

    def decode_reduce_encode(self, codec_in, wires, codec_out, lengths, out, seed=0):
        self._launch("decode_reduce_encode", [*wires, out], codec_in, codec_out, lengths, seed)

    def decode_reduce_encode_batch(self, codec_in, codec_out, parts):
        self.device.launched.append("decode_reduce_encode_batch")
        for wires, lengths, out, seed in parts:
            how = codec_in, codec_out, lengths, seed
            self._enqueue("decode_reduce_encode", [*wires, out], *how)

    def _launch(self, name, memories, *how):
        self.device.launched.append(name)
        self._enqueue(name, memories, *how)

    def _enqueue(self, name, memories, *how):
        for memory in memories:
            assert isinstance(memory, DeviceMemory)
            assert memory.device is self.device
        places = [(memory.pointer, memory.size) for memory in memories]
        how = [value.copy() if isinstance(value, np.ndarray) else value for value in how]
        self.device.enqueue(lambda: self._run(name, [self.device.at(*p) for p in places], how))

    def _run(self, name, memories, how):
        *inputs, out = memories
        if name == "encode":
            codec, dtype, starts, lengths, seed = how
            reference.encode(codec, inputs[0], dtype, starts, lengths, out, seed)
        elif name == "decode":
            codec, starts, lengths, dtype = how
            reference.decode(codec, inputs[0], starts, lengths, out, dtype)
        elif name == "decode_reduce":
            codec, starts, lengths, dtype, divisor = how
            reference.decode_reduce(codec, inputs, starts, lengths, out, dtype, divisor)
        else:
            codec_in, codec_out, lengths, seed = how
            reference.decode_reduce_encode(codec_in, inputs, codec_out, lengths, out, seed)


class FakeDevice:
    """See :class:`zcomm.device.Device`."""

    num_multiprocessors = 4

    def __init__(self, *, records=True, emulator=None):
        self.name = f"fake:{next(NUMBERS)}"
        self.records = records
        self.bytes = np.empty(ARENA_NBYTES, np.uint8)  # pages exist once they are touched
        self.base = self.bytes.ctypes.data
        self.lock = threading.RLock()
        self.thread = threading.local()
        self.default = FakeStream(self)
        self.launched = []
        self.synchronized = 0
        self._emulator = emulator
        self._kernels = FakeKernels(self)
        self._end = 0
        self._idle = {}  # (stream or "pinned", nbytes): starts of free blocks
        self._limbo = []  # (events, key, start): freed, but streams that were named use them

    # What zcomm asks for.

    def kernels(self):
        if self._emulator is None:
            return self._kernels
        return importlib.import_module("zcomm.codecs.cuda")

    def launch(self, kernel, grid, threads, arguments):
        given = tuple(argument.copy() for argument in arguments)
        self.launched.append(kernel)
        self.enqueue(lambda: self._emulator.launch(kernel, grid, threads, given))

    def empty(self, nbytes):
        block = self.block(nbytes)
        memory = block.memory
        return DeviceMemory(memory.pointer, nbytes, self, block)

    def pinned(self, nbytes):
        start = self._take("pinned", nbytes)
        held = (ctypes.c_uint8 * nbytes).from_buffer(self.bytes, start)
        weakref.finalize(held, self._give, "pinned", nbytes, start)
        return np.frombuffer(held, np.uint8)

    def copy(self, target, source):
        assert target.size == source.size
        to, start = (slice(at, at + target.size) for at in map(self._start, (target, source)))
        self.enqueue(lambda: np.copyto(self.bytes[to], self.bytes[start]))

    def synchronize(self):
        self.synchronized += 1
        self.here().record().synchronize()

    def stream(self):
        return FakeStream(self)

    @contextmanager
    def using(self, stream):
        before = getattr(self.thread, "stream", None)
        self.thread.stream = stream
        try:
            yield
        finally:
            self.thread.stream = before

    def here(self):
        return getattr(self.thread, "stream", None) or self.callers()

    def current(self, kinds):
        return [self.callers()]

    def lend(self, arrays, stream):
        if not self.records:
            return list(arrays)
        for array in arrays:
            array.block.streams.add(stream)
        return []

    # What a caller does.

    def callers(self):
        """The stream that the caller's framework works on in this thread."""
        return getattr(self.thread, "callers", self.default)

    @contextmanager
    def calling_on(self, stream):
        before = self.callers()
        self.thread.callers = stream
        try:
            yield
        finally:
            self.thread.callers = before

    # Memory.

    def block(self, nbytes):
        stream = self.here()
        with self.lock:
            return Block(self, self._take(stream, nbytes), nbytes, stream)

    def free(self, start, nbytes, stream, streams):
        with self.lock:
            events = [used.record() for used in streams if used is not stream]
            if events:
                self._limbo.append((events, stream, nbytes, start))
            else:
                self._give(stream, nbytes, start)

    def _give(self, key, nbytes, start):
        with self.lock:
            self._idle.setdefault((key, nbytes), []).append(start)

    def _take(self, key, nbytes):
        with self.lock:
            passed = [one for one in self._limbo if all(event.passed for event in one[0])]
            self._limbo = [one for one in self._limbo if one not in passed]
            for _, stream, size, start in passed:
                self._give(stream, size, start)
            idle = self._idle.get((key, nbytes))
            if idle:
                return idle.pop()
            start = self._end
            self._end += -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
            assert self._end <= ARENA_NBYTES, "the fake device is out of memory"
            return start

    def at(self, pointer, size):
        start = pointer - self.base
        return self.bytes[start : start + size]

    def _start(self, memory):
        if isinstance(memory, DeviceMemory):
            assert memory.device is self
            return memory.pointer - self.base
        start = memory.ctypes.data - self.base
        assert 0 <= start < ARENA_NBYTES, "host memory that is not pinned"
        return start

    # Time.

    def enqueue(self, task):
        with self.lock:
            self.here().tasks.append(task)

    def run_until(self, event):
        """Do what an event needs, and nothing else."""
        with self.lock:
            tasks = event.stream.tasks
            while not event.passed:
                task = tasks[0]
                if isinstance(task, FakeEvent):
                    task.passed = True
                elif isinstance(task, tuple):
                    self.run_until(task[1])
                else:
                    task()
                tasks.popleft()


class FakeArray:
    """Stands for a CUDA tensor. ``dtype`` is a name; bfloat16 is kept as uint16."""

    def __init__(self, device, block, shape, dtype, strides=None):
        self.device = device
        self.block = block
        self.shape = tuple(shape)
        self.dtype = dtype
        self.strides = strides or c_strides(self.shape)

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def T(self):
        return FakeArray(self.device, self.block, self.shape[::-1], self.dtype, self.strides[::-1])

    def values(self):
        """The elements as they are now, for a task whose turn has come."""
        return place(self.device, self.block.memory.pointer, self)

    def task(self, function):
        """Enqueue ``function(values)``; the task knows the address only."""
        pointer, device = self.block.memory.pointer, self.device
        like = FakeArray.__new__(FakeArray)
        like.shape, like.dtype, like.strides = self.shape, self.dtype, self.strides
        device.enqueue(lambda: function(place(device, pointer, like)))

    def numpy(self):
        """Wait on the host, and return the stored values."""
        found = []
        self.task(lambda values: found.append(values.copy()))
        self.device.here().record().synchronize()
        return found[0]

    def write(self, stored):
        stored = np.array(stored)
        self.task(lambda values: np.copyto(values, stored, casting="unsafe"))


def place(device, pointer, like):
    dtype = np.dtype("uint16" if like.dtype == "bfloat16" else like.dtype)
    memory = device.bytes[pointer - device.base :]
    usable = memory[: memory.size // dtype.itemsize * dtype.itemsize].view(dtype)
    strides = [step * dtype.itemsize for step in like.strides]
    return np.lib.stride_tricks.as_strided(usable, like.shape, strides)


def c_strides(shape):
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


class FakeKind:
    """See :class:`zcomm.kinds.ArrayKind`."""

    def matches(self, x):
        return isinstance(x, FakeArray)

    def on_device(self, x):
        return True

    def dtype(self, x):
        return x.dtype

    def is_contiguous(self, x):
        return 0 in x.shape or x.strides == c_strides(x.shape)

    def contiguous(self, x):
        if self.is_contiguous(x):
            return x
        made = self.empty(x, x.shape, None)
        self.assign(made, x)
        return made

    def flat(self, x):
        return FakeArray(x.device, x.block, (int(np.prod(x.shape, dtype=int)),), x.dtype)

    def memory(self, flat):
        nbytes = flat.shape[0] * itemsize(flat.dtype)
        return DeviceMemory(flat.block.memory.pointer, nbytes, flat.device, flat)

    def empty(self, like, shape, dtype):
        return new(like.device, shape, dtype or like.dtype)

    def cast(self, x, dtype):
        made = self.empty(x, x.shape, dtype)
        self.assign(made, x)
        return made

    def fill(self, x, value):
        x.task(lambda values: values.fill(value))

    def assign(self, target, source):
        pointer, device = source.block.memory.pointer, source.device
        like = FakeArray(device, None, source.shape, source.dtype, source.strides)
        target.task(
            lambda values: np.copyto(values, place(device, pointer, like), casting="unsafe")
        )


def itemsize(dtype):
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def new(device, shape, dtype):
    """Return an array of undefined content."""
    numel = int(np.prod(shape, dtype=int))
    return FakeArray(device, device.block(numel * itemsize(dtype)), shape, dtype)


def as_fake(stored, dtype, device=None):
    """Return a fake array that will hold these values once the caller's stream gets there."""
    made = new(device or mine(), stored.shape, dtype)
    made.write(stored)
    return made


_MINE = threading.local()
EMULATOR = {}
"""What launches the kernels of the devices that ``mine`` makes; empty: the reference."""


def mine():
    """Return the device of the rank that this thread is."""
    if not hasattr(_MINE, "device"):
        _MINE.device = FakeDevice(records=next(NUMBERS) % 2 == 0, emulator=EMULATOR.get("of all"))
    return _MINE.device


def use(device):
    """Make a device that of the rank that this thread is."""
    _MINE.device = device


kinds.KINDS.append(FakeKind())
