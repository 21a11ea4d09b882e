"""The worlds that a communicator can be made of: the ranks of MPI, or of a process group.

A *world* knows its ranks before anything is measured or agreed: how many there are, which one this
is, a transport of host memory among them, who is near whom, and how to end them all.
"""

from __future__ import annotations

import os
import socket
import sys
from abc import ABC, abstractmethod
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import topology as topologies
from topology import Topology
from topology.discover import from_hosts, survey, survey_hosts
from topology.system import System
from zcomm import environment, launcher, placement
from zcomm.transports.base import Transport
from zcomm.transports.process_group import ProcessGroupTransport, host_group
from zcomm.transports.shared import open_windows
from zcomm.transports.staged import StagedTransport

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup


class World(Protocol):
    """All ranks of a job."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def control(self) -> Transport:
        """What carries host memory among the ranks; all of them ask for it."""

    @property
    def words(self) -> str:
        """What is to be said of the choice of this world, once; empty where nothing is."""

    def discover(self) -> Topology:
        """Find out who is near whom; all ranks call it."""

    def abort(self, code: int) -> None:
        """End all ranks, this one at once."""


class MpiWorld:
    """The ranks of an mpi4py communicator."""

    words = ""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    @cached_property
    def control(self) -> Transport:
        """See :class:`World`."""
        from zcomm.transports.mpi import MpiTransport

        moves = MpiTransport(self._comm)
        return moves if environment.flag("ZCOMM_CUDA_AWARE_MPI") else StagedTransport(moves)

    def discover(self) -> Topology:
        """See :class:`World`."""
        return topologies.discover(self._comm)

    def survey(self) -> System:
        """Find out all about the hosts; all ranks call it."""
        return survey(self._comm)

    def abort(self, code: int) -> None:
        """See :class:`World`."""
        self._comm.Abort(code)


class HostsWorld(ABC):
    """Ranks without MPI, that find their hosts by messages."""

    rank: int
    size: int

    @cached_property
    @abstractmethod
    def control(self) -> Transport:
        """See :class:`World`."""

    def discover(self) -> Topology:
        """Take ranks of one host for a node, and look for NVLink as under MPI."""
        return from_hosts(*self._places(), partial(placement.gather_text, self.control))

    def survey(self) -> System:
        """Find out all about the hosts; all ranks call it."""
        return survey_hosts(*self._places(), partial(placement.gather_text, self.control))

    def _places(self) -> tuple[list[int], list[str], int]:
        nodes = placement.hosts(self.control).tolist()
        return nodes, placement.gather_text(self.control, socket.gethostname()), self.rank

    def abort(self, code: int) -> None:
        """End this rank; the others find their connections closed, and their launcher ends them."""
        os._exit(code)


class GroupWorld(HostsWorld):
    """The ranks of a torch.distributed process group of any backend, None the default group."""

    def __init__(self, group: ProcessGroup | None, words: str = "") -> None:
        import torch.distributed as dist

        self._group = group
        self.words = words
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    @cached_property
    def control(self) -> Transport:
        """See :class:`World`."""
        own = host_group(self._group)
        messages = ProcessGroupTransport(own, release=lambda: _destroy(own))
        moves = StagedTransport(messages)
        messages.windows = open_windows(moves, placement.hosts(moves).tolist())
        return moves


def find(comm: Any, transport: str) -> MpiWorld | GroupWorld:
    """Return the ranks to communicate with.

    Args:
        comm: an mpi4py communicator or a torch.distributed process group; None: those that the
            launcher started.
        transport: "process_group" wants a process group: the default one, which is made (gloo) of
            the variables that torchrun sets where there is none.

    Raises:
        ZcommError: a launcher that started more ranks than can be reached.
        ValueError: a transport that ``comm`` does not go with.
    """
    if _is_group(comm):
        if transport == "mpi":
            raise ValueError("transport 'mpi' with a process group; possible: process_group, nccl")
        return GroupWorld(comm)
    if comm is not None:
        if transport == "process_group":
            raise ValueError("transport 'process_group': comm is not a torch.distributed group")
        return MpiWorld(comm)
    if transport == "process_group":
        return _default_group()
    if launcher.by_torchrun() and transport != "mpi":
        return _default_group("started by torchrun, without MPI: ranks communicate over gloo")
    return MpiWorld(launcher.world())


def _default_group(words: str = "") -> GroupWorld:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return GroupWorld(None, words)


def _is_group(comm: Any) -> bool:
    """Tell whether something is a process group, without importing torch for it."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    return isinstance(comm, distributed.ProcessGroup)


def _destroy(group: ProcessGroup) -> None:
    import torch.distributed as dist

    # Whoever destroyed the default group destroyed all others with it.
    if dist.is_initialized():
        dist.destroy_process_group(group)
