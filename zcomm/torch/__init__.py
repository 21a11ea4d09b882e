"""zcomm for PyTorch programs: plug-ins for FSDP2 and DDP."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.torch.ddp import QuantizedAllReduce, all_reduce_hook
    from zcomm.torch.fsdp import quantize_fsdp

_HOME = {
    "QuantizedAllReduce": "zcomm.torch.ddp",
    "all_reduce_hook": "zcomm.torch.ddp",
    "quantize_fsdp": "zcomm.torch.fsdp",
}

__all__ = ["QuantizedAllReduce", "all_reduce_hook", "quantize_fsdp"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'zcomm.torch' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
