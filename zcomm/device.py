"""Memory on a device, what zcomm asks of a device, and the order of operations on it.

Words: a *device stream* is a queue of work on a device; nothing here waits for it on the host
unless it is called ``synchronize``. The *current* stream is a property of the thread: inside
:meth:`Device.using` the one named there, else the one that the caller's framework (torch, CuPy)
works on. A *lane* is the one stream of a rank's operations on a device; operations are ordered
against the caller's streams by events alone.

A reader must not assume CUDA: ``zcomm.cuda`` holds the one device of this package, tests bring
others. Memory is written and read in the order of the current stream, never at the time of a call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

HostMemory = npt.NDArray[np.uint8]


class DeviceMemory:
    """A run of bytes on a device: ``pointer``, ``size`` in bytes, ``device``.

    ``memory[a:b]`` is a part of it. All parts share the ``owner``, an object that keeps the
    allocation alive; the memory itself owns nothing.
    """

    __slots__ = ("device", "owner", "pointer", "size")

    def __init__(self, pointer: int, size: int, device: Device, owner: object) -> None:
        self.pointer = pointer
        self.size = size
        self.device = device
        self.owner = owner

    @property
    def nbytes(self) -> int:
        """The size in bytes, by the name that NumPy gives it."""
        return self.size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> DeviceMemory:
        start, stop, step = span.indices(self.size)
        if step != 1:
            raise ValueError(f"device memory is cut in steps of 1, not {step}")
        return DeviceMemory(self.pointer + start, max(stop - start, 0), self.device, self.owner)

    def __repr__(self) -> str:
        return f"DeviceMemory({self.size} bytes at {self.pointer:#x} on {self.device.name})"


Memory = HostMemory | DeviceMemory


class Event(Protocol):
    """A point in the work of a device stream."""

    def done(self) -> bool:
        """Tell whether the work up to this point has ended."""

    def synchronize(self) -> None:
        """Wait on the host until it has."""


class DeviceStream(Protocol):
    """A queue of work on a device; ``pointer`` is its handle (``cudaStream_t``)."""

    @property
    def pointer(self) -> int:
        """The handle of the stream."""

    def record(self) -> Event:
        """Return the event after everything that the stream was given so far."""

    def wait(self, event: Event) -> None:
        """Let what the stream is given from now on wait for an event; the host does not wait."""


class Device(Protocol):
    """What zcomm asks of a device; all work is enqueued on the thread's current stream."""

    name: str
    num_multiprocessors: int

    def kernels(self) -> Any:
        """Return the codec kernels (:class:`zcomm.codecs.Kernels`) for memory of this device.

        They have three functions more, which need as few launches as the device allows for several
        messages: ``encode_batch(codec, x, dtype, messages)`` of one array, each message a tuple
        (starts, lengths, out, seed); ``decode_batch(codec, messages, out, dtype)`` to one array,
        each (wire, starts, lengths); ``decode_reduce_encode_batch(codec_in, codec_out, parts)``,
        each part (wires, lengths, out, seed).

        Raises:
            CodecError: ``ZCOMM_CODEC_BACKEND`` asks for kernels that only read host memory.
        """

    def launch(self, kernel: str, grid: int, threads: int, arguments: tuple[Any, ...]) -> None:
        """Enqueue an instantiation of a kernel, named as in C++: ``encode<zc::bf16, 4, 128>``.

        ``grid`` blocks of ``threads`` threads. ``arguments`` are NumPy scalars of the exact width
        of the kernel's parameters, structured ones (np.void) for structs passed by value.
        """

    def empty(self, nbytes: int) -> DeviceMemory:
        """Allocate memory of undefined content, to be used on the current stream.

        Freed (no reference is left), it may be given out again to the same stream at once.
        """

    def pinned(self, nbytes: int) -> HostMemory:
        """Allocate host memory that copies can reach without the host's help.

        It must not be freed before the copies that were enqueued have ended.
        """

    def copy(self, target: Memory, source: Memory) -> None:
        """Enqueue a copy between memories of equal size, one at least on this device.

        Host memory is pinned, and left alone until the copy has ended.
        """

    def synchronize(self) -> None:
        """Wait on the host for everything that the current stream was given."""

    def stream(self) -> DeviceStream:
        """Create a stream that waits for no other."""

    def using(self, stream: DeviceStream) -> AbstractContextManager[None]:
        """Make a stream the current one of this thread, for torch and CuPy too."""

    def here(self) -> DeviceStream:
        """Return the current stream of this thread."""

    def current(self, kinds: Collection[type]) -> Sequence[DeviceStream]:
        """Return the streams on which the caller works with arrays of these types, as of now."""

    def lend(self, arrays: Sequence[object], stream: DeviceStream) -> Sequence[object]:
        """Tell the owners of memory that ``stream`` uses it, too.

        Returns:
            The arrays whose owner cannot be told: they must be held until the stream is done.
        """


