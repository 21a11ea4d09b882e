"""The states that every engine has beside those of parameters: versions, skips, local gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zero.engine import Engine
from zero.unit import Unit


class Versions:
    """The versions of the units, on which draws of stochastic rounding depend."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def save_state(self) -> Mapping[str, Any]:
        """See :class:`~zero.engine.StateProvider`."""
        return {
            "versions": [unit.version for unit in self._units],
            "published": [unit.published for unit in self._units],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`~zero.engine.StateProvider`."""
        saved = zip(state["versions"], state["published"], strict=True)
        for unit, (version, published) in zip(self._units, saved, strict=True):
            unit.version, unit.published = version, published

    def load_foreign(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Give all units the highest version, so that none is used twice."""
        highest = max([0, *states[0]["versions"]])
        for unit in self._units:
            # A persistent secondary sends what shards lag behind masters.
            unit.version, unit.published = highest + 1, highest


def register_providers(engine: Engine) -> None:
    """Give an engine the providers that all engines have."""
    # The reducer can refuse a checkpoint, so it comes first: nothing has changed then.
    engine.providers["reducer"] = engine.reducer
    engine.providers["stepper"] = engine.stepper
    engine.providers["versions"] = Versions(engine.units)
