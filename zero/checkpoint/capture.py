"""What a rank puts into a checkpoint: copies of its runs, and facts as JSON.

Words defined here:

- **kind** of a tensor: ``value`` (of a parameter: float32 where the optimizer steps it, else in
  its dtype), ``published`` (stages 1 and 2 with a codec: what all ranks compute with), ``grad``
  (reduced, not yet stepped), ``state.NAME`` (of the optimizer).
- **part**: what one rank says in the index: its runs, kinds, states that are numbers, and what its
  providers hold.

- **deferred** tensor: one that is on disk (offload) until it is written.

A tensor's key in a file is ``kind|parameter|offset``: the elements of a parameter from an offset
on, in its memory order, so that any other cut can be read from it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.checkpoint.deferred import Deferred, Source, load_all
from zero.checkpoint.plain import encode
from zero.engine import Engine
from zero.layout import Run, dtype_name
from zero.offload.disk import VALUE, Columns
from zero.offload.opened import on_disk
from zero.places import HOST, is_away
from zero.unit import Buffer, Master, Unit, split


@dataclass(frozen=True)
class Captured:
    """One rank's share of a checkpoint; copies do not change when training goes on."""

    tensors: dict[str, Tensor | Deferred]
    part: dict[str, Any]


def key_of(kind: str, name: str, offset: int) -> str:
    """Return the name of a tensor in a file."""
    return f"{kind}|{name}|{offset}"


def held_runs(buffer: Buffer) -> dict[Run, Tensor | Deferred]:
    """Return this rank's runs as parameters' values, views of the shard or the whole buffer."""
    if buffer.stored is not None:
        source = Source(partial(_stored_runs, buffer))
        dtype = buffer.layout.dtype
        return {r: Deferred(dtype, r.numel, source, i) for i, r in enumerate(buffer.runs)}
    if buffer.shard is not None:
        return dict(zip(buffer.runs, split(buffer.shard, buffer.runs), strict=True))
    assert buffer.full is not None
    return {run: buffer.run_view(buffer.full, run) for run in buffer.runs}


def _stored_runs(buffer: Buffer) -> list[Tensor]:
    return split(buffer.load_shard(), buffer.runs)


def is_decoded(engine: Engine, unit: Unit) -> bool:
    """Tell whether held values went through a codec, so that masters do not tell them."""
    return _publishes(engine) and not engine.publisher.is_exact(unit)


def _publishes(engine: Engine) -> bool:
    return engine.config.stage in (1, 2) or engine.config.secondary == "persistent"


def capture(engine: Engine, optimizer: Optimizer, *, copy: bool) -> Captured:
    """Take what this rank owns, but for the model's buffers.

    Args:
        engine: of the model.
        optimizer: sharded with it.
        copy: whether training goes on before it is written.

    Raises:
        TypeError: a state of the optimizer or a provider that cannot be saved.
    """
    tensors: dict[str, Tensor | Deferred] = {}
    seen: set[int] = set()
    part: dict[str, Any] = {"runs": {}, "kinds": {}, "scalars": {}}
    part["groups"] = groups_of_parameters(engine, optimizer)
    for unit in engine.units:
        for buffer in unit.buffers:
            kinds = _kinds_of_masters(optimizer, buffer)
            for run, held in held_runs(buffer).items():
                found, scalars = kinds.get(run, ({"value": held}, {}))
                if is_decoded(engine, unit):
                    found["published"] = held
                name = buffer.layout.slots[run.slot].name
                part["runs"].setdefault(name, []).append([run.offset, run.numel])
                part["kinds"][name] = sorted(found)
                if scalars:
                    part["scalars"][name] = scalars
                for kind, tensor in found.items():
                    tensors[key_of(kind, name, run.offset)] = _taken(tensor, copy, seen)
    if copy:
        load_all(tensors)
    _capture_providers(engine, tensors, part)
    part["random"] = encode(random_state(), "random state")
    return Captured(tensors, part)


def _taken(tensor: Tensor | Deferred, copy: bool, seen: set[int]) -> Tensor | Deferred:
    if isinstance(tensor, Deferred):
        return tensor
    # Two names of one memory cannot both be written as they are.
    shared = tensor.data_ptr() in seen
    seen.add(tensor.data_ptr())
    taken = tensor.detach()
    if is_away(taken.device):
        return taken.cpu()
    return taken.clone() if copy or shared else taken.contiguous()


def _kinds_of_masters(
    optimizer: Optimizer, buffer: Buffer
) -> dict[Run, tuple[dict[str, Tensor | Deferred], dict[str, Any]]]:
    """Return for the runs that this rank steps their tensors by kind, and states as numbers."""
    stored = {} if buffer.columns is None else _deferred(optimizer, buffer, buffer.columns)
    kinds = {}
    for master in buffer.own_masters():
        found, scalars = _kinds(optimizer, master)
        kinds[master.run] = found | stored.get(master.run, {}), scalars
    return kinds


def _deferred(
    optimizer: Optimizer, buffer: Buffer, columns: Columns
) -> dict[Run, dict[str, Tensor | Deferred]]:
    sources = {name: Source(partial(columns.load, name)) for name in columns.all_names()}
    return {
        master.run: {
            name: Deferred(columns.all_names()[name], master.run.numel, sources[name], index)
            for name in (VALUE, *on_disk(columns, index, master, optimizer.state))
        }
        for index, master in enumerate(buffer.masters)
    }


