"""Subnormal numbers where a thread flushes them to zero: the mode is set aside.

A *subnormal* number is smaller than the smallest that has all its bits, 2^-126 in float32. The mode
belongs to a thread: do not assume that it is set aside for threads that torch computes with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_SMALLEST = np.array([1], np.uint32).view(np.float32)


@contextmanager
def exact_subnormals() -> Iterator[None]:
    """Have this thread compute with subnormal numbers, where it is set to flush them to zero."""
    if (_SMALLEST * np.float32(1)).view(np.uint32)[0]:
        yield
        return
    import torch  # NumPy cannot change the mode, which torch.set_flush_denormal usually has set

    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)
