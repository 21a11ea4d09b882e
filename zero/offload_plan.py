"""The seconds of a training step that offloads, from bytes and the rates of a machine.

1. Forward and backward: two gathers read each rank's shard from the disk that ``ranks`` share, and
   send it; with ``prefetch`` the disk works while ranks compute.
2. The step: masters and the optimizer's states are read and written, parameters written, while
   blocks are updated: the longer of both.

The first step reads no states, for there are none. A reader must not assume that a rate holds when
something else uses the disk or the cores, nor that activations are in any number here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zero.config import Config, Place
from zero.estimate import WIDE_NBYTES, Model, estimate
from zero.offload_estimate import Offloaded, offloaded

SETTINGS: Mapping[str, tuple[Place | None, Place | None]] = {
    "none": (None, None),
    "optimizer cpu": ("cpu", None),
    "optimizer nvme": ("nvme", None),
    "optimizer, params nvme": ("nvme", "nvme"),
}
"""What can be offloaded, the fastest first: of optimizer and parameters, where they go."""


@dataclass(frozen=True)
class Machine:
    """What one rank has, and what all ranks of a node share.

    Attributes:
        memory: bytes that a rank may use; device and host are one.
        disk: free bytes of the disk that ``ranks`` share.
        ranks: of a node.
        read: bytes per second of the disk when it only reads.
        mixed: bytes per second, read and written together, when it does both.
        update: elements per second that one rank steps while all do.
        send: bytes per second that one rank receives in a gather.
    """

    memory: float
    disk: float
    ranks: int
    read: float
    mixed: float
    update: float
    send: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} of a machine: {value:g}, expected more than 0")


@dataclass(frozen=True)
class Planned:
    """One setting on a machine; seconds are of a step after the first.

    Attributes:
        nbytes: of a rank, where they lie.
        fits: whether memory and disk are enough; activations are not in it.
        computing: forward and backward, with sending and reading of parameters.
        stepping: the optimizer's step.
        first: the optimizer's step the first time.
        moved: bytes that a rank reads and writes in a step.
    """

    nbytes: Offloaded
    fits: bool
    computing: float
    stepping: float
    first: float
    moved: float

    @property
    def seconds(self) -> float:
        """Of a step, with forward and backward."""
        return self.computing + self.stepping


def plan(
    config: Config, model: Model, machine: Machine, *, num_ranks: int, compute: float
) -> Planned:
    """Return what a configuration needs and takes.

    Args:
        config: its offload is what is planned.
        model: its sizes.
        machine: rates.
        num_ranks: N, a multiple of the machine's ranks.
        compute: seconds that a rank computes forward and backward, without any gather.

    Raises:
        ValueError: numbers that do not divide.
    """
    found = estimate(config, model, num_ranks=num_ranks, ranks_per_node=machine.ranks)
    nbytes = offloaded(config, model, found, num_ranks=num_ranks)
    shard = model.itemsize * model.numel / num_ranks
    num_gathers = 2 if config.stage == 3 else 1
    sent = (num_gathers + 1) * (model.itemsize * model.numel - shard)
    computing = compute + sent / machine.send
    read = 0.0
    if config.offload_params == "nvme":
        read = num_gathers * shard
        seconds = read * machine.ranks / machine.read
        computing = max(computing, seconds) if config.prefetch else computing + seconds
    values = WIDE_NBYTES * model.numel / num_ranks
    states = model.states * values
    written = shard if config.offload_params == "nvme" else 0.0
    first = written
    if config.offload_optimizer == "nvme":
        first += values + values + states
        written += 2 * (values + states)
    update = model.numel / (num_ranks if config.stage else 1) / machine.update
    of_disk = machine.ranks / machine.mixed
    return Planned(
        nbytes,
        nbytes.memory <= machine.memory and nbytes.disk * machine.ranks <= machine.disk,
        computing,
        max(update, written * of_disk),
        max(update, first * of_disk),
        read + written,
    )


def plans(
    config: Config, model: Model, machine: Machine, *, num_ranks: int, compute: float
) -> dict[str, Planned]:
    """Return the plans of all settings that the stage can have."""
    found = {}
    for name, (optimizer, params) in SETTINGS.items():
        if (optimizer and not config.stage) or (params and config.stage < 3):
            continue
        path = "." if "nvme" in (optimizer, params) else None  # nothing is written
        asked = replace(config, offload_optimizer=optimizer, offload_params=params, nvme_path=path)
        found[name] = plan(asked, model, machine, num_ranks=num_ranks, compute=compute)
    return found


def choice(found: Mapping[str, Planned]) -> str | None:
    """Return the setting that fits and takes the least time; None where none fits."""
    fitting = [name for name, each in found.items() if each.fits]
    return min(fitting, key=lambda name: found[name].seconds, default=None)
