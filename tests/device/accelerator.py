"""torch's device "accel": host memory behind a real backend, for what needs a GPU's manners.

Values, autograd and optimizers are the CPU's; devices, refusals and threads are an accelerator's:
a host tensor among its own is an error, backward hooks run in the engine's thread, memory is
counted. Work is done at once: for order on streams there is ``fake``. ``load`` builds the backend
(``accelerator.cpp``) where it was not built yet, and tells torch and zcomm of it.

Ranks that are threads may share a device as long as no hook of a backward waits for another rank:
all backwards of a device run in one thread. Otherwise each takes its own (``use``).
"""

import ctypes
import fcntl
import functools
import threading
import types
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch.utils import cpp_extension

from zcomm import kinds
from zcomm.codecs import kernels
from zcomm.device import DeviceMemory

NAME = "accel"
SOURCE = Path(__file__).with_name("accelerator.cpp")
_LOCK = threading.Lock()


def load():
    """Make the device exist in this process, and return what counts its memory."""
    with _LOCK:
        return _load()


def use(rank):
    """Make the device of this number the current one of this thread, and return its name."""
    index = rank % torch.accel.device_count()
    torch.accel.set_device(index)
    return f"{NAME}:{index}"


@functools.cache
def _load():
    library = _build()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(library))
    torch.utils.generate_methods_for_privateuse1_backend()
    kinds.KINDS.insert(0, AccelKind(library))
    kinds._OF_TYPE.clear()  # tensors may have been met as those of the ordinary kind
    return library


