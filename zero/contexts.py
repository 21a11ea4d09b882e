"""What users call around the loop: full_params, full_grads, no_sync, clip_grad_norm_."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.edits import absorb, snapshot
from zero.engine import Engine, engine_of
from zero.offload.told import told
from zero.optimizer import gather_gradients, slots_with_gradient
from zero.reduce import any_rank
from zero.unit import Buffer, Unit


@contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """Make all parameters whole; edits made inside, on all ranks alike, are kept.

    A collective: all ranks enter and leave. Forward and backward work inside. Only elements whose
    bits were changed are taken from the parameters; the others keep their float32 master. An
    exception that leaves the context may lose edits: ranks cannot agree on them then.

    Example:
        >>> with zero.full_params(model):
        ...     torch.save(model.state_dict(), path)
    """
    engine = engine_of(model)
    gathering = engine.gathering
    if gathering.kept:
        yield
        return
    for unit in engine.units:
        gathering.gather(unit, hint=False)
    engine.stepper.take_seen_edits()
    before = {
        buffer: snapshot(buffer)
        for unit in engine.units
        if not engine.publisher.is_exact(unit)
        for buffer in unit.buffers
    }
    gathering.kept += 1
    try:
        yield
        _take_edits(engine, before)
    finally:
        gathering.kept -= 1
        for unit in engine.units:
            if unit.depth == 0:
                gathering.reshard(unit)


def _take_edits(engine: Engine, before: dict[Buffer, list[Tensor]]) -> None:
    edited = []
    with told(engine.comm, engine.faults):
        for unit in engine.units:
            exact = engine.publisher.is_exact(unit)
            found = [absorb(b, exact=exact, before=before.get(b)) for b in unit.buffers]
            edited.append(any(found))
        # An owner sees only edits of its own runs, but versions move on all ranks.
        moved_anywhere = any_rank(engine.comm, edited)
    for unit, moved in zip(engine.units, moved_anywhere, strict=True):
        if moved:
            _move(engine, unit)


def _move(engine: Engine, unit: Unit) -> None:
    if engine.publisher.is_exact(unit) or engine.gathering.sharded:
        unit.note_edit()
    else:
        engine.publisher.publish(unit)


@contextmanager
def full_grads(model: nn.Module) -> Iterator[None]:
    """Gather the reduced gradients into ``p.grad`` of all parameters; edits inside are kept.

    A collective: all ranks enter and leave, and edit alike. ``p.grad`` is None where no rank had a
    gradient; it has the shape of ``p``, the dtype that ``Config.grad_dtype`` says and the
    loss scale in it.
    """
    engine = engine_of(model)
    engine.reducer.round()
    for unit in engine.units:
        fulls = gather_gradients(engine.comm, engine.reducer, unit)
        for buffer, full in zip(unit.trainable, fulls, strict=True):
            present = any_rank(engine.comm, slots_with_gradient(buffer))
            for index, parameter in enumerate(buffer.parameters):
                if present[index]:
                    parameter.grad_dtype = None
                    parameter.grad = buffer.gradient_view(full, index)
    try:
        yield
    finally:
        for unit in engine.units:
            for buffer in unit.trainable:
                _return_gradients(buffer)


def _return_gradients(buffer: Buffer) -> None:
    for master in buffer.own_masters():
        slot = buffer.layout.slots[master.run.slot]
        grad = buffer.parameters[master.run.slot].grad
        if grad is None:
            master.tensor.grad = None
            continue
        flat = torch.empty(slot.numel, dtype=grad.dtype, device=grad.device)
        flat.as_strided(slot.shape, slot.stride).copy_(grad)
        part = flat[master.run.offset : master.run.offset + master.run.numel]
        if master.tensor.grad is None:
            master.tensor.grad = part.to(master.tensor.device, copy=True)
        else:
            master.tensor.grad.copy_(part)
    for parameter in buffer.parameters:
        parameter.grad = None


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients on each rank, in float32, without communication.

    The first backward outside reduces the sum. All ranks use it alike.
    """
    reducer = engine_of(model).reducer
    before, reducer.synchronise = reducer.synchronise, False
    try:
        yield
    finally:
        reducer.synchronise = before


def clip_grad_norm_(optimizer: Optimizer, max_norm: float) -> Tensor:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``.

    A collective, to be called between the last backward and the step. Gradients that are not finite
    are left alone: the step will be skipped.

    Returns:
        The norm before, a float64 scalar, the same on all ranks and in all stages.

    Raises:
        ValueError: when ``max_norm`` is negative or NaN.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm {max_norm}: expected a number that is not negative")
    stepper = engine_of(optimizer).stepper
    norm = stepper.norm()
    scale = max_norm / (norm + 1e-6)
    if math.isfinite(norm) and scale < 1:
        for grad in stepper.own_gradients():
            grad.mul_(scale)
    return torch.tensor(norm, dtype=torch.float64, device="cpu")


def scale_loss(optimizer: Optimizer, loss: Tensor) -> Tensor:
    """Multiply a loss by the loss scale; 16-bit losses become float32.

    Example:
        >>> zero.scale_loss(optimizer, model(x)).backward()
        >>> zero.clip_grad_norm_(optimizer, 1.0)  # of gradients without the scale
        >>> optimizer.step()
    """
    scale = loss_scale(optimizer)
    if scale == 1:
        return loss
    wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
    return wide * scale


def loss_scale(optimizer: Optimizer) -> float:
    """Return what the next loss has to be multiplied by; the same on all ranks."""
    return engine_of(optimizer).stepper.scaler.scale


def step_was_skipped(optimizer: Optimizer) -> bool:
    """Tell whether the last step was skipped, on all ranks, as a gradient was not finite."""
    return engine_of(optimizer).stepper.skipped


def num_skipped_steps(optimizer: Optimizer) -> int:
    """Return how many steps were skipped because a gradient was not finite."""
    return engine_of(optimizer).stepper.num_skipped
