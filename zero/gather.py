"""Stage 3: make a unit's parameters whole, and let go of them.

``gather`` and ``reshard`` are a pair; both know the unit's state, so that calling one twice does
nothing. Gathering is a collective: all ranks gather the same units in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zcomm import Communicator
from zero.config import Config
from zero.edits import absorb, was_edited
from zero.saved import SavedWeights
from zero.secondary import Secondary
from zero.unit import State, Unit


class Gathering:
    """Owns the whole form of the units' parameters; in stages 0-2 there is nothing to do.

    ``kept`` counts the users that want all units to stay whole.
    """

    def __init__(
        self,
        comm: Communicator,
        config: Config,
        saved: SavedWeights,
        secondary: Secondary | None,
    ) -> None:
        self._comm = comm
        self._codec = config.weights_codec
        self._seed = config.seed
        self.saved = saved
        self.secondary = secondary
        self.sharded = config.stage == 3
        self.kept = 0

    def gather(self, unit: Unit) -> None:
        """Make a unit whole; from the secondary copy where there is one."""
        if unit.state is not State.SHARDED:
            return
        fulls = [buffer.allocate() for buffer in unit.buffers]
        if fulls:
            self.fetch(unit, fulls)
        for buffer, full in zip(unit.buffers, fulls, strict=True):
            buffer.show(full)
        self.saved.add(unit)
        unit.state = State.WHOLE

    def fetch(self, unit: Unit, fulls: Sequence[Tensor]) -> None:
        """Write the whole parameters of a sharded unit to ``fulls``."""
        if self.secondary is not None:
            self.secondary.gather(unit, fulls)
            return
        shards = [buffer.shard for buffer in unit.buffers]
        layouts = [buffer.layout.all for buffer in unit.buffers]
        codec = self._codec if unit.quantise else None
        self._comm.gather_layout(
            shards,
            fulls,
            layouts,
            codec=codec,
            min_numel=0,
            label=unit.label,
            seed=unit.seed(self._seed, self._comm.rank),
        )

    def reshard(self, unit: Unit) -> None:
        """Let go of a whole unit; parameters that were changed in place go back to the shard."""
        if unit.state is State.SHARDED:
            return
        if not self.sharded or self.kept:
            unit.state = State.WHOLE
            return
        if any(was_edited(buffer) for buffer in unit.buffers):
            for buffer in unit.buffers:
                absorb(buffer, exact=self._codec is None or not unit.quantise)
            unit.version += 1
        self.saved.remove(unit)
        for buffer in unit.buffers:
            buffer.hide()
        unit.state = State.SHARDED

    def forget(self) -> None:
        """Let go of copies of parameters: shards are about to change without a new version."""
        if self.secondary is not None:
            self.secondary.forget()
