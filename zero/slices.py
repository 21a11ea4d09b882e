"""``accumulate="node"``: the sums of a node that wait for the step, and who used a parameter.

A *slice* is what one rank holds of a node's sum of one buffer, see :mod:`zero.hops`. A reader must
not assume that a parameter with a slice has a gradient: slices hold zero for what nobody used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero.places import HOST
from zero.unit import Buffer, Unit, split


class Slices:
    """Float32 sums by buffer, and which parameters any rank used since the last step."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._sums: dict[Buffer, Tensor] = {}
        self._used: dict[Buffer, list[bool]] = {}

    @property
    def held(self) -> list[Tensor]:
        """The sums."""
        return list(self._sums.values())

    def add(self, buffer: Buffer, part: Tensor) -> None:
        """Add what one backward brought; ``part`` is kept where it is the first."""
        if buffer in self._sums:
            self._sums[buffer].add_(part)
        else:
            self._sums[buffer] = part

    def note_used(self, used: Mapping[Buffer, Sequence[bool]]) -> None:
        """Note which parameters any rank used in a backward."""
        for buffer in self._sums:
            before = self._used.get(buffer, [False] * len(buffer.parameters))
            self._used[buffer] = [a or b for a, b in zip(before, used[buffer], strict=True)]

    def take(self, unit: Unit) -> list[Tensor]:
        """Return the sums of a unit's buffers and forget them; none where no backward ended."""
        if not all(buffer in self._used for buffer in unit.trainable):
            return []
        return [self._sums.pop(buffer) for buffer in unit.trainable]

    def deliver(self, buffer: Buffer, mean: Tensor) -> None:
        """Add the mean of a taken sum to the gradients of the masters that were used."""
        used = self._used.pop(buffer)
        if buffer.offloaded:
            mean = mean.to(HOST)
        masters = buffer.own_masters()
        for master, part in zip(masters, split(mean, [m.run for m in masters]), strict=True):
            if used[master.run.slot]:
                grad = master.tensor.grad
                master.tensor.grad = part if grad is None else grad.to(torch.float32).add_(part)

    def clear(self) -> None:
        """Forget everything."""
        self._sums.clear()
        self._used.clear()

    def save_state(self) -> dict[str, Any]:
        """Return sums by the number of their buffer, and what was used."""
        sums = {f"slice.{i}": self._sums[b] for i, b in enumerate(self._buffers) if b in self._sums}
        return {"slices": [self._used.get(buffer) for buffer in self._buffers], **sums}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`save_state` returned."""
        self.clear()
        for index, (buffer, used) in enumerate(zip(self._buffers, state["slices"], strict=True)):
            if used is not None:
                self._sums[buffer] = state[f"slice.{index}"].to(buffer.device, copy=True)
                self._used[buffer] = list(used)
