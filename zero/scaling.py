"""Loss scaling: small gradients of 16-bit parameters kept above the smallest number.

The loss is multiplied by the *scale* before backward, gradients stay scaled until the step, which
divides them in float32. A dynamic scale falls when a step was skipped and grows after a number of
steps that were not (Micikevicius et al., arXiv 1710.03740, section 3.2). All ranks decide alike,
because a step is skipped on all or none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DynamicLossScale:
    """How a dynamic scale moves; the values of ``torch.amp.GradScaler``.

    Attributes:
        initial: the first scale.
        growth: factor after ``interval`` steps in a row that were not skipped.
        backoff: factor after a skipped step.
        interval: number of steps.
        minimum: the scale never falls below.

    Raises:
        ValueError: numbers with which the scale would not move as its name says.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0

    def __post_init__(self) -> None:
        check_scale("initial", self.initial)
        check_scale("minimum", self.minimum)
        if not self.growth >= 1 or not 0 < self.backoff <= 1 or self.interval < 1:
            raise ValueError(
                f"growth {self.growth}, backoff {self.backoff}, interval {self.interval}: expected"
                " growth of 1 or more, backoff in (0, 1], interval of 1 or more"
            )


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
    """

    def __init__(self, setting: float | DynamicLossScale | None) -> None:
        self._dynamic = setting if isinstance(setting, DynamicLossScale) else None
        self.scale = 1.0
        if self._dynamic is not None:
            self.scale = float(self._dynamic.initial)
        elif isinstance(setting, int | float):
            self.scale = float(setting)
        self.num_good = 0

    def update(self, *, skipped: bool) -> None:
        """Move a dynamic scale after a step."""
        moves = self._dynamic
        if moves is None:
            return
        if skipped:
            self.scale = max(self.scale * moves.backoff, moves.minimum)
            self.num_good = 0
            return
        self.num_good += 1
        if self.num_good == moves.interval:
            self.scale *= moves.growth
            self.num_good = 0
