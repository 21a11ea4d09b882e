"""CUDA devices: CuPy launches, copies and orders; torch allocates where it is there.

CuPy is needed for every device array, torch's included; torch is needed for its own tensors only.
A reader must not assume that importing this module needs either, or a driver: the first call of
:func:`cuda_device` does.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import numpy as np

from zcomm import environment
from zcomm.device import DeviceMemory, DeviceStream, HostMemory, Memory
from zcomm.errors import CodecError, ZcommError

REMEDY = "pip install 'zcomm[cuda13]', or 'zcomm[cuda12]' for CUDA 12"
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # cudaMemcpyKind


@functools.cache
def load_cupy() -> Any:
    """Import CuPy.

    Raises:
        ZcommError: it is not installed, or finds no driver or no device.
    """
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise ZcommError(f"device arrays need CuPy ({error}): {REMEDY}") from None
    if not cupy.cuda.is_available():
        raise ZcommError(f"device arrays need a CUDA driver and a device: CuPy {cupy_finds(cupy)}")
    return cupy


def cupy_finds(cupy: Any) -> str:
    """Say in words which devices CuPy finds, or why none."""
    try:
        return f"finds {cupy.cuda.runtime.getDeviceCount()} devices"
    except Exception as error:
        return "finds none: " + " ".join(str(error).split())


def cuda_device(index: int) -> CudaDevice:
    """Return the device of this number, the same object at every call.

    Raises:
        ZcommError: CuPy, the driver or the device is missing.
    """
    with _LOCK:
        if index not in _DEVICES:
            _DEVICES[index] = CudaDevice(load_cupy(), index)
        return _DEVICES[index]


_DEVICES: dict[int, CudaDevice] = {}
_LOCK = threading.Lock()


class CudaEvent:
    """See :class:`zcomm.device.Event`."""

    def __init__(self, cupy: Any, pointer: int) -> None:
        self.event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(self.event.ptr, pointer)

    def done(self) -> bool:
        """See :class:`zcomm.device.Event`."""
        return bool(self.event.done)

    def synchronize(self) -> None:
        """See :class:`zcomm.device.Event`."""
        self.event.synchronize()


class CudaStream:
    """A stream by its handle; ``owner`` is the torch or CuPy stream that it is kept alive by."""

    def __init__(self, device: CudaDevice, pointer: int, owner: Any = None) -> None:
        self.device = device
        self.pointer = pointer
        self.owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer

    @functools.cached_property
    def for_cupy(self) -> Any:
        """The stream as CuPy knows it."""
        return self.device.cupy.cuda.Stream.from_external(self)

    def record(self) -> CudaEvent:
        """See :class:`zcomm.device.DeviceStream`."""
        with self.device.selected():
            return CudaEvent(self.device.cupy, self.pointer)

    def wait(self, event: Any) -> None:
        """See :class:`zcomm.device.DeviceStream`."""
        with self.device.selected():  # handle 0 is a stream of every device
            self.device.cupy.cuda.runtime.streamWaitEvent(self.pointer, event.event.ptr)


class CudaDevice:
    """See :class:`zcomm.device.Device`."""

    def __init__(self, cupy: Any, index: int) -> None:
        self.cupy = cupy
        self.index = index
        self.name = f"cuda:{index}"
        attributes = cupy.cuda.Device(index).attributes
        self.num_multiprocessors: int = attributes["MultiProcessorCount"]
        self.arch = f"sm_{cupy.cuda.Device(index).compute_capability}"
        self.bus: str = cupy.cuda.Device(index).pci_bus_id
        self._functions: dict[str, Any] = {}
        self._lock = threading.Lock()

    @property
    def title(self) -> str:
        """The name of the product."""
        name = self.cupy.cuda.runtime.getDeviceProperties(self.index)["name"]
        return name.decode() if isinstance(name, bytes) else str(name)

    def make_current(self) -> None:
        """Make the device the one that this thread's CuPy and torch use unless told otherwise."""
        self.selected().use()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.set_device(self.index)

    def selected(self) -> Any:
        """Make the device the one of this thread, as a context."""
        return self.cupy.cuda.Device(self.index)

    def kernels(self) -> Any:
        """See :class:`zcomm.device.Device`."""
        chosen = environment.text("ZCOMM_CODEC_BACKEND")
        if chosen not in ("", "cuda"):
            raise CodecError(
                f"ZCOMM_CODEC_BACKEND={chosen} reads host memory, but an array lies on {self.name}:"
                " possible for it is cuda"
            )
        return importlib.import_module("zcomm.codecs.cuda")

    def launch(self, kernel: str, grid: int, threads: int, arguments: tuple[Any, ...]) -> None:
        """See :class:`zcomm.device.Device`."""
        function = self._functions.get(kernel) or self._load(kernel)
        with self.selected():
            stream = self._current_for_cupy()
            function((grid, 1, 1), (threads, 1, 1), arguments, 0, stream)

    def empty(self, nbytes: int) -> DeviceMemory:
        """See :class:`zcomm.device.Device`: from torch's allocator where torch has started CUDA."""
        torch = _torch_with_cuda()
        if torch is not None:
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.name)
            return DeviceMemory(tensor.data_ptr(), nbytes, self, tensor)
        with self.selected(), self._current_for_cupy():
            memory = self.cupy.cuda.alloc(nbytes)
        return DeviceMemory(memory.ptr, nbytes, self, memory)

    def pinned(self, nbytes: int) -> HostMemory:
        """See :class:`zcomm.device.Device`."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        with self.selected():
            memory = self.cupy.cuda.alloc_pinned_memory(nbytes)
        return np.frombuffer(memory, np.uint8, nbytes)

    def copy(self, target: Memory, source: Memory) -> None:
        """See :class:`zcomm.device.Device`."""
        if target.size != source.size:
            raise ValueError(f"copy of {source.size} bytes to {target.size}")
        if isinstance(target, DeviceMemory):
            kind = _ON_DEVICE if isinstance(source, DeviceMemory) else _TO_DEVICE
        else:
            kind = _TO_HOST
        with self.selected():
            self.cupy.cuda.runtime.memcpyAsync(
                _address(target), _address(source), target.size, kind, self.here().pointer
            )

    def synchronize(self) -> None:
        """See :class:`zcomm.device.Device`."""
        with self.selected():
            self.cupy.cuda.runtime.streamSynchronize(self.here().pointer)

    def stream(self) -> CudaStream:
        """See :class:`zcomm.device.Device`: torch's, so that its allocator knows it, or CuPy's."""
        torch = _torch_with_cuda()
        if torch is not None:
            made = torch.cuda.Stream(device=self.index)
            return CudaStream(self, made.cuda_stream, made)
        with self.selected():
            made = self.cupy.cuda.Stream(non_blocking=True)
        return CudaStream(self, made.ptr, made)

    @contextmanager
    def using(self, stream: DeviceStream) -> Iterator[None]:
        """See :class:`zcomm.device.Device`."""
        assert isinstance(stream, CudaStream)
        torch = _torch_with_cuda()
        before = getattr(_THREAD, "stream", None)
        with ExitStack() as stack:
            stack.enter_context(self.selected())
            if torch is not None:
                stack.enter_context(torch.cuda.stream(self._for_torch(torch, stream)))
            stack.enter_context(stream.for_cupy)
            _THREAD.stream = stream
            try:
                yield
            finally:
                _THREAD.stream = before

    def here(self) -> CudaStream:
        """See :class:`zcomm.device.Device`."""
        inside = getattr(_THREAD, "stream", None)
        if inside is not None and inside.device is self:
            return cast(CudaStream, inside)
        torch = _torch_with_cuda()
        return self._of_cupy() if torch is None else self._of_torch(torch)

    def current(self, kinds: Collection[type]) -> list[CudaStream]:
        """See :class:`zcomm.device.Device`: torch's stream for tensors, CuPy's for its arrays."""
        torch = _torch_with_cuda()
        tensors = [torch is not None and issubclass(kind, torch.Tensor) for kind in kinds]
        streams = []
        if torch is not None and any(tensors):
            streams.append(self._of_torch(torch))
        if not all(tensors):
            streams.append(self._of_cupy())
        return streams

    def lend(self, arrays: Sequence[object], stream: DeviceStream) -> list[object]:
        """See :class:`zcomm.device.Device`: torch's allocator keeps a record, CuPy's has none."""
        assert isinstance(stream, CudaStream)
        torch = _torch_with_cuda()
        held = []
        for x in arrays:
            if torch is not None and isinstance(x, torch.Tensor):
                x.record_stream(self._for_torch(torch, stream))
            else:
                held.append(x)
        return held

    def _current_for_cupy(self) -> Any:
        return self.here().for_cupy

    def _of_torch(self, torch: Any) -> CudaStream:
        current = torch.cuda.current_stream(self.index)
        return CudaStream(self, current.cuda_stream, current)

    def _of_cupy(self) -> CudaStream:
        with self.selected():
            current = self.cupy.cuda.get_current_stream()
        return CudaStream(self, current.ptr, current)

    def _for_torch(self, torch: Any, stream: CudaStream) -> Any:
        if isinstance(stream.owner, torch.cuda.Stream):
            return stream.owner
        if stream.pointer == 0:
            return torch.cuda.default_stream(self.index)
        return torch.cuda.ExternalStream(stream.pointer, device=self.index)

    def _load(self, kernel: str) -> Any:
        from zcomm.codecs import compile as compiler

        with self._lock, self.selected():
            if kernel not in self._functions:
                self._functions.update(compiler.load(self.cupy, self.arch, kernel))
            return self._functions[kernel]


_THREAD = threading.local()
"""The stream of the operation that runs in this thread, if one does."""


def _address(memory: Memory) -> int:
    return memory.pointer if isinstance(memory, DeviceMemory) else memory.ctypes.data


def _torch_with_cuda() -> Any:
    """Return torch where the caller has imported it and it has started CUDA, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None
