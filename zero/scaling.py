"""Loss scaling: small gradients of 16-bit parameters kept above the smallest number.

The loss is multiplied by the *scale* before backward, gradients stay scaled until the step, which
divides them in float32. A dynamic scale falls when a step was skipped and grows after a number of
steps that were not (Micikevicius et al., arXiv 1710.03740, section 3.2). All ranks decide alike,
because a step is skipped on all or none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DynamicLossScale:
    """How a dynamic scale moves; the values of ``torch.amp.GradScaler``.

    Attributes:
        initial: the first scale.
        growth: factor after ``interval`` steps in a row that were not skipped.
        backoff: factor after a skipped step.
        interval: number of steps.
        minimum: the scale never falls below.
        hysteresis: the skipped step that makes the scale fall: 2 forgives one. Forgiven steps are
            counted anew when the scale grows, not when it falls.
        consecutive_hysteresis: count them anew after every step that was not skipped.

    Raises:
        ValueError: numbers with which the scale would not move as its name says.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0
    hysteresis: int = 1
    consecutive_hysteresis: bool = False

    def __post_init__(self) -> None:
        check_scale("initial", self.initial)
        check_scale("minimum", self.minimum)
        if not self.growth >= 1 or not 0 < self.backoff <= 1 or self.interval < 1:
            raise ValueError(
                f"growth {self.growth}, backoff {self.backoff}, interval {self.interval}: expected"
                " growth of 1 or more, backoff in (0, 1], interval of 1 or more"
            )
        if self.hysteresis < 1:
            raise ValueError(f"hysteresis {self.hysteresis}: expected 1 or more")


def check_scale(name: str, value: object) -> None:
    """Check that a value is a finite number above zero.

    Raises:
        ValueError: when it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} {value!r}: expected a finite number above 0")


class LossScaler:
    """The scale of one training.

    Attributes:
        scale: what the loss is multiplied by.
        num_good: steps in a row that were not skipped, since the scale moved last.
        num_forgiven: skipped steps that the scale may still stay for.
    """

    def __init__(self, setting: float | DynamicLossScale | None) -> None:
        self._dynamic = setting if isinstance(setting, DynamicLossScale) else None
        self.scale = 1.0
        if self._dynamic is not None:
            self.scale = float(self._dynamic.initial)
        elif isinstance(setting, int | float):
            self.scale = float(setting)
        self.num_good = 0
        self.num_forgiven = 0
        self._forgive_again()

    def update(self, *, skipped: bool) -> None:
        """Move a dynamic scale after a step."""
        moves = self._dynamic
        if moves is None:
            return
        if skipped:
            self.num_good = 0
            if self.num_forgiven:
                self.num_forgiven -= 1
            else:
                self.scale = max(self.scale * moves.backoff, moves.minimum)
            return
        self.num_good += 1
        grows = self.num_good == moves.interval
        if grows:
            self.scale *= moves.growth
            self.num_good = 0
        if grows or moves.consecutive_hysteresis:
            self._forgive_again()

    def save_state(self) -> dict[str, float | int]:
        """Return what the next moves depend on."""
        return {
            "loss_scale": self.scale,
            "num_good": self.num_good,
            "num_forgiven": self.num_forgiven,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put :meth:`save_state` back."""
        self.scale, self.num_good = state["loss_scale"], state["num_good"]
        # Checkpoints of before there was hysteresis have no such count.
        self.num_forgiven = state.get("num_forgiven", 0)

    def _forgive_again(self) -> None:
        if self._dynamic is not None:
            self.num_forgiven = self._dynamic.hysteresis - 1