def _build():
    text = f"{torch.__version__} {SOURCE.read_text()}"
    name = f"zcomm_accel_{blake2b(text.encode(), digest_size=6).hexdigest()}"
    directory = Path(cpp_extension.get_default_build_root()) / name
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "building").open("w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        (directory / "lock").unlink(missing_ok=True)  # torch's own outlives a killed build
        built = directory / f"{name}.so"
        if not (directory / "built").exists():
            cpp_extension.load(
                name,
                [str(SOURCE)],
                extra_cflags=["-O1"],
                build_directory=str(directory),
                is_python_module=False,
            )
            (directory / "built").touch()
        torch.ops.load_library(built)
    library = ctypes.CDLL(str(built))
    for function in (library.accel_live_nbytes, library.accel_peak_nbytes):
        function.restype = ctypes.c_int64
    library.accel_holds.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    library.accel_pinned.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    library.accel_holds.restype = library.accel_pinned.restype = ctypes.c_bool
    return library


def _module(library):
    """Return ``torch.accel``, by the names that ``torch.cuda`` has."""

    def index_of(device=None):
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return library.accel_current() if index is None else index

    def set_device(device):
        if library.accel_exchange(index_of(device)) < 0:
            raise RuntimeError(f"there is no device {device}")

    @contextmanager
    def using(device):
        before = library.accel_current()
        set_device(device)
        try:
            yield
        finally:
            set_device(before)

    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.init = module._lazy_init = lambda: None
    module.device_count = lambda: library.accel_num_devices()
    module.current_device = lambda: library.accel_current()
    module.set_device, module.device = set_device, using
    module._exchange_device = module._maybe_exchange_device = library.accel_exchange
    module.synchronize = lambda device=None: None
    module.current_stream = lambda device=None: torch.Stream(device=f"{NAME}:{index_of(device)}")
    module.default_stream = module.current_stream
    module.stream = lambda stream: nullcontext()
    module.Stream, module.Event = torch.Stream, torch.Event
    # Checkpointing asks, to disable it; where autocast is enabled, operations raise.
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    # The CPU's generator draws, and torch seeds it together with those of all devices.
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=NAME: torch.get_rng_state()
    module.set_rng_state = lambda state, device=NAME: torch.set_rng_state(state)
    module.memory_allocated = lambda device=None: library.accel_live_nbytes(index_of(device))
    module.max_memory_allocated = lambda device=None: library.accel_peak_nbytes(index_of(device))
    module.reset_peak_memory_stats = lambda device=None: library.accel_reset_peak(index_of(device))
    return module


class AccelEvent:
    """See :class:`zcomm.device.Event`."""

    def done(self):
        return True

    def synchronize(self):
        pass


class AccelStream:
    """See :class:`zcomm.device.DeviceStream`."""

    pointer = 0

    def record(self):
        return AccelEvent()

    def wait(self, event):
        assert isinstance(event, AccelEvent)


class AccelKernels:
    """The host's kernels; what they are given must be memory of the device that is not freed."""

    def __init__(self, device):
        self._on_host = device.on_host

    def encode(self, codec, x, dtype, starts, lengths, out, seed=0):
        kernels().encode(codec, self._on_host(x), dtype, starts, lengths, self._on_host(out), seed)

    def encode_batch(self, codec, x, dtype, messages):
        for starts, lengths, out, seed in messages:
            self.encode(codec, x, dtype, starts, lengths, out, seed)

    def decode(self, codec, wire, starts, lengths, out, dtype):
        kernels().decode(codec, self._on_host(wire), starts, lengths, self._on_host(out), dtype)

    def decode_batch(self, codec, messages, out, dtype):
        for wire, starts, lengths in messages:
            self.decode(codec, wire, starts, lengths, out, dtype)

    def decode_reduce(self, codec, wires, starts, lengths, out, dtype, divisor):
        inputs = list(map(self._on_host, wires))
        kernels().decode_reduce(codec, inputs, starts, lengths, self._on_host(out), dtype, divisor)

    def decode_reduce_encode(self, codec_in, wires, codec_out, lengths, out, seed=0):
        inputs = list(map(self._on_host, wires))
        kernels().decode_reduce_encode(
            codec_in, inputs, codec_out, lengths, self._on_host(out), seed
        )

    def decode_reduce_encode_batch(self, codec_in, codec_out, parts):
        for wires, lengths, out, seed in parts:
            self.decode_reduce_encode(codec_in, wires, codec_out, lengths, out, seed)


class AccelDevice:
    """See :class:`zcomm.device.Device`."""

    num_multiprocessors = 4

    def __init__(self, library, index):
        self.name = f"{NAME}:{index}"
        self._index = index
        self._library = library
        self._stream = AccelStream()
        self._kernels = AccelKernels(self)

    def kernels(self):
        return self._kernels

    def launch(self, kernel, grid, threads, arguments):
        raise AssertionError(f"{kernel}: the kernels here are the host's")

    def empty(self, nbytes):
        return self.memory(torch.empty(nbytes, dtype=torch.uint8, device=self.name))

    def memory(self, flat):
        """Return the memory of a one-dimensional contiguous tensor, which it keeps alive."""
        return DeviceMemory(flat.data_ptr(), flat.numel() * flat.element_size(), self, flat)

    def pinned(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()

    def copy(self, target, source):
        assert target.size == source.size
        assert isinstance(target, DeviceMemory) or isinstance(source, DeviceMemory)
        to, start = map(self._reached, (target, source))
        np.copyto(to, start)

    def synchronize(self):
        pass

    def stream(self):
        return AccelStream()

    @contextmanager
    def using(self, stream):
        assert isinstance(stream, AccelStream)
        yield

    def here(self):
        return self._stream

    def current(self, kinds):
        return [self._stream]

    def lend(self, arrays, stream):
        return []

    def on_host(self, memory):
        """Return memory of the device as the host reads it, which nobody but the device may."""
        assert isinstance(memory, DeviceMemory), "host memory where the device's is expected"
        assert memory.device is self
        if memory.size == 0:
            return np.empty(0, np.uint8)
        held = self._library.accel_holds(memory.pointer, memory.size, self._index)
        assert held, "memory that was freed, or of another device"
        return np.frombuffer((ctypes.c_uint8 * memory.size).from_address(memory.pointer), np.uint8)

    def _reached(self, memory):
        if isinstance(memory, DeviceMemory):
            return self.on_host(memory)
        pinned = memory.size == 0 or self._library.accel_pinned(memory.ctypes.data, memory.size)
        assert pinned, "host memory that is not pinned"
        return memory


class AccelKind(kinds.TorchKind):
    """torch's kind, which has these devices, too: kinds are told apart by type, not by device."""

    def __init__(self, library):
        count = library.accel_num_devices()
        self.devices = [AccelDevice(library, index) for index in range(count)]

    def dtype(self, x):
        if x.device.type == NAME and x.layout is torch.strided:
            return str(x.dtype).removeprefix("torch.")
        return super().dtype(x)

    def memory(self, flat):
        if flat.device.type == NAME:
            return self.devices[flat.device.index].memory(flat)
        return super().memory(flat)
