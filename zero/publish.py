"""From masters back to parameters: after a step, and after edits of masters.

In stages 1 and 2 owners send their parameters, through the weights codec where there is one; the
owner uses the decoded values too. In stage 3 the next gather does that; with a persistent secondary
it also gives the shards their values.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from zcomm import Communicator
from zcomm.layout import Layout
from zero.config import Config
from zero.edits import note_versions
from zero.unit import Unit, pack


class Publisher:
    """Makes the masters' values the parameters'."""

    def __init__(self, comm: Communicator, config: Config) -> None:
        self._comm = comm
        self._stage = config.stage
        self._codec = config.weights_codec
        self._seed = config.seed
        self._persistent = config.secondary == "persistent"

    def is_exact(self, unit: Unit) -> bool:
        """Tell whether parameters are the masters rounded, or also went through a codec."""
        return self._codec is None or not unit.quantise or self._comm.size == 1

    def publish(self, unit: Unit) -> None:
        """Give a unit's parameters the values of the masters; in stages 1 and 2 a collective."""
        if not unit.trainable:
            return
        unit.version += 1
        if self._stage in (1, 2):
            self._send(unit)
        else:
            for buffer in unit.trainable:
                if buffer.separate and not (self._persistent and not self.is_exact(unit)):
                    for master in buffer.masters:
                        master.held.copy_(master.tensor)
        if self._stage < 3:
            for buffer in unit.trainable:
                increment_version(
                    [
                        p
                        for p, s in zip(buffer.parameters, buffer.layout.slots, strict=True)
                        if s.trainable
                    ]
                )
                note_versions(buffer)

    def publish_first(self, unit: Unit) -> None:
        """In stages 1 and 2 with a codec: give all parameters, frozen ones too, decoded values."""
        if self._stage not in (1, 2) or self.is_exact(unit) or not unit.buffers:
            return
        shards, fulls, layouts = [], [], []
        for buffer in unit.buffers:
            assert buffer.full is not None
            runs = [buffer.run_view(buffer.full, run) for run in buffer.runs]
            shards.append(pack(runs, buffer.layout.dtype))
            fulls.append(buffer.full)
            layouts.append(buffer.layout.all)
        self._gather(unit, shards, fulls, layouts)

    def _send(self, unit: Unit) -> None:
        shards, fulls, layouts = [], [], []
        for buffer in unit.trainable:
            assert buffer.full is not None
            masters = [master.tensor for master in buffer.masters]
            shards.append(pack(masters, buffer.layout.dtype))
            fulls.append(buffer.full)
            layouts.append(buffer.layout.trainable)
        self._gather(unit, shards, fulls, layouts)

    def _gather(
        self,
        unit: Unit,
        shards: Sequence[Tensor],
        fulls: Sequence[Tensor],
        layouts: Sequence[Layout],
    ) -> None:
        codec = None if self.is_exact(unit) else self._codec
        seed = unit.seed(self._seed, self._comm.rank)
        self._comm.gather_layout(shards, fulls, layouts, codec=codec, min_numel=0, seed=seed)
