"""Bytes of a training that offloads, by the formulas of the papers. zero cannot offload yet.

Of ZeRO-Offload (arXiv 2101.06840, section 3 and table 1), stage 2: the device keeps the parameters,
2Ψ; the host has 16-bit gradients and the optimizer's 12 bytes, 14Ψ/N a rank.

Of ZeRO-Infinity (arXiv 2104.07857, section 3 and figure 2a), stage 3: 20 bytes a parameter, of
which 2 are parameters, 2 gradients, and 16 the float32 parameters, momentum, variance and gradients
of the step; gradients are where the optimizer is; all of it is shared by N ranks.

Buffers that transfers need, on the host and pinned, are in neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero.config import Config
from zero.estimate import WIDE_NBYTES, Estimate, Model

Place = Literal["cpu", "nvme"]
PLACES: tuple[Place, ...] = ("cpu", "nvme")
_HALF_NBYTES = 2


@dataclass(frozen=True)
class Offload:
    """Where the papers put states; None leaves them on the device.

    Attributes:
        optimizer: of the optimizer's states and the gradients.
        params: of the parameters, in stage 3.
    """

    optimizer: Place | None = None
    params: Place | None = None

    def possible(self, stage: int) -> bool:
        """Tell whether a paper has a formula for a stage."""
        if stage == 3:
            return self.optimizer is not None or self.params is not None
        return stage == 2 and self.optimizer == "cpu" and self.params is None


@dataclass(frozen=True)
class Offloaded:
    """Bytes of one rank.

    Attributes:
        device: that stay there, at the peak, with all that zero adds (secondary, whole units, local
            gradients, codec buffers); without activations.
        host: in its memory.
        disk: on NVMe.
    """

    device: float
    host: float
    disk: float


def offloaded(
    offload: Offload, config: Config, model: Model, found: Estimate, *, num_ranks: int
) -> Offloaded:
    """Return where the bytes of an estimate lie with offload.

    Args:
        offload: what goes where.
        config: of the estimate.
        model: of the estimate.
        found: the estimate, without offload.
        num_ranks: N.

    Raises:
        ValueError: a stage that the papers have no formula for, parameters that are not of 16 bits.
    """
    if not offload.possible(config.stage):
        raise ValueError(
            f"offload_optimizer={offload.optimizer}, offload_params={offload.params} in stage"
            f" {config.stage}: the papers have an optimizer on the CPU in stage 2, and optimizer"
            " and parameters on the CPU or NVMe in stage 3"
        )
    if model.itemsize != _HALF_NBYTES:
        raise ValueError("offload: the formulas of the papers are for parameters of 16 bits")
    share = model.numel / num_ranks
    # ZeRO-Infinity steps float32 gradients, ZeRO-Offload the 16-bit ones.
    wide = model.states + (2 if config.stage == 3 else 1)
    stepped = (_HALF_NBYTES + WIDE_NBYTES * wide) * share
    device = found.peak
    places = {"cpu": 0.0, "nvme": 0.0}
    if offload.optimizer is not None:
        device -= found.gradients + found.masters + found.optimizer
        places[offload.optimizer] += stepped
    if offload.params is not None:
        device -= found.parameters
        places[offload.params] += _HALF_NBYTES * share
    return Offloaded(device, places["cpu"], places["nvme"])
