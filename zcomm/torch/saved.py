"""What a group's codecs have saved: counted per operation, said once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zcomm.communicator import Communicator
from zcomm.hops import CodecSpec
from zcomm.plan import Plan
from zcomm.torch.tensors import name_of

logger = logging.getLogger("zcomm")


@dataclass(frozen=True)
class Saving:
    """Quantised calls of one operation, and the bytes that this rank sent in them.

    ``exact_nbytes`` is what the same calls would have sent without a codec.
    """

    calls: int = 0
    exact_nbytes: int = 0
    wire_nbytes: int = 0


class Savings:
    """The savings of one group."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._of: dict[str, Saving] = {}
        self._sizes: dict[tuple[Any, ...], tuple[int, int]] = {}

    def count(
        self, comm: Communicator, operation: str, tensors: Sequence[torch.Tensor], codec: CodecSpec
    ) -> None:
        """Count one call; ``tensors`` are those that hold all ranks' elements."""
        numel = sum(x.numel() for x in tensors)
        if codec is None or comm.size == 1 or numel < comm.min_numel:
            return
        exact = wire = 0
        for x in tensors:
            sizes = self._nbytes(comm, operation, x.numel(), name_of(x), codec)
            exact, wire = exact + sizes[0], wire + sizes[1]
        before = self._of.get(operation)
        if before is None:
            before = Saving()
            self._say(comm, operation, numel, codec, exact, wire)
        self._of[operation] = Saving(
            before.calls + 1, before.exact_nbytes + exact, before.wire_nbytes + wire
        )

    def _say(
        self, comm: Communicator, operation: str, numel: int, codec: CodecSpec, *sent: int
    ) -> None:
        if comm.rank == 0:
            logger.info(
                "group %s: %s of %d elements is quantised (%s): %d bytes are sent as %d",
                *(self._name, operation, numel, codec, *sent),
            )

    def _nbytes(
        self, comm: Communicator, operation: str, numel: int, dtype: str, codec: CodecSpec
    ) -> tuple[int, int]:
        """Return what this rank sends in one call, without and with a codec."""
        key = operation, numel, dtype, codec
        if key not in self._sizes:
            narrow = "float32" if dtype == "float64" else dtype
            exact = comm.plans(operation, numel, dtype)
            wire = comm.plans(operation, numel, narrow, codec=codec)
            self._sizes[key] = _sent(exact, comm.rank), _sent(wire, comm.rank)
        return self._sizes[key]

    def report(self) -> dict[str, Saving]:
        """Return what was counted, by operation."""
        return dict(self._of)


def _sent(plans: Sequence[Plan], rank: int) -> int:
    return sum(sum(plan.wire_nbytes(rank).values()) for plan in plans)


def savings(group: dist.ProcessGroup | None = None) -> dict[str, Saving]:
    """Return what a group's codecs have saved since it was made, by operation.

    Empty where nothing was quantised.

    Raises:
        TypeError: the group is another backend's.
    """
    from zcomm.torch.backend import ZcommGroup

    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, ZcommGroup):
        raise TypeError(f"{type(chosen).__qualname__} is no group of backend zcomm")
    return chosen.savings.report()
