"""The shards of a unit for one collective, where that needs them: read, or brought to the device.

Reads are waited for, and copies to the device made, in the turn of the collective, which is given
:attr:`Lent.ready`: where a read fails this rank sends nothing of what is in its memory, and all
ranks of the collective raise. That is remembered by who waits for it, and not before, so that all
ranks raise in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from zcomm import Communicator
from zcomm.work import Work
from zero.unit import Unit

if TYPE_CHECKING:
    from zero.offload.disk import Loading


@dataclass(frozen=True, eq=False)
class Lent:
    """Shards, one per buffer and where it is; they may be read when ``ready`` has returned."""

    shards: list[Tensor]
    _comm: Communicator
    _loadings: Sequence[Loading]
    _brought: Sequence[tuple[Tensor, Tensor]]
    _async_op: bool

    def ready(self) -> None:
        """Wait until the shards are there; raises OffloadError where one is not."""
        for loading in self._loadings:
            loading.wait(noted=False)
        for shard, kept in self._brought:
            # The stream of the collective, which may be the last to use it.
            shard.record_stream(torch.accelerator.current_stream(shard.device))
            shard.copy_(kept)

    def give_back(self) -> tuple[Work[object], ...]:
        """Let go of the shards, behind the collectives issued until now."""

        def release() -> None:
            for loading in self._loadings:
                loading.release()

        if self._loadings and self._async_op:
            return (cast("Work[object]", self._comm.enqueue(release)),)
        release()
        return ()


def lend(comm: Communicator, unit: Unit, *, async_op: bool) -> Lent:
    """Begin to read the shards of a unit that are on disk, for a collective of ``comm``.

    Those that are offloaded from a device get memory there for it.
    """
    shards: list[Tensor] = []
    loadings: list[Loading] = []
    brought: list[tuple[Tensor, Tensor]] = []
    for buffer in unit.buffers:
        if buffer.stored is not None:
            loadings.append(buffer.stored.begin())
            kept = loadings[-1].tensor
        else:
            assert buffer.shard is not None
            kept = buffer.shard
        if kept.device != buffer.device:
            # Made in inference mode it could not be written by another thread.
            with torch.inference_mode(False):
                brought.append((torch.empty_like(kept, device=buffer.device), kept))
            kept = brought[-1][0]
        shards.append(kept)
    return Lent(shards, comm, loadings, brought, async_op)
