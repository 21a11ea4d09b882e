"""The three ways to shard the same training, and what the papers expect of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zero
from benchmarks.training import theory
from benchmarks.training.theory import Expected


@dataclass(frozen=True)
class Scheme:
    """A configuration, and its theory: (parameters, shape of the topology) -> bytes."""

    name: str
    config: zero.Config
    expected: Callable[[int, Sequence[int]], Expected]


STAGE_0 = Scheme("stage 0", zero.Config(stage=0), theory.stage0)
STAGE_3 = Scheme("stage 3", zero.Config(stage=3), theory.stage3)
ZEROPP = Scheme("ZeRO++", zero.Config.zeropp(), theory.zeropp)
SCHEMES = (STAGE_0, STAGE_3, ZEROPP)
