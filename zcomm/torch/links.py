"""What connects the ranks of one process group: a communicator, and a way for single messages.

Every group has a transport of its own, made by its members alone, so that groups communicate beside
one another as those of other backends do. Under an MPI launcher that is MPI
(:mod:`zcomm.torch.mpi`), otherwise gloo, over the store that torch made.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any, Protocol

from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from zcomm import bootstrap, placement
from zcomm.communicator import Communicator
from zcomm.torch import launch
from zcomm.torch.gloo_messages import GlooMessages
from zcomm.torch.messages import Messages
from zcomm.transports.base import Transport
from zcomm.transports.process_group import ProcessGroupTransport
from zcomm.transports.shared import open_windows
from zcomm.transports.staged import StagedTransport
from zcomm.work import Stream
from zcomm.worlds import HostsWorld

OVER_GLOO = "no MPI launcher: backend zcomm communicates over gloo"
_SAID: set[str] = set()
_MADE: Counter[str] = Counter()
"""How often this process has made a group of a name."""


class Link(Protocol):
    """The ranks of one group."""

    communicator: Communicator
    messages: Messages

    def close(self) -> None:
        """Let go of the group; of the default group, all ranks together."""


def connect(opts: Any, min_numel: int) -> Link:
    """Return the link of a group that torch makes; its members call it.

    Args:
        opts: torch's ``_DistributedBackendOptions``.
        min_numel: of the group's communicator.

    Raises:
        ValueError: a default group of other ranks than MPI has.
        ZcommError: MPI cannot be loaded, or sees other ranks than the launcher started.
    """
    if launch.by_mpi():
        from zcomm.torch import mpi

        return mpi.connect(opts, min_numel)
    return GlooLink(opts, min_numel)


class GlooWorld(HostsWorld):
    """The ranks of a gloo group of our own, see :class:`zcomm.worlds.World`.

    With ``windows`` those of one host share memory, which stays reserved for the group.
    """

    def __init__(self, group: ProcessGroupGloo, *, windows: bool) -> None:
        self._group = group
        self._windows = windows
        self.words = "" if OVER_GLOO in _SAID or group.size() == 1 else OVER_GLOO
        _SAID.add(self.words)
        self.rank: int = group.rank()
        self.size: int = group.size()

    @cached_property
    def control(self) -> Transport:
        """See :class:`zcomm.worlds.World`."""
        messages = ProcessGroupTransport(self._group)
        moves = StagedTransport(messages)
        if self._windows:
            messages.windows = open_windows(moves, placement.hosts(moves).tolist())
        return moves


class GlooLink:
    """A group over gloo."""

    def __init__(self, opts: Any, min_numel: int) -> None:
        # A group that is made again finds the addresses of its predecessor in torch's store.
        _MADE[opts.group_id] += 1
        store = PrefixStore(f"zcomm/{_MADE[opts.group_id]}", opts.store)
        where = store, opts.group_rank, opts.group_size
        group = ProcessGroupGloo(*where, timeout=opts.timeout)
        self._is_default = not opts.global_ranks_in_group
        self.messages: Messages = GlooMessages(group)
        name = "world" if self._is_default else str(opts.group_id)
        how: Any = {"min_numel": min_numel, "abort": False, "name": name, "stream": Stream()}
        # Only of the default group: there may be many others, and /dev/shm is small in containers.
        world = GlooWorld(group, windows=self._is_default)
        self.communicator = bootstrap.start(world, **how)

    def close(self) -> None:
        """See :class:`Link`."""
        if self._is_default:
            self.communicator.leave()
        self.messages.close()
        self.communicator.discard()
