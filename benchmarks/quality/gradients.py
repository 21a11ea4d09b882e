"""Errors of reduced gradients, free of the noise of training: codecs on one set of gradients.

1. The run of ``exact`` with seed 0 is trained to its middle, and the gradients of every rank before
   their reduction are kept for some steps more.
2. With each codec setting zero reduces these same gradients, one step after the other, so that
   feedback has a past. ``grad_dtype=float32``: no rounding of the mean hides an error.
3. What arrives is compared with the mean in float64.

Errors are ‖found − mean‖ / ‖mean‖ over all parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import zcomm
import zero
from benchmarks.quality.plan import EXACT, NODES, NUM_RANKS, Plan, Texts
from benchmarks.quality.train import Training
from zcomm import Communicator

BETA = 0.9
"""Of the moving average that Adam steps by."""

_HADAMARD = "int4:transform=hadamard"
_INT8 = "int8:block=256"


@dataclass(frozen=True)
class Reduction:
    """How gradients travel: codecs inside a node and between nodes."""

    name: str
    inside: str | None
    between: str | None
    feedback: bool = False

    @property
    def config(self) -> zero.Config:
        """The configuration; gradients take the same path in every stage."""
        return zero.Config(
            stage=0,
            grads=(self.inside, self.between),
            grads_feedback=self.feedback,
            grad_dtype=torch.float32,
            min_numel=0,
        )


PAPER = Reduction("int4, int4 (zeropp)", "int4", "int4")
SAFE4 = Reduction("safe4", _INT8, "int4:block=128,transform=hadamard", feedback=True)
REDUCTIONS = (
    Reduction("none", None, None),
    PAPER,
    Reduction("int4, int4, feedback", "int4", "int4", feedback=True),
    Reduction("int4, int4, stochastic", *["int4:rounding=stochastic"] * 2),
    Reduction("int4, int4, hadamard", _HADAMARD, _HADAMARD),
    Reduction("int8, int4", _INT8, "int4"),
    Reduction("int8, int4, stochastic", _INT8, "int4:rounding=stochastic"),
    Reduction("int8, int4, feedback", _INT8, "int4", feedback=True),
    Reduction("int8, int4, hadamard", _INT8, _HADAMARD),
    SAFE4,
    Reduction("int8, int8", _INT8, _INT8),
    Reduction("int8, int8, feedback", _INT8, _INT8, feedback=True),
    Reduction("fp8_e4m3, fp8_e4m3", "fp8_e4m3", "fp8_e4m3"),
    Reduction("fp8_e5m2, fp8_e5m2", "fp8_e5m2", "fp8_e5m2"),
)

Unit = list[Tensor]
"""The gradients of the parameters of one unit."""

Captured = list[list[list[Unit]]]
"""By rank, step and unit."""


@dataclass(frozen=True)
class Errors:
    """What a reduction did to the gradients of all steps.

    Attributes:
        name: of the reduction.
        relative: the error of a step's gradient, root mean square over steps.
        cosine: between a step's gradient and the mean, averaged over steps.
        moving: the error of the moving average with :data:`BETA` after the last step.
        total: the error of the sum over steps.
    """

    name: str
    relative: float
    cosine: float
    moving: float
    total: float


def capture(plan: Plan, texts: Texts, *, after: int, count: int) -> tuple[Captured, list[float]]:
    """Train ``after`` steps of ``exact`` with seed 0; keep the gradients of ``count`` more.

    Returns them, as autograd leaves them on each rank, and the losses of all steps.
    """

    def on_rank(comm: Communicator) -> tuple[list[list[Unit]], list[float]]:
        training = Training(comm, plan, EXACT, texts, seed=0)
        losses = [training.step(step) for step in range(after)]
        kept: dict[str, Tensor] = {}

        def keep(name: str, gradient: Tensor) -> None:
            kept[name] = gradient.clone()

        for name, parameter in training.model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: keep(name, gradient))
        steps = []
        for step in range(after, after + count):
            losses.append(training.step(step))
            steps.append(_by_unit(kept))
        return steps, losses

    found = zcomm.run_local(on_rank, NUM_RANKS, EXACT.topology)
    return [steps for steps, _ in found], found[0][1]


def _by_unit(gradients: dict[str, Tensor]) -> list[Unit]:
    """Put the gradients of each block together, and those of the rest."""
    units: dict[str, Unit] = {}
    for name in sorted(gradients):
        parts = name.split(".")
        units.setdefault(parts[1] if parts[0] == "blocks" else "", []).append(gradients[name])
    return list(units.values())


class _Held(nn.Module):
    """Parameters whose gradient is what it is called with."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.zeros_like(gradient) for gradient in unit)

    def forward(self, unit: Unit) -> Tensor:
        products = (p.float() * g.float() for p, g in zip(self.values, unit, strict=True))
        return torch.stack([product.sum() for product in products]).sum()


class _Replay(nn.Module):
    """A model with the units of the captured one."""

    def __init__(self, units: list[Unit]) -> None:
        super().__init__()
        self.units = nn.ModuleList(map(_Held, units))

    def forward(self, units: list[Unit]) -> Tensor:
        pairs = zip(self.units, units, strict=True)
        return torch.stack([held(unit) for held, unit in pairs]).sum()


def reduced(reduction: Reduction, captured: Captured) -> list[Tensor]:
    """Let zero reduce the gradients of all steps; returns the means, one 1-D tensor a step."""

    def on_rank(comm: Communicator) -> list[Tensor]:
        steps = captured[comm.rank]
        model = _Replay(steps[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        zero.shard(model, optimizer, reduction.config, comm=comm)
        found = []
        for units in steps:
            model(units).backward()
            with zero.full_grads(model):
                found.append(torch.cat([_gradient(p).reshape(-1) for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
        return found

    return zcomm.run_local(on_rank, NUM_RANKS, NODES)[0]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def means(captured: Captured) -> list[Tensor]:
    """Return the means over the ranks in float64, one 1-D tensor a step."""
    return [
        torch.stack([_flat(units).double() for units in ranks]).mean(0)
        for ranks in zip(*captured, strict=True)
    ]


def _flat(units: list[Unit]) -> Tensor:
    return torch.cat([gradient.reshape(-1) for unit in units for gradient in unit])


def errors(name: str, found: Sequence[Tensor], exact: Sequence[Tensor]) -> Errors:
    """Compare the gradients of all steps in float64."""
    wide = [gradient.double() for gradient in found]
    pairs = list(zip(wide, exact, strict=True))
    relative = torch.stack([_relative(a, b) for a, b in pairs])
    cosine = torch.stack([a @ b / (a.norm() * b.norm()) for a, b in pairs])
    return Errors(
        name,
        float(relative.square().mean().sqrt()),
        float(cosine.mean()),
        float(_relative(_moving(wide), _moving(exact))),
        float(_relative(torch.stack(wide).sum(0), torch.stack(list(exact)).sum(0))),
    )


def _relative(found: Tensor, exact: Tensor) -> Tensor:
    return (found - exact).norm() / exact.norm()


def _moving(gradients: Sequence[Tensor]) -> Tensor:
    average = torch.zeros_like(gradients[0])
    for gradient in gradients:
        average = BETA * average + (1 - BETA) * gradient
    return average


def measure(captured: Captured, reductions: Sequence[Reduction] = REDUCTIONS) -> Iterator[Errors]:
    """Yield the errors of each reduction."""
    exact = means(captured)
    for reduction in reductions:
        yield errors(reduction.name, reduced(reduction, captured), exact)
