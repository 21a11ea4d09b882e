"""From masters back to parameters: after a step, and after edits of masters.

In stages 1 and 2 owners send their parameters, through the weights codec where there is one; the
owner uses the decoded values too. In stage 3 the next gather does that; with a persistent secondary
it also gives the shards their values. Masters on disk are not read for it: the step that updated
them passes their values on, in the parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import increment_version

from zcomm import Communicator
from zcomm.layout import Layout
from zero.config import Config
from zero.edits import note_versions
from zero.unit import Buffer, Unit, pack, split

if TYPE_CHECKING:
    from zero.offload.disk import StoredShard


class Publisher:
    """Makes the masters' values the parameters'."""

    def __init__(self, comm: Communicator, config: Config) -> None:
        self._comm = comm
        self._stage = config.stage
        self._codec = config.weights_codec
        self._seed = config.seed
        self._persistent = config.secondary == "persistent"
        self._behind: StoredShard | None = None

    def is_exact(self, unit: Unit) -> bool:
        """Tell whether parameters are the masters rounded, or also went through a codec."""
        return self._codec is None or not unit.quantise or self._comm.size == 1

    def lags(self, unit: Unit) -> bool:
        """Tell whether shards keep what was published last, until the next gather."""
        return self._persistent and not self.is_exact(unit)

    def publish(self, unit: Unit, values: Mapping[Buffer, Tensor] | None = None) -> None:
        """Give a unit's parameters the values of the masters; in stages 1 and 2 a collective.

        Args:
            unit: whose masters were stepped.
            values: of buffers whose masters are on disk, those that were stepped: this rank's
                trainable runs, one after the other, in the parameters' dtype.
        """
        if not unit.trainable:
            return
        values = values or {}
        unit.version += 1
        if self._stage in (1, 2):
            self._send(unit, values)
        elif not self.lags(unit):
            for buffer in unit.trainable:
                if buffer.separate:
                    self._keep(buffer, values)
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

    def _keep(self, buffer: Buffer, values: Mapping[Buffer, Tensor]) -> None:
        """Give the shard, or in stage 0 the whole buffer, the values."""
        masters = [master.tensor for master in buffer.masters]
        if buffer.columns is not None:
            if buffer not in values:  # nothing was stepped
                return
            masters = split(values[buffer], [master.run for master in buffer.masters])
        if buffer.stored is not None:
            self._store(buffer, masters)
        else:
            for master, value in zip(buffer.masters, masters, strict=True):
                master.held.copy_(value)

    def _store(self, buffer: Buffer, masters: Sequence[Tensor]) -> None:
        """Begin to write a new shard behind the one before; frozen parameters stay as they are."""
        assert buffer.stored is not None
        trainable = len(buffer.masters) == len(buffer.runs)
        new = buffer.stored.empty() if trainable else buffer.stored.begin()
        by_run = {m.run: value for m, value in zip(buffer.masters, masters, strict=True)}
        for run, place in zip(buffer.runs, split(new.wait(), buffer.runs), strict=True):
            if run in by_run:
                place.copy_(by_run[run])
        buffer.stored.begin_store(new)
        if self._behind is not None:
            self._behind.settle()
        self._behind = buffer.stored

    def _send(self, unit: Unit, values: Mapping[Buffer, Tensor]) -> None:
        shards, fulls, layouts = [], [], []
        for buffer in unit.trainable:
            assert buffer.full is not None
            if buffer.columns is None:
                masters = [master.tensor for master in buffer.masters]
                shards.append(pack(masters, buffer.layout.dtype))
            elif buffer in values:
                shards.append(values[buffer])
            else:  # nothing was stepped
                exact = self.is_exact(unit)
                held = [m.held for m in buffer.masters] if exact else buffer.load_masters()
                shards.append(pack(held, buffer.layout.dtype))
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
