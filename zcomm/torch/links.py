"""What connects the ranks of one process group: a communicator, and a way for single messages.

Under an MPI launcher the default group is MPI's world in torch's order of ranks. Every other group
has an MPI communicator of its own, made by its members alone, so that groups communicate beside one
another as those of other backends do. What MPI holds for a group is freed with the default group,
by all ranks at once: a program may drop groups on some ranks only.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from zcomm import bootstrap, exits, launcher
from zcomm.communicator import Communicator
from zcomm.torch import launch
from zcomm.torch.messages import Messages, MpiMessages

if TYPE_CHECKING:
    from mpi4py import MPI

_LARGEST_TAG = 2**15
"""Tags that every MPI has."""


class Link(Protocol):
    """The ranks of one group."""

    @property
    def communicator(self) -> Communicator:
        """The communicator."""

    @property
    def messages(self) -> Messages:
        """Single messages between two ranks."""

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
    if not launch.by_mpi():
        raise NotImplementedError
    if not opts.global_ranks_in_group:
        return _World.open(opts.group_rank, opts.group_size, min_numel)
    return _World.current().group(opts.global_ranks_in_group, str(opts.group_id), min_numel)


class _World:
    """The default group under MPI, and the others that were made since."""

    _now: _World | None = None

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._groups: list[_Group] = []
        self.communicator: Communicator | None = None

    @classmethod
    def open(cls, rank: int, size: int, min_numel: int) -> Link:
        """Return the link of the default group."""
        world = _all(rank, size)
        cls._now = world
        world.communicator = bootstrap.init(comm=world.comm, min_numel=min_numel)
        return _Default(world)

    @classmethod
    def current(cls) -> _World:
        """Return the world that groups belong to.

        Where torch's default group is another backend's, that is MPI's, which then has to number
        the ranks as torch does.
        """
        if cls._now is None:
            world = launcher.world()
            here, there = world.Get_rank(), dist.get_rank()
            if here != there:
                raise ValueError(
                    f"torch.distributed says rank {there}, MPI rank {here}: groups of backend "
                    "zcomm need the same numbers, or a default group of backend zcomm"
                )
            cls._now = cls(world)
        return cls._now

    def group(self, ranks: Sequence[int], name: str, min_numel: int) -> Link:
        """Return the link of some ranks, which call it together."""
        group = self.comm.Get_group()
        members = group.Incl(list(ranks))
        comm = self.comm.Create_group(members, zlib.crc32(name.encode()) % _LARGEST_TAG)
        members.Free()
        group.Free()
        made = _Group(self, comm, ranks, name, min_numel)
        self._groups.append(made)
        return made

    def close(self) -> None:
        """Free all groups, then the world; all ranks call it."""
        assert self.communicator is not None
        self.communicator.leave()
        for group in self._groups:
            group.free()
        self.communicator.discard()
        self.comm.Free()
        type(self)._now = None


def _all(rank: int, size: int) -> _World:
    world = launcher.world()
    if world.Get_size() != size:
        raise ValueError(
            f"init_process_group of {size} ranks: MPI's launcher started {world.Get_size()}; the "
            "default group of backend zcomm holds all of them"
        )
    exits.install(world)
    ordered: Any = world.Split(0, rank)
    return _World(ordered)


class _Default:
    """The link of the default group."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self.messages: Messages = MpiMessages(world.comm)

    @property
    def communicator(self) -> Communicator:
        """See :class:`Link`."""
        assert self._world.communicator is not None
        return self._world.communicator

    def close(self) -> None:
        """See :class:`Link`."""
        self.messages.close()
        self._world.close()


class _Group:
    """The link of some ranks."""

    def __init__(
        self, world: _World, comm: MPI.Intracomm, ranks: Sequence[int], name: str, min_numel: int
    ) -> None:
        self._comm = comm
        self.messages: Messages = MpiMessages(comm)
        # Now, not at the first collective: MPI makes communicators one at a time.
        if world.communicator is None:
            self.communicator = bootstrap.init(comm=comm, min_numel=min_numel, abort=False)
        else:
            self.communicator = bootstrap.subgroup(world.communicator, comm, ranks, name, min_numel)

    def close(self) -> None:
        """See :class:`Link`."""
        self.messages.close()

    def free(self) -> None:
        """Free what MPI holds for the group; all its ranks call it."""
        self.communicator.discard()
        self._comm.Free()
