"""The shards of a unit for one collective: where they are on disk, they are read for it.

With ``async_op`` the reads, the collective and what gives the memory back run in the order in which
they were issued, behind the caller; without, the reads have ended when :func:`lend` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor

from zcomm import Communicator
from zcomm.work import Work
from zero.unit import Unit

if TYPE_CHECKING:
    from zero.offload.disk import Loading


@dataclass(frozen=True, eq=False)
class Lent:
    """Shards, one per buffer; they may be read by a collective issued after ``works``."""

    shards: list[Tensor]
    works: tuple[Work[object], ...]
    _comm: Communicator
    _loadings: Sequence[Loading]
    _async_op: bool

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
    """Read the shards of a unit that are on disk, for a collective of ``comm``."""
    shards: list[Tensor] = []
    loadings: list[Loading] = []
    for buffer in unit.buffers:
        if buffer.stored is not None:
            loadings.append(buffer.stored.begin())
            shards.append(loadings[-1].tensor)
        else:
            assert buffer.shard is not None
            shards.append(buffer.shard)

    def wait() -> None:
        for loading in loadings:
            loading.wait()

    if loadings and async_op:
        return Lent(shards, (cast("Work[object]", comm.enqueue(wait)),), comm, loadings, async_op)
    wait()
    return Lent(shards, (), comm, loadings, async_op)
