"""zcomm for PyTorch programs: the torch.distributed backend "zcomm", plug-ins for FSDP2 and DDP.

Importing it registers the backend; nothing is started, and MPI is not loaded, before
``torch.distributed.init_process_group("zcomm")``. Under mpirun no MASTER_ADDR is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import zcomm.leaving  # noqa: F401  # processes end after gloo's threads rest, whatever the backend
from zcomm.torch.register import register

if TYPE_CHECKING:
    from zcomm.torch.ddp import QuantizedAllReduce, all_reduce_hook
    from zcomm.torch.fsdp import quantize_fsdp
    from zcomm.torch.options import Options
    from zcomm.torch.saved import Saving, savings

_HOME = {
    "Options": "zcomm.torch.options",
    "QuantizedAllReduce": "zcomm.torch.ddp",
    "Saving": "zcomm.torch.saved",
    "all_reduce_hook": "zcomm.torch.ddp",
    "quantize_fsdp": "zcomm.torch.fsdp",
    "savings": "zcomm.torch.saved",
}

__all__ = [
    "Options",
    "QuantizedAllReduce",
    "Saving",
    "all_reduce_hook",
    "quantize_fsdp",
    "savings",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'zcomm.torch' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


register()
