"""Zcomm: topology-aware, hierarchical, quantised collectives for training over slow networks.

``import zcomm`` is light: torch, cupy and mpi4py are imported where they are first needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.bootstrap import init, run_local
    from zcomm.codecs import Codec
    from zcomm.communicator import Communicator
    from zcomm.errors import (
        CheckpointError,
        CodecError,
        CollectiveMismatch,
        CollectiveTimeout,
        OffloadError,
        PeerLost,
        TopologyError,
        ZcommError,
    )
    from zcomm.work import Work

__version__ = "0.1.0"

_HOME = {
    "init": "zcomm.bootstrap",
    "run_local": "zcomm.bootstrap",
    "Codec": "zcomm.codecs",
    "Communicator": "zcomm.communicator",
    "Work": "zcomm.work",
    "ZcommError": "zcomm.errors",
    "TopologyError": "zcomm.errors",
    "CollectiveMismatch": "zcomm.errors",
    "CollectiveTimeout": "zcomm.errors",
    "PeerLost": "zcomm.errors",
    "CodecError": "zcomm.errors",
    "CheckpointError": "zcomm.errors",
    "OffloadError": "zcomm.errors",
}

__all__ = [
    "CheckpointError",
    "Codec",
    "CodecError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "OffloadError",
    "PeerLost",
    "TopologyError",
    "Work",
    "ZcommError",
    "__version__",
    "init",
    "run_local",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'zcomm' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
