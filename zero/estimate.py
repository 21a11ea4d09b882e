"""Bytes of a training before there is one: the formulas of the ZeRO papers, and what zero adds.

Model states are those of arXiv 1910.02054, figure 1, for mixed precision; everything else says
where it comes from. A reader must not assume that activations are in it: no formula knows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zcomm import Codec
from zero.config import Config
from zero.hops import RESIDUAL

WIDE_NBYTES = 4


@dataclass(frozen=True)
class Model:
    """What an estimate needs to know of a model.

    Attributes:
        numel: elements of all parameters, Ψ.
        unit_numel: of the largest unit but the root.
        root_numel: of the root unit.
        itemsize: bytes of a parameter; of 4 there are no separate masters.
        states: float32 values that the optimizer keeps of an element: 2 for Adam.
    """

    numel: float
    unit_numel: float = 0
    root_numel: float = 0
    itemsize: int = 2
    states: int = 2

    def __post_init__(self) -> None:
        for name in ("numel", "unit_numel", "root_numel", "states"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a model: {value:g}, expected 0 or more")
        if self.numel == 0:
            raise ValueError("numel of a model: 0, expected a model that has parameters")
        if max(self.unit_numel, self.root_numel) > self.numel:
            raise ValueError(
                f"a unit of {self.unit_numel:g} and a root of {self.root_numel:g} parameters: "
                f"the model has {self.numel:g}"
            )


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank.

    Attributes:
        parameters: whole, or in stage 3 the shard.
        gradients: reduced, between the last backward and the step.
        masters: float32 copies that the optimizer steps.
        optimizer: its states.
        secondary: hpZ, the slice of each unit.
        waiting: ``accumulate="node"``: sums of a node that wait for the step.
        residuals: ``grads_feedback``: what was lost between nodes.
        whole_units: stage 3, at the peak: units that compute or are ahead, and the root.
        local_gradients: stages 2 and 3, at the peak: of two units and the root.
        codec_buffers: at the peak: codes, float32 slices and differences of the largest unit.
        step_gradients: in the step: float32 copies of gradients of 16 bits, all at once; with
            ``offload_optimizer`` there is only a block of them.
    """

    parameters: float
    gradients: float
    masters: float
    optimizer: float
    secondary: float
    waiting: float
    residuals: float
    whole_units: float
    local_gradients: float
    codec_buffers: float
    step_gradients: float

    @property
    def model_states(self) -> float:
        """What the ZeRO paper counts."""
        return self.parameters + self.gradients + self.masters + self.optimizer

    @property
    def held(self) -> float:
        """What is there between the last backward and the step."""
        return self.model_states + self.secondary + self.waiting + self.residuals

    @property
    def computing(self) -> float:
        """With what exists while units compute; activations are not in it."""
        return self.held + self.whole_units + self.local_gradients + self.codec_buffers

    @property
    def peak(self) -> float:
        """While units compute, or in the step, whichever is more; activations are not in it."""
        return max(self.computing, self.held + self.step_gradients)


def estimate(config: Config, model: Model, *, num_ranks: int, ranks_per_node: int) -> Estimate:
    """Return the bytes that one rank needs.

    Args:
        config: how the model is sharded.
        model: its sizes.
        num_ranks: N.
        ranks_per_node: L, which divides N.

    Raises:
        ValueError: numbers that do not divide.
    """
    if num_ranks < 1 or ranks_per_node < 1 or num_ranks % ranks_per_node:
        raise ValueError(
            f"{ranks_per_node} ranks per node, {num_ranks} ranks: the first has to divide the other"
        )
    size, numel = model.itemsize, model.numel
    shared = [1 / num_ranks if config.stage >= stage else 1.0 for stage in range(4)]
    persistent = config.secondary == "persistent" and num_ranks > ranks_per_node
    masters = size < WIDE_NBYTES or persistent or _decodes(config)
    several = num_ranks > ranks_per_node
    waits = several and config.accumulate == "node"
    gradients = WIDE_NBYTES if config.grad_dtype != "param" else size
    return Estimate(
        parameters=size * numel * shared[3],
        gradients=0 if waits and config.stage > 1 else gradients * numel * shared[2],
        masters=WIDE_NBYTES * numel * shared[1] if masters else 0,
        optimizer=WIDE_NBYTES * model.states * numel * shared[1],
        secondary=_secondary(config, model, num_ranks, ranks_per_node),
        waiting=WIDE_NBYTES * numel / ranks_per_node if waits else 0,
        residuals=_encoded(RESIDUAL) * numel / ranks_per_node
        if several and config.grads_feedback
        else 0,
        whole_units=_whole(config, model, num_ranks) * size,
        local_gradients=size * (2 * model.unit_numel + model.root_numel) if config.stage > 1 else 0,
        codec_buffers=_buffers(config, model, ranks_per_node),
        step_gradients=WIDE_NBYTES * numel * shared[1] if waits or gradients < WIDE_NBYTES else 0,
    )


def _decodes(config: Config) -> bool:
    return config.stage in (1, 2) and config.weights is not None


def _secondary(config: Config, model: Model, num_ranks: int, ranks_per_node: int) -> float:
    if config.secondary is None:
        return 0
    number = isinstance(config.secondary, int)
    group = config.secondary if isinstance(config.secondary, int) else ranks_per_node
    if number and num_ranks % group:
        raise ValueError(f"secondary {group} does not divide {num_ranks} ranks")
    if group == num_ranks:
        return 0
    codec = config.weights_codec if config.secondary_codec is not None else None
    each = model.itemsize if codec is None else _encoded(codec)
    return each * model.numel / group


def _encoded(codec: Codec) -> float:
    """Return the bytes of an element: its code, and its part of the block's scale."""
    numel = 1 << 20
    return codec.wire_nbytes(numel) / numel


def _whole(config: Config, model: Model, num_ranks: int) -> float:
    if config.stage < 3:
        return 0
    ahead = config.prefetch if num_ranks > 1 else 0
    return min(model.numel, model.root_numel + (1 + ahead) * model.unit_numel)


def _buffers(config: Config, model: Model, ranks_per_node: int) -> float:
    largest = max(model.unit_numel, model.root_numel)
    total = 0.0
    if config.secondary_codec is not None:
        total += model.itemsize / 2 * largest
    if config.secondary == "persistent":
        total += 2 * WIDE_NBYTES * largest / ranks_per_node
    if config.grads_feedback or config.accumulate == "node":
        total += 2 * WIDE_NBYTES * largest / ranks_per_node
    return total
