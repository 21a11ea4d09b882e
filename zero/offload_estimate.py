"""Bytes of a training that offloads: what zero keeps in memory and what on disk, at each rank.

Where a state is between its uses (Ψ parameters, N ranks, K states of the optimizer, s bytes of a
parameter; stage 3, of which stages 1 and 2 differ in what they share):

| | none | ``"cpu"`` | ``"nvme"`` |
|---|---|---|---|
| parameters, sΨ/N | device | host | disk |
| masters and the optimizer's states, 4(1 + K)Ψ/N | device | host | disk |
| gradients of a step, 4Ψ/N in the first one, then sΨ/N | device | host | host |
| float32 copies of those, in the step | 4Ψ/N | of a block | of a block |

With ``"nvme"`` the host also has what is on its way: shards of the units that are gathered, three
blocks of the step, new parameters of two units.

The papers: ZeRO-Offload (arXiv 2101.06840, table 1) has 2Ψ on the device and 14Ψ/N on the host, as
stage 2 with ``"cpu"`` here after the first step. ZeRO-Infinity (arXiv 2104.07857, figure 2a) counts
20Ψ/N bytes for Adam, of which 4 are float32 gradients: with ``"nvme"`` zero has 14Ψ/N on disk, and
gradients never go there.

A reader must not assume that device and host are two memories: for a model on the CPU they are one,
and ``"cpu"`` saves only the float32 gradients of a step: 4Ψ/N in every step without
it, beside those of 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero.config import Config
from zero.estimate import WIDE_NBYTES, Estimate, Model
from zero.offload.step import IN_MEMORY

BLOCKS = 3
"""Of a step in blocks: one is read, one updated, one written."""


@dataclass(frozen=True)
class Offloaded:
    """Bytes of one rank.

    Attributes:
        device: what stays with the model, at the peak, with all that zero adds (secondary, whole
            units, local gradients, codec buffers); without activations.
        host: what is there for good, and on its way to or from the disk.
        disk: on NVMe.
    """

    device: float
    host: float
    disk: float

    @property
    def memory(self) -> float:
        """Of device and host, which are one where the model is on the CPU."""
        return self.device + self.host


def offloaded(config: Config, model: Model, found: Estimate, *, num_ranks: int) -> Offloaded:
    """Return where the bytes of an estimate lie with the offload of its configuration.

    Args:
        config: of the estimate.
        model: of the estimate.
        found: the estimate.
        num_ranks: N.
    """
    places = {"cpu": 0.0, "nvme": 0.0}
    device = found.peak if config.offload_optimizer is None else found.computing
    masters = found.masters
    if config.on_disk and not masters:  # also of parameters that are float32
        masters = WIDE_NBYTES * model.numel / num_ranks
        device += masters
    if config.offload_optimizer is not None:
        gradients = found.gradients
        if gradients:  # those that a rank owns are float32 in the first step
            owned = WIDE_NBYTES * model.numel / num_ranks
            gradients = owned if config.stage > 1 else gradients + owned
        device -= found.gradients + masters + found.optimizer
        places["cpu"] += gradients
        places[config.offload_optimizer] += masters + found.optimizer
    if config.offload_params is not None:
        device -= found.parameters
        places[config.offload_params] += found.parameters
    return Offloaded(device, places["cpu"] + _transfers(config, model, num_ranks), places["nvme"])


def _transfers(config: Config, model: Model, num_ranks: int) -> float:
    """Return the bytes on their way: the step's, or those of gathers, whichever are more."""
    largest = max(model.unit_numel, model.root_numel) / num_ranks
    step = gathers = 0.0
    if config.offload_optimizer is not None:
        on_disk = config.offload_optimizer == "nvme"
        numel = config.offload_numel * (1 if on_disk else IN_MEMORY)
        block = min(numel, model.numel / num_ranks)
        step += WIDE_NBYTES * block  # its gradients
        if on_disk:
            step += BLOCKS * WIDE_NBYTES * (1 + model.states) * block
    if config.offload_params == "nvme":
        step += 2 * model.itemsize * largest  # one is filled, one written
        ahead = config.prefetch if num_ranks > 1 else 0
        gathers = (1 + ahead) * model.itemsize * largest
    return max(step, gathers)
