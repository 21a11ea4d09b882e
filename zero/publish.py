"""From masters back to parameters: after a step, and after edits of masters.

In stages 1 and 2 owners send their parameters, through the weights codec where there is one; the
owner uses the decoded values too. In stage 3 the next gather does that; with a persistent secondary
it also gives the shards their values. Masters on disk are not read for it: :meth:`Publisher.begin`
says where the step that updates them puts their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zcomm import Communicator
from zcomm.layout import Layout
from zero.config import Config
from zero.edits import note_versions
from zero.unit import Buffer, Unit, pack, split

if TYPE_CHECKING:
    from zero.offload.disk import Loading, StoredShard


@dataclass(frozen=True, eq=False)
class Values:
    """Where new values of a buffer's masters go, in the parameters' dtype.

    ``places[i]`` is that of master i: in the shard, the whole buffer, or ``compact`` memory, to be
    sent. ``shard`` is a new one, to be written to the disk.
    """

    places: list[Tensor]
    compact: Tensor | None = None
    shard: Loading | None = None


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

    def begin(self, unit: Unit, given: Mapping[Buffer, bool]) -> dict[Buffer, Values]:
        """Return where a step puts the values of masters on disk.

        Args:
            unit: whose masters are stepped.
            given: the buffers of which some are, and whether all are: the places of others hold
                their values already.
        """
        if self.lags(unit):
            return {}
        found = {b: all_given for b, all_given in given.items() if b.columns is not None}
        return {buffer: self._places(unit, buffer, found[buffer]) for buffer in found}

    def _places(self, unit: Unit, buffer: Buffer, complete: bool) -> Values:
        if self._stage < 3 and not self.is_exact(unit):
            runs = [master.run for master in buffer.masters]
            numel = sum(run.numel for run in runs)
            compact = torch.empty(numel, dtype=buffer.layout.dtype, device=buffer.device)
            return Values(split(compact, runs), compact)
        if buffer.stored is None:
            return Values([master.held for master in buffer.masters])
        return self._new_shard(buffer, complete=complete)

    def _new_shard(self, buffer: Buffer, *, complete: bool) -> Values:
        """Return memory for a shard; what no master gives is read: frozen parameters, for one."""
        assert buffer.stored is not None
        complete = complete and len(buffer.masters) == len(buffer.runs)
        new = buffer.stored.empty() if complete else buffer.stored.begin()
        places = dict(zip(buffer.runs, split(new.wait(), buffer.runs), strict=True))
        return Values([places[master.run] for master in buffer.masters], shard=new)

    def publish(self, unit: Unit, values: Mapping[Buffer, Values] | None = None) -> None:
        """Give a unit's parameters the values of the masters; in stages 1 and 2 a collective.

        Args:
            unit: whose masters were stepped.
            values: of masters on disk, those that :meth:`begin` returned.
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
            shards.append(pack(runs, buffer.layout.dtype, buffer.device))
            fulls.append(buffer.full)
            layouts.append(buffer.layout.all)
        self._gather(unit, shards, fulls, layouts)

    def _keep(self, buffer: Buffer, values: Mapping[Buffer, Values]) -> None:
        """Give the shard, or in stage 0 the whole buffer, the values."""
        new = values.get(buffer)
        if buffer.columns is None:
            if buffer.stored is not None:
                new = self._new_shard(buffer, complete=True)
            places = [m.held for m in buffer.masters] if new is None else new.places
            for master, place in zip(buffer.masters, places, strict=True):
                place.copy_(master.tensor)
        if new is not None and new.shard is not None:
            assert buffer.stored is not None
            buffer.stored.begin_store(new.shard)
            if self._behind is not None:
                self._behind.settle()
            self._behind = buffer.stored

    def _send(self, unit: Unit, values: Mapping[Buffer, Values]) -> None:
        shards, fulls, layouts = [], [], []
        for buffer in unit.trainable:
            assert buffer.full is not None
            new = values.get(buffer)
            if new is not None and new.compact is not None:
                shards.append(new.compact)
            else:
                own = self._own(unit, buffer)
                shards.append(pack(own, buffer.layout.dtype, buffer.device))
            fulls.append(buffer.full)
            layouts.append(buffer.layout.trainable)
        self._gather(unit, shards, fulls, layouts)

    def _own(self, unit: Unit, buffer: Buffer) -> list[Tensor]:
        """Return the masters' values; without a codec what is held is those, rounded."""
        if buffer.columns is not None and self.is_exact(unit):
            return [master.held for master in buffer.masters]
        return buffer.load_masters()

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
