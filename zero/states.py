"""From the optimizer's parameters to masters: groups and states that exist are cut with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.layout import Slot
from zero.places import HOST, is_away
from zero.unit import Master, Unit


def replace_parameters(optimizer: Optimizer, units: tuple[Unit, ...]) -> None:
    """Put the masters in the place of their parameters, in groups and in the state.

    Groups keep their settings and identity. A master's state is the part of the parameter's state
    that belongs to its run; what is a scalar (a step count) is copied.
    """
    places = {
        parameter: (buffer, index)
        for unit in units
        for buffer in unit.buffers
        for index, parameter in enumerate(buffer.parameters)
    }
    counts = _scalar_states(optimizer)
    for group in optimizer.param_groups:
        masters: list[Tensor] = []
        for parameter in group["params"]:
            buffer, index = places[parameter]
            old = optimizer.state.pop(parameter, {})
            for master in buffer.masters:
                if master.run.slot == index:
                    masters.append(master.tensor)
                    if old:
                        state = _cut_state(buffer.layout.slots[index], master, old, counts, group)
                        optimizer.state[master.tensor] = state
        group["params"] = masters


def _scalar_states(optimizer: Optimizer) -> set[str]:
    """Return the names of states that are one number per parameter, whatever its shape."""
    found = {"step"}
    for parameter, state in optimizer.state.items():
        if parameter.dim():
            found |= {k for k, v in state.items() if isinstance(v, Tensor) and v.dim() == 0}
    return found


def _cut_state(
    slot: Slot, master: Master, old: Mapping[str, Any], counts: set[str], group: Mapping[str, Any]
) -> dict[str, Any]:
    state = {}
    for key, value in old.items():
        if isinstance(value, Tensor) and value.is_meta:
            # Adagrad's constructor makes its states, and for a meta model those have no memory.
            if key in counts:
                state[key] = torch.zeros((), dtype=value.dtype, device="cpu")
            else:
                first = group["initial_accumulator_value"]
                rounded = float(torch.tensor(first, dtype=value.dtype, device="cpu"))
                state[key] = torch.full_like(master.tensor, rounded, dtype=torch.float32)
            continue
        if not isinstance(value, Tensor) or key in counts:
            state[key] = placed(value, master.tensor, group)
        else:
            flat = in_memory_order(value, slot)
            part = flat[master.run.offset : master.run.offset + master.run.numel]
            # 16-bit parameters have 16-bit states, their masters float32 ones.
            state[key] = part.to(torch.float32) if value.is_floating_point() else part
            state[key] = state[key].to(master.tensor.device, copy=True)
    return state


def placed(value: Any, master: Tensor, group: Mapping[str, Any], before: object = None) -> Any:
    """Return a copy of a master's state where the optimizer looks for it.

    Numbers stay where the optimizer had them, now or ``before``; but steps that torch runs on a
    device alone have them on it.
    """
    if not isinstance(value, Tensor):
        return value
    was_there = any(isinstance(x, Tensor) and is_away(x.device) for x in (value, before))
    moves = value.dim() or was_there or group.get("fused") or group.get("capturable")
    return value.to(master.device if moves else HOST, copy=True)


def in_memory_order(value: Tensor, slot: Slot) -> Tensor:
    """Return the elements of a tensor of the slot's shape as the slot orders them, 1-D."""
    flat = torch.empty(slot.numel, dtype=value.dtype, device=value.device)
    flat.as_strided(slot.shape, slot.stride).copy_(value)
    return flat


def trained_parameters(optimizer: Optimizer, model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters in the optimizer's groups.

    Raises:
        ValueError: when one is not a parameter of the model, or has a state that cannot be cut.
    """
    known = {id(parameter) for parameter in model.parameters()}
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    foreign = [tuple(parameter.shape) for parameter in trained if id(parameter) not in known]
    if foreign:
        raise ValueError(f"the optimizer has parameters that the model has not, shapes {foreign}")
    knows_firsts = isinstance(optimizer, torch.optim.Adagrad)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.is_meta and not knows_firsts:
                raise ValueError(
                    f"optimizer state {key} of {name} is on the meta device, so it has no values:"
                    f" {type(optimizer).__name__} has to make its states in a step"
                )
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise ValueError(
                    f"optimizer state {key} of {name} has shape {tuple(value.shape)}, the parameter"
                    f" {tuple(parameter.shape)}: only states of the parameter's shape can be cut"
                )
    return trained
