"""Groups under an MPI launcher.

The default group is MPI's world in torch's order of ranks; every other group is an MPI communicator
that its members make. What MPI holds for a group is freed with the default group, by all ranks at
once: a program may drop groups on some ranks only.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zcomm import bootstrap, exits, launcher
from zcomm.communicator import Communicator
from zcomm.torch.messages import Messages
from zcomm.torch.mpi_messages import MpiMessages
from zcomm.work import Stream
from zcomm.worlds import MpiWorld

if TYPE_CHECKING:
    from mpi4py import MPI

_LARGEST_TAG = 2**15
"""Tags that every MPI has."""


def connect(opts: Any, min_numel: int) -> DefaultLink | GroupLink:
    """Return the link of a group, see :func:`zcomm.torch.links.connect`."""
    if opts.global_ranks_in_group:
        job = _Job.current()
        return job.group(opts.global_ranks_in_group, str(opts.group_id), min_numel)
    return DefaultLink(_Job.open(opts.group_rank, opts.group_size), min_numel)


class _Job:
    """All ranks in torch's order, and the groups that were made of them."""

    _now: _Job | None = None

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.communicator: Communicator | None = None
        self._groups: list[GroupLink] = []

    @classmethod
    def open(cls, rank: int, size: int) -> _Job:
        """Return the job of a new default group."""
        world = launcher.world()
        if world.Get_size() != size:
            raise ValueError(
                f"init_process_group of {size} ranks: MPI's launcher started {world.Get_size()}; "
                "the default group of backend zcomm holds all of them"
            )
        exits.install(MpiWorld(world))
        ordered: Any = world.Split(0, rank)
        cls._now = cls(ordered)
        return cls._now

    @classmethod
    def current(cls) -> _Job:
        """Return the job that groups belong to.

        Where torch's default group is another backend's, that is MPI's world, which then has to
        number the ranks as torch does.
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

    def group(self, ranks: Sequence[int], name: str, min_numel: int) -> GroupLink:
        """Return the link of some ranks, which call it together."""
        everybody = self.comm.Get_group()
        members = everybody.Incl(list(ranks))
        comm = self.comm.Create_group(members, zlib.crc32(name.encode()) % _LARGEST_TAG)
        members.Free()
        everybody.Free()
        made = GroupLink(comm, self.communicator, ranks, name, min_numel)
        self._groups.append(made)
        return made

    def close(self) -> None:
        """Free all groups, then the world; all ranks call it."""
        for group in self._groups:
            group.free()
        self.comm.Free()
        type(self)._now = None


class DefaultLink:
    """The link of the default group."""

    def __init__(self, job: _Job, min_numel: int) -> None:
        self._job = job
        self.messages: Messages = MpiMessages(job.comm)
        world = MpiWorld(job.comm)
        self.communicator = bootstrap.start(world, min_numel=min_numel, stream=Stream())
        job.communicator = self.communicator

    def close(self) -> None:
        """See :class:`zcomm.torch.links.Link`."""
        self.communicator.leave()
        self.messages.close()
        self.communicator.discard()
        self._job.close()


class GroupLink:
    """The link of some ranks."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        parent: Communicator | None,
        ranks: Sequence[int],
        name: str,
        min_numel: int,
    ) -> None:
        self._comm = comm
        self.messages: Messages = MpiMessages(comm)
        # Now, not at the first collective: MPI makes communicators one at a time.
        world = MpiWorld(comm)
        if parent is None:
            self.communicator = bootstrap.start(
                world, min_numel=min_numel, abort=False, name=name, stream=Stream()
            )
        else:
            self.communicator = bootstrap.subgroup(parent, world, ranks, name, min_numel)

    def close(self) -> None:
        """See :class:`zcomm.torch.links.Link`."""
        self.messages.close()

    def free(self) -> None:
        """Free what MPI holds for the group; all its ranks call it."""
        self.communicator.discard()
        self._comm.Free()
