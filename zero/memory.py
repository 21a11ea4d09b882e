"""Bytes of model states: what one rank holds, and what the ZeRO paper says it should be.

Model states are parameters, gradients, float32 masters and the optimizer's states (arXiv
1910.02054, section 3.1). Counted are live tensors, each storage once. A reader must not assume that
temporary memory is in it: what exists only inside backward or step is counted only there.
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
    sharded = engine.gathering.sharded
    seen: set[int] = set()
    parameters = _nbytes((b.shard if sharded else b.full for b in buffers), seen)
    gathered = _nbytes((b.full for b in buffers), seen)
    gradients = [b.local for b in buffers] + [b.home for b in buffers]
    gradients += [tensor.grad for tensor in masters]
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    secondary = engine.gathering.secondary
    return ModelStates(
        parameters=parameters,
        masters=_nbytes(masters, seen),
        gradients=_nbytes(gradients, seen),
        optimizer=_nbytes(states, seen),
        gathered=gathered,
        secondary=0 if secondary is None else secondary.nbytes,
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
