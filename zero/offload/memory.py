"""Host memory for transfers: page-aligned, touched once, pinned where there is a GPU.

*Capacity* is the size of a buffer's memory: what was asked for, rounded up to ``ALIGNMENT``. A
buffer is *lent* from ``take`` to ``give``; a reader must not assume that its bytes are zero.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 4096  # what direct I/O needs of addresses, offsets and lengths on any usual disk
_HUGE_NBYTES = 1 << 21

Memory = NDArray[np.uint8]


def rounded(nbytes: int) -> int:
    """Return the next multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def memory_of(tensor: Tensor) -> Memory:
    """Return the bytes of a tensor as a 1-D array that shares its memory.

    Raises:
        ValueError: the tensor is not contiguous, or not in the host's memory.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device}: the disk takes those of the host's memory")
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()}: the disk takes contiguous ones")
    array: Memory = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array


def mapped(capacity: int) -> Memory:
    """Return new page-aligned memory whose pages exist, of ``capacity`` > 0 bytes, not pinned."""
    pages = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if capacity >= _HUGE_NBYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages works too
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory: Memory = np.frombuffer(pages, np.uint8)
    memory.fill(0)
    return memory


def allocated(capacity: int) -> Tensor:
    """Return new page-aligned memory whose pages exist, pinned where there is a GPU."""
    # Made in inference mode it could not be used outside.
    with torch.inference_mode(False):
        return (
            _pinned(capacity) if torch.cuda.is_available() else torch.from_numpy(mapped(capacity))
        )


def _pinned(capacity: int) -> Tensor:
    tensor = torch.empty(capacity, dtype=torch.uint8, device="cpu", pin_memory=True)
    skipped = -tensor.data_ptr() % ALIGNMENT
    if skipped:  # CUDA gives whole pages; nothing promises it
        tensor = torch.empty(capacity + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=True)
        skipped = -tensor.data_ptr() % ALIGNMENT
    return tensor[skipped : skipped + capacity].zero_()


class BufferPool:
    """Buffers by capacity, for any thread.

    Lent and free memory together are never more than was lent at one time.

    Attributes:
        lent_nbytes: capacities of the buffers that are lent now.
        free_nbytes: bytes that wait to be used again.
        peak_nbytes: the most bytes that were lent at one time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: deque[Tensor] = deque()
        self._lent: dict[int, Tensor] = {}
        self.lent_nbytes = 0
        self.free_nbytes = 0
        self.peak_nbytes = 0

    def take(self, nbytes: int) -> Tensor:
        """Lend a 1-D uint8 tensor of ``nbytes`` elements that starts at a page."""
        capacity = max(rounded(nbytes), ALIGNMENT)
        with self._lock:
            whole = self._found(capacity)
        if whole is None:
            whole = allocated(capacity)
        with self._lock:
            self._lent[_key(whole)] = whole
            self.lent_nbytes += capacity
            self.peak_nbytes = max(self.peak_nbytes, self.lent_nbytes)
            self._trim()
        return whole[:nbytes]

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer that was lent; the caller uses it no more.

        Raises:
            ValueError: it is not lent by this pool.
        """
        with self._lock:
            whole = self._lent.pop(_key(buffer), None)
            if whole is None:
                raise ValueError(
                    f"a tensor of {buffer.nbytes} bytes that is none of the"
                    f" {len(self._lent)} buffers that are lent"
                )
            self.lent_nbytes -= whole.nbytes
            self._free.append(whole)
            self.free_nbytes += whole.nbytes
            self._trim()

    def clear(self) -> None:
        """Let go of the free memory; buffers that are lent stay valid."""
        with self._lock:
            self._free.clear()
            self.free_nbytes = 0

    def _found(self, capacity: int) -> Tensor | None:
        for index, tensor in enumerate(self._free):
            if tensor.nbytes == capacity:
                del self._free[index]
                self.free_nbytes -= capacity
                return tensor
        return None

    def _trim(self) -> None:
        while self._free and self.lent_nbytes + self.free_nbytes > self.peak_nbytes:
            self.free_nbytes -= self._free.popleft().nbytes


def _key(tensor: Tensor) -> int:
    # Of the storage: a tensor without elements has no address of its own.
    return tensor.untyped_storage().data_ptr()
