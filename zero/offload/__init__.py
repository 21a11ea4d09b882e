"""Model states outside the device: the host's memory, and files on NVMe (arXiv 2104.07857)."""

from zcomm.errors import OffloadError
from zero.offload.swap import Extent, Pending, Swap, SwapStats

__all__ = ["Extent", "OffloadError", "Pending", "Swap", "SwapStats"]
