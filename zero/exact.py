"""Whole parameters as the optimizer has them: of no codec, unit by unit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zero.engine import Engine, engine_of
from zero.offload.told import told
from zero.unit import Buffer, Unit, pack, split


def full_state_dict(
    model: nn.Module, *, root: int | None = None, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Return the state dict of a sharded model with whole, copied parameters.

    A collective. Units are gathered one after the other, without codecs: the values are those of
    the masters, in the parameters' dtype, not what receivers decode. Names and order are those of
    ``model.state_dict()``; names of one parameter (tied weights) share one tensor.

    Args:
        model: returned by ``zero.shard``.
        root: the rank that gets the state dict, {} on the others; None for all ranks.
        device: where the tensors are to be: "cpu" for a model that its GPU cannot hold whole. None:
            where the model is.

    Raises:
        ValueError: inside ``full_params``, where edits are not taken yet; a rank that is none.

    Example:
        >>> state = zero.full_state_dict(model, root=0)
        >>> if comm.rank == 0:
        ...     torch.save(state, path)
    """
    engine = engine_of(model)
    if engine.gathering.kept:
        raise ValueError("zero.full_state_dict inside full_params: use model.state_dict() there")
    if root is not None and not 0 <= root < engine.comm.size:
        raise ValueError(f"root {root}: possible are 0 to {engine.comm.size - 1}, and None")
    with told(engine.comm, engine.faults):
        engine.stepper.take_edits()
    wanted = root is None or root == engine.comm.rank
    whole: dict[int, Tensor] = {}
    for unit in engine.units:
        for buffer, full in zip(unit.buffers, gather_exact(engine, unit), strict=True):
            if wanted:
                for index, parameter in enumerate(buffer.parameters):
                    # Not a view: it would keep the other parameters' memory.
                    whole[id(parameter)] = _copied(buffer.slot_view(full, index), device)
    if not wanted:
        return {}
    return {
        name: whole[id(tensor)] if id(tensor) in whole else _copied(tensor.detach(), device)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def _copied(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    return tensor.clone() if device is None else tensor.to(device, copy=True)


def gather_exact(engine: Engine, unit: Unit) -> list[Tensor]:
    """Gather a unit's parameters as their owners have them, into new memory. A collective."""
    fulls = [
        torch.zeros(b.layout.numel, dtype=b.layout.dtype, device=b.device) for b in unit.buffers
    ]
    with told(engine.comm, engine.faults):
        shards = [exact_shard(buffer) for buffer in unit.buffers]
        if fulls:
            layouts = [buffer.layout.all for buffer in unit.buffers]
            engine.comm.gather_layout(shards, fulls, layouts, label=unit.label)
    return fulls


def exact_shard(buffer: Buffer) -> Tensor:
    """Return this rank's runs in the parameters' dtype; from the masters where there are any."""
    if buffer.is_cut:
        held = dict(zip(buffer.runs, split(buffer.load_shard(), buffer.runs), strict=True))
    else:
        assert buffer.full is not None
        held = {run: buffer.run_view(buffer.full, run) for run in buffer.runs}
    for master, value in zip(buffer.masters, buffer.load_masters(), strict=True):
        if master.owner == buffer.rank:
            held[master.run] = value
    return pack([held[run] for run in buffer.runs], buffer.layout.dtype, buffer.device)


def spread(engine: Engine, unit: Unit) -> None:
    """Stages 0-2: give every rank the runs that owners have put into the whole buffer."""
    shards, fulls = [], []
    for buffer in unit.buffers:
        assert buffer.full is not None
        runs = [buffer.run_view(buffer.full, run) for run in buffer.runs]
        shards.append(pack(runs, buffer.layout.dtype, buffer.device))
        fulls.append(buffer.full)
    if fulls:
        engine.comm.gather_layout(shards, fulls, [b.layout.all for b in unit.buffers])
