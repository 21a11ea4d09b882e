"""The algorithm of each quantised reduction, asked once and kept as long as the training lives.

Without codecs no algorithm changes a bit, and ``"auto"`` may take another one in every run. With
codecs flat and hierarchical reductions encode different sums: the choice of the run that began a
training is saved in its checkpoints, and a run that goes on from one takes it over, whatever its
own tuning would choose. Gathers encode once, and have the same bits on every way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from zcomm import Codec, Communicator
from zcomm.layout import Layout
from zero.unit import Unit

logger = logging.getLogger("zcomm")


class Algorithms:
    """The choices of one training, by unit, hop and dtypes."""

    def __init__(self) -> None:
        self._chosen: dict[str, str] = {}
        self._saved: dict[str, str] = {}

    def choose(
        self,
        comm: Communicator,
        unit: Unit,
        layouts: Sequence[Layout],
        codecs: tuple[Codec | None, ...] | None,
        reduce_dtype: str | None,
        *,
        op: str = "sum",
        hop: str = "",
    ) -> str:
        """Return the ``algorithm`` of a reduction: auto for an exact one, else what is kept."""
        if codecs is None or not any(codecs) or not layouts:
            return "auto"
        key = f"{unit.number}{hop}:{'+'.join(layout.dtype for layout in layouts)}"
        if key not in self._chosen:
            own = comm.reduction_algorithm(layouts, codec=codecs, reduce_dtype=reduce_dtype, op=op)
            self._chosen[key] = self._kept(key, own)
        return self._chosen[key]

    def save_state(self) -> dict[str, Any]:
        """Return the choices, without sizes of pieces, on which no bit depends."""
        names = {key: how.partition(":")[0] for key, how in self._chosen.items()}
        return {"algorithms": {**self._saved, **names}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the choices of a checkpoint of the same plan; {} makes them anew."""
        self._chosen.clear()
        self._saved = dict(state.get("algorithms", {}))

    def _kept(self, key: str, own: str) -> str:
        saved = self._saved.get(key, own)
        if saved.partition(":")[0] == own.partition(":")[0]:
            return own
        logger.info(
            "gradients of unit %s are reduced %s, as in the checkpoint, not %s: with codecs bits"
            " depend on it",
            key.partition(":")[0],
            saved,
            own,
        )
        return saved