def device_of(*memories: Memory) -> Device | None:
    """Return the device on which memories lie, None for host memory.

    Raises:
        TypeError: they lie in several places.
    """
    first = _place(memories[0]) if memories else None
    if all(_place(memory) is first for memory in memories):
        return first
    places = {id(place): place for place in map(_place, memories)}.values()
    names = sorted("the host" if place is None else place.name for place in places)
    raise TypeError(
        f"arrays of one call lie on {' and '.join(names)}: possible are host arrays, or arrays of "
        "one device"
    )


def _place(memory: Memory) -> Device | None:
    return memory.device if isinstance(memory, DeviceMemory) else None


def kernels_of(memory: Memory) -> Any:
    """Return the codec kernels (:class:`zcomm.codecs.Kernels`) for the place of this memory."""
    if isinstance(memory, DeviceMemory):
        return memory.device.kernels()
    from zcomm.codecs import kernels

    return kernels()


def callers_stream(array: object, memory: Memory) -> AbstractContextManager[None]:
    """Return a context in which the stream of an array's caller is the current one."""
    if not isinstance(memory, DeviceMemory):
        return nullcontext()
    device = memory.device
    return device.using(device.current([type(array)])[0])


def scratch(nbytes: int, like: Memory) -> Memory:
    """Allocate memory in the place where ``like`` lies."""
    if isinstance(like, DeviceMemory):
        return like.device.empty(nbytes)
    return np.empty(nbytes, np.uint8)


def copy(target: Memory, source: Memory) -> None:
    """Copy bytes between two memories of one place, on a device in the order of its stream."""
    if isinstance(target, DeviceMemory):
        if target.size:
            target.device.copy(target, source)
    else:
        assert not isinstance(source, DeviceMemory)
        target[...] = source


def on_host(memory: Memory) -> HostMemory:
    """Return the bytes as host memory: itself, or a copy that the host has waited for."""
    if not isinstance(memory, DeviceMemory):
        return memory
    staged = memory.device.pinned(memory.size)
    copy_to_host(staged, memory)
    memory.device.synchronize()
    return staged


def copy_to_host(target: HostMemory, source: DeviceMemory) -> None:
    """Enqueue a copy into pinned host memory."""
    if source.size:
        source.device.copy(target, source)


def from_host(target: Memory, source: HostMemory) -> None:
    """Write host bytes of any kind to memory; the host waits for a device."""
    if not isinstance(target, DeviceMemory):
        target[...] = source
    elif target.size:
        staged = target.device.pinned(target.size)
        staged[...] = source
        target.device.copy(target, staged)
        target.device.synchronize()


class Lane:
    """The one stream of a rank's operations on a device, and the arrays that it still uses."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.stream()
        self._held: deque[tuple[Event, Sequence[object]]] = deque()

    def begin(self, arrays: Sequence[object]) -> Operation:
        """Issue an operation on ``arrays``: it comes after what the caller has enqueued."""
        while self._held and self._held[0][0].done():
            self._held.popleft()
        return Operation(self, arrays)

    def hold(self, arrays: Sequence[object], until: Event) -> None:
        """Keep arrays alive until an event has passed."""
        if arrays:
            self._held.append((until, arrays))


class Operation:
    """One operation on device arrays, ordered by events.

    1. Issued: an event on the caller's streams marks what it must come after.
    2. Running, perhaps in another thread: the lane's stream waits for that event.
    3. Joined, in the caller's thread: the caller's streams wait for its end.
    """

    def __init__(self, lane: Lane, arrays: Sequence[object]) -> None:
        self._lane = lane
        self._arrays = arrays
        self._kinds = frozenset(map(type, arrays))
        self._issued = [stream.record() for stream in lane.device.current(self._kinds)]
        self._finished: Event | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enqueue everything inside on the lane's stream."""
        lane = self._lane
        with lane.device.using(lane.stream):
            for event in self._issued:
                lane.stream.wait(event)
            held = lane.device.lend(self._arrays, lane.stream)
            try:
                yield
            finally:
                self._finished = lane.stream.record()
                lane.hold(held, self._finished)
                self._arrays = ()

    def join(self) -> None:
        """Let the caller's streams wait for the end of the operation; the host does not wait."""
        if self._finished is not None:
            for stream in self._lane.device.current(self._kinds):
                stream.wait(self._finished)
