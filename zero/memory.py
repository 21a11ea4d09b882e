"""Bytes of model states: what one rank holds, and what the ZeRO paper says it should be.

Model states are parameters, gradients, float32 masters and the optimizer's states (arXiv
1910.02054, section 3.1). Counted are live tensors, each storage once. A reader must not assume that
temporary memory is in it: what exists only inside backward or step is counted only there. What is
on disk (offload) is no memory: the report counts it apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from zero.engine import engine_of


@dataclass(frozen=True)
class ModelStates:
    """Bytes that one rank holds.

    Attributes:
        parameters: of the parameters, or of the shard in stage 3.
        masters: float32 masters that have memory of their own.
        gradients: reduced, local and the memory that stays for them.
        optimizer: the optimizer's states.
        gathered: stage 3: whole units.
        secondary: the secondary partition.
    """

    parameters: int
    masters: int
    gradients: int
    optimizer: int
    gathered: int
    secondary: int

    @property
    def total(self) -> int:
        """The sum without the secondary partition, which the paper's formulas do not have."""
        return self.parameters + self.masters + self.gradients + self.optimizer + self.gathered


def model_state_nbytes(model: nn.Module, optimizer: Optimizer) -> ModelStates:
    """Count the bytes of the model states that this rank holds now.

    Compare the total, between the last backward and the step, with :func:`expected_nbytes`.
    """
    engine = engine_of(model)
    buffers = [buffer for unit in engine.units for buffer in unit.buffers]
    masters = [master.tensor for buffer in buffers for master in buffer.masters]
    in_memory = [m.tensor for b in buffers if b.columns is None for m in b.masters]
    sharded = engine.gathering.sharded
    seen: set[int] = set()
    parameters = _nbytes((b.shard if sharded else b.full for b in buffers), seen)
    gathered = _nbytes((b.full for b in buffers), seen)
    gradients = [b.local for b in buffers] + [b.home for b in buffers]
    gradients += [tensor.grad for tensor in masters]
    gradients += engine.reducer.slices.held
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    secondary = engine.gathering.secondary
    return ModelStates(
        parameters=parameters,
        masters=_nbytes(in_memory, seen),
        gradients=_nbytes(gradients, seen),
        optimizer=_nbytes(states, seen),
        gathered=gathered,
        secondary=0 if secondary is None else secondary.nbytes,
    )


@dataclass(frozen=True)
class Report:
    """Bytes that one rank holds now, all that zero knows of.

    Attributes:
        states: the model states.
        waiting: ``accumulate="node"``: sums of a node that wait for the step; in ``states`` they
            count as gradients.
        residuals: ``grads_feedback``: what was lost between nodes.
        lent: units and gradients in temporary use.
        free: temporary memory that waits to be used again.
        peak: the most of it that was in use at one time.
        transfers: memory of what goes to and from the disk, in use or waiting to be.
        disk: of masters, states and shards that are on disk; no memory.
    """

    states: ModelStates
    waiting: int
    residuals: int
    lent: int
    free: int
    peak: int
    transfers: int = 0
    disk: int = 0

    @property
    def held(self) -> int:
        """Model states, secondary and residuals: compare ``zero.estimate.Estimate.held``."""
        return self.states.total - self.states.gathered + self.states.secondary + self.residuals

    def __str__(self) -> str:
        s = self.states
        rows = {
            "parameters": s.parameters,
            "gradients": s.gradients - self.waiting,
            "float32 masters": s.masters,
            "optimizer states": s.optimizer,
            "secondary (hpZ)": s.secondary,
            "sums of the node": self.waiting,
            "residuals": self.residuals,
            "held": self.held,
            "temporary, in use": self.lent,
            "temporary, free": self.free,
            "temporary, at most": self.peak,
        }
        if self.disk:
            rows |= {"buffers of the disk": self.transfers, "on disk": self.disk}
        return "\n".join(f"{name:<20}{nbytes / 1e6:>14,.3f} MB" for name, nbytes in rows.items())


def report(model: nn.Module, optimizer: Optimizer) -> Report:
    """Count the bytes that this rank holds now; ``print`` shows them in MB (10^6).

    Between the last backward and the step ``held`` is what ``zero.estimate`` computes, up to 255
    elements a unit, and slots that start at multiples of 64 bytes.
    """
    engine = engine_of(model)
    pools = engine.gathering.pool, engine.reducer.pool
    hops = engine.reducer.hops
    return Report(
        states=model_state_nbytes(model, optimizer),
        waiting=sum(tensor.nbytes for tensor in engine.reducer.slices.held),
        residuals=0 if hops is None else hops.residual_nbytes,
        lent=sum(pool.lent_nbytes for pool in pools),
        free=sum(pool.free_nbytes for pool in pools),
        peak=sum(pool.peak_nbytes for pool in pools),
        transfers=0 if engine.offload is None else engine.offload.transfers_nbytes,
        disk=sum(buffer.disk_nbytes for unit in engine.units for buffer in unit.buffers),
    )


def _nbytes(tensors: Iterable[Tensor | None], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if tensor is None or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def expected_nbytes(numel: int, stage: int, num_ranks: int, *, states: int = 2) -> float:
    """Return the paper's bytes of model states per rank, for 16-bit parameters.

    With Ψ = ``numel`` and Adam's two states: 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N in stages 0-3
    (arXiv 1910.02054, figure 1).

    Args:
        numel: elements of all parameters.
        stage: of ZeRO.
        num_ranks: N.
        states: float32 values that the optimizer keeps per element.
    """
    stepped = 4 + 4 * states
    replicated = {0: 4 + stepped, 1: 4, 2: 2, 3: 0}[stage]
    return numel * (replicated + (4 + stepped - replicated) / num_ranks)
