"""Memory that is used again: whole units of stage 3, and gradients on their way to be reduced.

A tensor is *lent* from ``take`` to ``give``. Lent and free memory together are never more than was
lent at one time, so the pool adds nothing to the peak. A reader must not assume that what is given
back is used again: memory that somebody else still looks into is left to them.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class Pool:
    """Tensors by number of elements, dtype and device.

    Attributes:
        lent: tensors that are lent now.
        lent_nbytes: their bytes.
        free_nbytes: bytes that wait to be used again.
        peak_nbytes: the most bytes that were lent at one time.
    """

    def __init__(self) -> None:
        self._free: deque[Tensor] = deque()
        self.lent = 0
        self.lent_nbytes = 0
        self.free_nbytes = 0
        self.peak_nbytes = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lend a 1-D tensor, not initialised."""
        tensor = self._found(numel, dtype, device)
        if tensor is None:
            # Made in inference mode it could not be used outside.
            with torch.inference_mode(False):
                tensor = torch.empty(numel, dtype=dtype, device=device)
        self.lent += 1
        self.lent_nbytes += tensor.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.lent_nbytes)
        self._trim()
        return tensor

    def give(self, tensor: Tensor) -> None:
        """Take back a tensor that was lent; the caller uses it no more."""
        self.lent -= 1
        self.lent_nbytes -= tensor.nbytes
        if _is_alone(tensor):
            self._free.append(tensor)
            self.free_nbytes += tensor.nbytes
            self._trim()

    def _found(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        for index, tensor in enumerate(self._free):
            alike = tensor.dtype == dtype and tensor.device == device
            if alike and tensor.numel() == numel:
                del self._free[index]
                self.free_nbytes -= tensor.nbytes
                return tensor
        return None

    def _trim(self) -> None:
        while self._free and self.lent_nbytes + self.free_nbytes > self.peak_nbytes:
            self.free_nbytes -= self._free.popleft().nbytes


def _is_alone(tensor: Tensor) -> bool:
    """Tell whether no other tensor looks into the memory: an output that is a view of a weight."""
    storage = tensor.untyped_storage()
    # One reference is the tensor's, one that of ``storage``.
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)
