"""A device that is none: the CUDA kernels, compiled by g++ from the same source, on host memory.

``EmulatedDevice`` is a ``zcomm.device.Device``. A launch or copy is done when the call returns, so
streams and events have nothing to order and nothing to wait for: what this shows is arithmetic,
addresses and the order of launches, not how they overlap.
"""

import ctypes
import importlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from zcomm.codecs import instances
from zcomm.device import DeviceMemory

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCES = ROOT / "zcomm" / "csrc"
SANITIZERS = {
    None: ("-O1",),
    "address": (
        "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
    ),
    "thread": ("-O1", "-g", "-DEMULATOR_THREADS", "-pthread", "-fsanitize=thread"),
}  # fmt: skip
FLAGS = (
    "-std=c++20", "-fPIC", "-shared", "-ffp-contract=off",
    "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
)  # fmt: skip

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p

why_not = None if shutil.which("g++") else "the emulator of CUDA needs g++"


def build(folder, sanitizer=None, sources=SOURCES, source="kernels.cu", names=None):
    """Compile kernels, by default all, for the emulator; return the path of the library."""
    kernels, library = Path(folder) / "kernels.inc", Path(folder) / "emulator.so"
    kernels.write_text("".join(f"KERNEL({name})\n" for name in names or instances.every()))
    defined = f'-DKERNELS="{kernels}"', f'-DSOURCE="{source}"'
    command = ["g++", *FLAGS, *SANITIZERS[sanitizer], f"-I{sources}", *defined]
    subprocess.run([*command, "-x", "c++", HERE / "emulator.cpp", "-o", library], check=True)
    return library


class Block:
    """An allocation exactly as long as asked for, at a multiple of 16, full of garbage."""

    def __init__(self, nbytes):
        self.pointer = LIBC.malloc(ctypes.c_size_t(nbytes)) or 0
        ctypes.memset(self.pointer, 0xCD, nbytes)

    def __del__(self):
        LIBC.free(ctypes.c_void_p(self.pointer))


class Done:
    """An event that has passed."""

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class EmulatedStream:
    """A stream on which everything is done when it is enqueued."""

    pointer = 0

    def record(self) -> Done:
        return Done()

    def wait(self, event) -> None:
        assert event.done()


class EmulatedDevice:
    """See ``zcomm.device.Device``. ``launches`` holds the names of what ran, in order."""

    def __init__(self, library, name="emulated:0"):
        self.name = name
        self.num_multiprocessors = 2
        self.launches: list[str] = []
        self._library = ctypes.CDLL(str(library))
        self._library.emulator_parameter_nbytes.restype = ctypes.c_size_t

    def kernels(self):
        return importlib.import_module("zcomm.codecs.cuda")

    def parameter_nbytes(self, kernel):
        """The sizes of a kernel's parameters."""
        sizes = []
        while size := self._library.emulator_parameter_nbytes(
            kernel.encode(), ctypes.c_size_t(len(sizes))
        ):
            sizes.append(size)
        return sizes

    def launch(self, kernel, grid, threads, arguments):
        sizes = [argument.nbytes for argument in arguments]
        assert sizes == self.parameter_nbytes(kernel), (kernel, sizes)
        self.launches.append(kernel)
        memories = [
            ctypes.create_string_buffer(argument.tobytes(), argument.nbytes)
            for argument in arguments
        ]
        addresses = (ctypes.c_void_p * len(memories))(*map(ctypes.addressof, memories))
        self._library.emulator_launch(kernel.encode(), grid, threads, addresses)

    def empty(self, nbytes):
        block = Block(nbytes)
        return DeviceMemory(block.pointer, nbytes, self, block)

    def pinned(self, nbytes):
        return np.full(nbytes, 0xCD, np.uint8)

    def copy(self, target, source):
        assert target.size == source.size
        view(target)[...] = view(source)

    def synchronize(self):
        pass

    def stream(self):
        return EmulatedStream()

    @contextmanager
    def using(self, stream) -> Iterator[None]:
        yield

    def current(self, kinds):
        return [EmulatedStream()]

    def lend(self, arrays, stream):
        return []


def view(memory):
    """The bytes of emulated or host memory."""
    if isinstance(memory, np.ndarray):
        return memory
    if memory.size == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * memory.size).from_address(memory.pointer))
