# mypy: disable-error-code="override,assignment,call-arg"
"""What torch asks a process group about itself: names, devices, store, time limit."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zcomm.torch.register import NAME


class Identity(dist.ProcessGroup):
    """A process group that torch can name; the same methods under C++'s names and Python's."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, opts: Any) -> None:
        # The shell that lets C++ call methods of this class is made by (rank, size) only.
        super().__init__(opts.group_rank, opts.group_size)
        self._name = str(opts.group_id)
        self._description = ""
        self._store = opts.store
        self._timeout: timedelta = opts.timeout

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    def name(self) -> str:
        """Return the name of the backend."""
        return NAME

    def getGroupName(self) -> str:
        """Return the name that torch gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Take the name that torch gives the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the description that torch gave the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Take the description that torch gives the group."""
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _get_backend(self, device: torch.device) -> Identity:
        """Return what serves a device: the group itself."""
        return self

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time after which an operation gives up waiting for the others."""
        self._timeout = timeout

    _set_default_timeout = set_timeout
