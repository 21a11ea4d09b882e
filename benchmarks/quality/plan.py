"""What is run: the settings, the training that all share, and the text.

Every unit is quantised (``min_numel=0``): the model is small, and by default its root would stay
exact.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np

import zero
from benchmarks.training.data import Text
from benchmarks.training.model import Shape

NUM_RANKS = 4
NODES = "2x2"
ONE_NODE = "4"

STRETCH_NBYTES = 1 << 15
"""Text is held out in stretches, not at the end, whose files would be of another kind."""

HELD_OUT_EVERY = 16


@dataclass(frozen=True)
class Setting:
    """One way to run the same training."""

    name: str
    what: str
    config: zero.Config
    topology: str = NODES


def _quantise_all(config: zero.Config) -> zero.Config:
    return replace(config, min_numel=0)


_SAFE4 = _quantise_all(zero.Config.safe4())

EXACT = Setting("exact", "stage 3, no codec", zero.Config())
ORDERED = Setting(
    "exact-ordered", "stage 3, no codec, sums in rank order over one level", zero.Config(), ONE_NODE
)
SETTINGS = (
    EXACT,
    ORDERED,
    Setting(
        "zeropp",
        "the ZeRO++ paper: int8 weights, int4 gradients",
        _quantise_all(zero.Config.zeropp()),
    ),
    Setting("safe4", "recommended: int8 weights, int8 and int4 gradients with feedback", _SAFE4),
    Setting(
        "persistent",
        "int4 differences of weights, gradients as safe4",
        replace(_SAFE4, secondary="persistent", weights="int4"),
    ),
    Setting(
        "int8-weights",
        "int8 weights, gradients without a codec",
        _quantise_all(zero.Config(weights="int8", secondary="node")),
    ),
)
USUAL = tuple(setting.name for setting in SETTINGS[:5])
"""The settings of the comparison; the last one says which part of them a loss comes from."""


@dataclass(frozen=True)
class Plan:
    """The training. Batches are of all ranks together; losses are in nats per byte.

    Attributes:
        steps: of the optimizer; the learning rate warms up and falls to a tenth in a half cosine.
        sequences: of ``shape.context`` bytes, a step.
        validation: sequences of held-out text, the same in every evaluation of every run.
        evaluations: at equal distances, the last after the last step.
    """

    shape: Shape = field(default_factory=lambda: Shape(context=64, width=128, depth=2, heads=4))
    steps: int = 240
    sequences: int = 16
    learning_rate: float = 1e-3
    warmup: int = 40
    clip: float = 1.0
    validation: int = 512
    evaluations: int = 2

    def evaluated_after(self) -> list[int]:
        """Return the numbers of steps after which validation losses are taken."""
        return [self.steps * (i + 1) // self.evaluations for i in range(self.evaluations)]

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate in a step, from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.1 + 0.9 * 0.5 * (1 + float(np.cos(np.pi * done)))

    def digest(self, text: Text, setting: Setting) -> str:
        """Return a name for all that a run's losses depend on but the seed and the program."""
        facts = json.dumps([asdict(self), repr(setting.config), setting.topology])
        return hashlib.blake2b(facts.encode() + text.tobytes(), digest_size=8).hexdigest()


class Texts(NamedTuple):
    """What is trained on, and what is held out."""

    training: Text
    validation: Text


def divide(text: Text) -> Texts:
    """Hold out every 16th stretch of a text."""
    stretches = [text[i : i + STRETCH_NBYTES] for i in range(0, len(text), STRETCH_NBYTES)]
    held_out = stretches[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    kept = [s for i, s in enumerate(stretches) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return Texts(np.concatenate(kept), np.concatenate(held_out))
