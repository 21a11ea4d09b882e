"""The communicators that plug-ins use beside torch's process groups.

There is one for the ranks of the default group, made once, with messages of its own: over MPI where
the default group is backend "zcomm" under mpirun, else over a gloo group. Those of other groups are
the same transport seen through a list of ranks, and need no communication to be made.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import zcomm
from topology import Topology
from zcomm.communicator import Communicator

TopologySpec = str | Path | Topology


class World:
    """The communicators of the default group's ranks on one topology."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._groups = {tuple(range(comm.size)): comm}

    def group(self, group: dist.ProcessGroup | None) -> Communicator:
        """Return the communicator of a process group's ranks."""
        return self.among(dist.get_process_group_ranks(group))

    def among(self, ranks: Sequence[int]) -> Communicator:
        """Return the communicator of some ranks of the default group."""
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = self.comm.among(key)
        return self._groups[key]


_WORLDS: dict[TopologySpec, World] = {}
_DEFAULT: list[dist.ProcessGroup] = []
"""The default group that these worlds belong to."""


def world(topology: TopologySpec = "auto") -> World:
    """Return the world of a topology; all ranks of the default group call it, in one order.

    Raises:
        ValueError: torch.distributed was not initialised.
        TopologyError: a topology that does not describe the ranks of the default group.
    """
    if not dist.is_initialized():
        raise ValueError("torch.distributed has no default group: init_process_group comes first")
    default: Any = dist.group.WORLD
    if [default] != _DEFAULT:
        _DEFAULT[:] = [default]
        _WORLDS.clear()
    if topology not in _WORLDS:
        made = zcomm.init(topology, comm=_comm(default), abort=False)
        logging.getLogger("zcomm").debug("plug-ins use %s", made.topology.describe())
        _WORLDS[topology] = World(made)
    return _WORLDS[topology]


def _comm(default: Any) -> Any:
    """Return what carries the messages: MPI where it numbers the ranks of the default group."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if dist.get_backend() != "zcomm" or mpi is None or mpi.COMM_WORLD.size != default.size():
        return default
    return mpi.COMM_WORLD.Split(0, default.rank())