def _kinds(
    optimizer: Optimizer, master: Master
) -> tuple[dict[str, Tensor | Deferred], dict[str, Any]]:
    found: dict[str, Tensor | Deferred] = {"value": master.tensor}
    scalars = {}
    if master.tensor.grad is not None:
        found["grad"] = master.tensor.grad
    for key, value in optimizer.state.get(master.tensor, {}).items():
        if isinstance(value, Tensor) and value.dim():
            if value.shape != master.tensor.shape:
                raise TypeError(
                    f"optimizer state {key} has shape {tuple(value.shape)}, its parameter's run"
                    f" {tuple(master.tensor.shape)}: only states of one value per element, or one"
                    " number, can be saved"
                )
            found[f"state.{key}"] = value
        else:
            scalars[key] = encode(value, f"optimizer state {key}")
    return found, scalars


def capture_buffers(engine: Engine, model: nn.Module, captured: Captured) -> None:
    """Copy the model's buffers: rank 0 all, the others those that differ. A collective."""
    buffers = dict(model.named_buffers())
    digests = [_digest(tensor) for tensor in buffers.values()]
    rows = engine.comm.all_gather_values(np.array(digests, np.int64))
    for index, (name, tensor) in enumerate(buffers.items()):
        if engine.comm.rank == 0 or rows[engine.comm.rank, index] != rows[0, index]:
            values = tensor.detach().contiguous()
            captured.tensors[key_of("buffer", name, 0)] = values.to(HOST, copy=True)


def _digest(tensor: Tensor) -> int:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(data.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _capture_providers(
    engine: Engine, tensors: dict[str, Tensor | Deferred], part: dict[str, Any]
) -> None:
    part["providers"] = {}
    for provider, owner in engine.providers.items():
        plain = part["providers"][provider] = {}
        for key, value in owner.save_state().items():
            if isinstance(value, Tensor) and value.dim():
                tensors[key_of(f"provider.{provider}", key, 0)] = value.detach().to(HOST, copy=True)
            else:
                plain[key] = encode(value, f"{provider}: {key}")


def random_state() -> dict[str, Any]:
    """Return the state of the generators of torch, NumPy and Python."""
    return {
        "torch": torch.get_rng_state().numpy(),
        "cuda": [state.numpy() for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
        "numpy": np.random.get_state(),  # noqa: NPY002  # the global one is what programs use
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put :func:`random_state` back."""
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.from_numpy(entry) for entry in state["cuda"]])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])


def describe(engine: Engine, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return what all ranks say alike: parameters, buffers, groups, the plan.

    Raises:
        TypeError: a setting of a group that is not plain.
        ValueError: a state dict with entries that are neither parameters nor buffers.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameters = {}
    groups = [_group(group) for group in optimizer.param_groups]
    for unit in engine.units:
        for buffer in unit.buffers:
            for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True):
                parameters[slot.name] = {
                    "shape": list(slot.shape),
                    "stride": list(slot.stride),
                    "dtype": dtype_name(buffer.layout.dtype),
                    "trainable": slot.trainable,
                    "names": names[id(parameter)],
                }
    buffers = {
        name: {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}
        for name, tensor in model.named_buffers()
    }
    return {
        "parameters": parameters,
        "buffers": buffers,
        "state_names": _state_names(model, names),
        "optimizer": type(optimizer).__name__,
        "groups": groups,
        "topology": engine.comm.topology.to_json(),
        "num_ranks": engine.comm.size,
        "config": repr(engine.config),
        "plan": plan_digest(engine),
        "published": published(engine),
    }


def groups_of_parameters(engine: Engine, optimizer: Optimizer) -> dict[str, int]:
    """Return the number of the group of each parameter of which this rank steps a run."""
    numbers = {
        id(tensor): i for i, g in enumerate(optimizer.param_groups) for tensor in g["params"]
    }
    return {
        buffer.layout.slots[master.run.slot].name: numbers[id(master.tensor)]
        for unit in engine.units
        for buffer in unit.buffers
        for master in buffer.own_masters()
    }


def published(engine: Engine) -> str | None:
    """Return the codec through which held values went, or differences to them."""
    codec = engine.config.weights_codec
    if codec is None or not _publishes(engine):
        return None
    return f"{codec} of differences" if engine.config.stage == 3 else str(codec)


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: encode(value, f"setting {key} of a parameter group")
        for key, value in group.items()
        if key != "params"
    }


def _state_names(model: nn.Module, names: Mapping[int, list[str]]) -> list[str]:
    known = {name for group in names.values() for name in group}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    found = list(model.state_dict(keep_vars=True))
    foreign = [name for name in found if name not in known]
    if foreign:
        raise ValueError(
            f"the state dict of the model has {foreign}: only parameters and buffers can be saved"
        )
    return found


# Fields of Config on which no bit depends.
_NO_BITS = (
    "max_skipped_steps",
    "prefetch",
    "offload_optimizer",
    "offload_params",
    "nvme_path",
    "offload_numel",
)


def plan_digest(engine: Engine) -> str:
    """Return a digest of all that decides who owns what and how it travels."""
    config = {k: v for k, v in vars(engine.config).items() if k not in _NO_BITS}
    layouts = [(u.name, u.quantise, [b.layout for b in u.buffers]) for u in engine.units]
    facts = (engine.comm.topology.to_json(), sorted(config.items()), layouts)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
