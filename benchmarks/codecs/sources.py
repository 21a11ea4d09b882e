"""Where values come from: two distributions, and gradients of the demo's model.

A source is a list of parts, each a segment of one message as a parameter's gradient is in ZeRO. Do
not assume float32: gradients of the demo are bfloat16, which the codecs take as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

SEED = 20240611
DEGREES = 3


@dataclass(frozen=True)
class Source:
    """Values to be encoded as one message, one segment a part; all parts share a dtype."""

    name: str
    title: str
    parts: tuple[torch.Tensor, ...]

    @property
    def segments(self) -> list[int]:
        """The elements of every part."""
        return [part.numel() for part in self.parts]

    @cached_property
    def values(self) -> torch.Tensor:
        """All parts one after the other."""
        return torch.cat([part.reshape(-1) for part in self.parts])


def normal(numel: int) -> Source:
    """Return values of the standard normal distribution."""
    values = np.random.default_rng(SEED).standard_normal(numel, np.float32)
    return Source("normal", "normal, float32", (torch.from_numpy(values),))


def heavy_tailed(numel: int) -> Source:
    """Return values of Student's t distribution with three degrees of freedom."""
    values = np.random.default_rng(SEED).standard_t(DEGREES, numel).astype(np.float32)
    title = f"Student t, {DEGREES} degrees, float32"
    return Source("student_t", title, (torch.from_numpy(values),))


def gradients(parameters: Mapping[str, torch.Tensor]) -> Source:
    """Return gradients by the name of their parameter."""
    dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
    return Source("gradients", f"gradients, {dtype}", tuple(parameters.values()))
