"""``zero.load``: each rank reads the elements that it owns, from whichever files hold them.

1. Rank i of W checks the files i, i + W, …; every rank checks that the checkpoint is of this model
   and optimizer. Nothing has changed when one of them raises.
2. Every rank reads its runs: values, states, gradients.
3. They are put in place; whole parameters follow from them as after a step.
4. What depends on the ranks (versions, local gradients, random state) is put back where ranks,
   topology and plan are those of then, and made anew, or refused, where they are not.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from zcomm.errors import CheckpointError
from zero.checkpoint.agree import together
from zero.checkpoint.capture import (
    groups_of_parameters,
    is_decoded,
    plan_digest,
    published,
    set_random_state,
)
from zero.checkpoint.files import Reader
from zero.checkpoint.index import Index
from zero.checkpoint.plain import decode
from zero.checkpoint.save import FORMAT, wait_for_pending
from zero.edits import note_versions
from zero.engine import Engine, engine_of_both
from zero.exact import spread
from zero.layout import Run, Slot, dtype_name
from zero.offload.told import agreed, told
from zero.places import HOST
from zero.states import placed
from zero.unit import Buffer, Master, Unit, split

logger = logging.getLogger("zcomm")


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint says beside the states.

    Attributes:
        step: given to ``zero.save``.
        extra: likewise.
        same_plan: whether ranks, topology, configuration and cut are those of the save, so that
            training goes on with the same bits.
    """

    step: int | None
    extra: Any
    same_plan: bool


@dataclass(frozen=True, eq=False)
class _Part:
    """What was read for one run, before it is put in place."""

    buffer: Buffer
    run: Run
    master: Master | None
    kinds: dict[str, Tensor]
    scalars: dict[str, Any]


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scheduler: Any = None,
    random_state: bool = True,
) -> Loaded:
    """Read a checkpoint into a sharded model and its optimizer.

    A collective, between a step and the next forward. The number of ranks, the topology, the stage,
    the codecs and the units may differ from those of the save. Where nothing differs, training goes
    on with the same bits. Files are checked before anything is changed. With states on disk
    (offload) a unit at a time is read and put in place.

    Args:
        path: the folder given to ``zero.save``.
        model: of the same parameters and buffers, sharded.
        optimizer: of the same class and groups.
        scheduler: gets the state that was saved.
        random_state: put back the state of each rank's generators (torch, NumPy, Python); with
            another number of ranks they stay as they are.

    Raises:
        CheckpointError: on all ranks: a file that is missing or was changed, a save that did not
            end, another model or optimizer. The message names the file, or the parameter.
        OffloadError: on all ranks, when the disk of one cannot hold what it is to.
        ValueError: inside ``full_params``, or a model and optimizer that do not belong together.
    """
    engine = engine_of_both(model, optimizer)
    if engine.gathering.kept:
        raise ValueError("zero.load inside full_params: leave it first")
    wait_for_pending(engine)
    comm = engine.comm
    with together(comm):
        index = Index.read(Path(path), FORMAT)
        _check(index, engine, model, optimizer, scheduler)
        index.verify(range(comm.rank, index.num_ranks, comm.size))
    same_plan = index.content["plan"] == plan_digest(engine)
    with Reader() as reader:
        streams = engine.offload is not None and engine.offload.drive is not None
        with together(comm):
            read = {u: [] if streams else _read(index, reader, engine, u) for u in engine.units}
            buffers = _read_buffers(index, reader, engine, model)
            _load_providers(index, reader, engine, same_plan)
        engine.gathering.forget()
        # First: how a group is stepped says where its states are.
        _load_groups(index, optimizer)
        with nullcontext() if engine.offload is None else engine.offload.faults.watch():
            for unit in engine.units:
                if streams:
                    with together(comm):
                        read[unit] = _read(index, reader, engine, unit)
                with told(comm):
                    _put(index, engine, optimizer, unit, read.pop(unit))
            if streams:
                agreed(comm)
        _put_buffers(model, buffers)
    engine.stepper.unfinished = False
    if scheduler is not None:
        scheduler.load_state_dict(decode(index.content["scheduler"]))
    if random_state:
        _load_random(index, engine)
    return Loaded(index.content["step"], decode(index.content["extra"]), same_plan)


def _check(
    index: Index, engine: Engine, model: nn.Module, optimizer: Optimizer, scheduler: Any
) -> None:
    where = index.path
    saved = index.parameters
    slots = {s.name: (s, b) for u in engine.units for b in u.buffers for s in b.layout.slots}
    _check_names(where, "parameter", saved, slots)
    for name, (slot, buffer) in slots.items():
        here = {
            "shape": list(slot.shape),
            "dtype": dtype_name(buffer.layout.dtype),
            "trainable": slot.trainable,
        }
        _check_entry(where, f"parameter {name}", saved[name], here)
    tensors = dict(model.named_buffers())
    _check_names(where, "buffer", index.content["buffers"], tensors)
    for name, tensor in tensors.items():
        here = {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}
        _check_entry(where, f"buffer {name}", index.content["buffers"][name], here)
    kind, wanted = type(optimizer).__name__, index.content["optimizer"]
    if kind != wanted:
        raise CheckpointError(f"{where} holds states of {wanted}, the optimizer is {kind}")
    num_groups = len(index.content["groups"])
    if num_groups != len(optimizer.param_groups):
        raise CheckpointError(
            f"{where} has {num_groups} parameter groups, the optimizer"
            f" {len(optimizer.param_groups)}"
        )
    for name, number in groups_of_parameters(engine, optimizer).items():
        if index.groups[name] != number:
            raise CheckpointError(
                f"parameter {name} is in group {index.groups[name]} of {where}, and in group"
                f" {number} of the optimizer"
            )
    if scheduler is not None and index.content["scheduler"] is None:
        raise CheckpointError(f"{where} was saved without a scheduler")


def _check_names(where: Path, what: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for text, names in (
        ("that the model has not", [n for n in saved if n not in here]),
        ("less than the model", [n for n in here if n not in saved]),
    ):
        if names:
            shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
            raise CheckpointError(f"{where} has {len(names)} {what}s {text}: {shown}")


def _check_entry(where: Path, what: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for key, value in here.items():
        if saved[key] != value:
            raise CheckpointError(
                f"{what} has {key} {saved[key]} in {where}, and {value} in the model"
            )


def _filled(engine: Engine, buffer: Buffer) -> list[Run]:
    """Return what this rank fills of a buffer: its runs; in stage 0 those of all ranks."""
    ranks = range(engine.comm.size) if engine.config.stage == 0 else (buffer.rank,)
    return [run for rank in ranks for run in buffer.layout.runs[rank]]


def _read(index: Index, reader: Reader, engine: Engine, unit: Unit) -> list[_Part]:
    parts = []
    for buffer in unit.buffers:
        masters = {master.run: master for master in buffer.masters}
        for run in _filled(engine, buffer):
            master = masters.get(run)
            slot = buffer.layout.slots[run.slot]
            wanted = [k for k in index.kinds[slot.name] if _is_wanted(k, buffer, master)]
            kinds = {kind: _slice(index, reader, slot, kind, run) for kind in wanted}
            scalars = {} if master is None else index.scalars.get(slot.name, {})
            parts.append(_Part(buffer, run, master, kinds, scalars))
    return parts


def _is_wanted(kind: str, buffer: Buffer, master: Master | None) -> bool:
    if kind == "grad":
        return master is not None and master.owner == buffer.rank
    return master is not None or kind in ("value", "published")


def _slice(index: Index, reader: Reader, slot: Slot, kind: str, run: Run) -> Tensor:
    return index.slice(reader, slot, kind, run.offset, run.numel)


@torch.no_grad()
def _put(
    index: Index, engine: Engine, optimizer: Optimizer, unit: Unit, parts: list[_Part]
) -> None:
    """Put states in place and make parameters of them. In stages 1 and 2 a collective."""
    as_then = index.content["published"] == published(engine)
    for buffer in unit.buffers:
        mine = [part for part in parts if part.buffer is buffer]
        shard = torch.empty(0, device=HOST)
        if buffer.is_cut:
            # On disk it is written whole.
            numel = sum(run.numel for run in buffer.runs)
            empty = torch.empty(numel, dtype=buffer.layout.dtype, device=HOST)
            shard = empty if buffer.shard is None else buffer.shard
            places = split(shard, buffer.runs)
        else:
            assert buffer.full is not None
            places = [buffer.run_view(buffer.full, part.run) for part in mine]
        for part, place in zip(mine, places, strict=True):
            value = part.kinds["value"]
            place.copy_(part.kinds.get("published", value) if as_then else value)
        buffer.store_shard(shard)
        _put_masters(engine, optimizer, buffer, [part for part in mine if part.master is not None])
    if engine.config.stage in (1, 2) and unit.buffers:
        _spread(engine, unit, as_then)
    if engine.config.stage < 3:
        for buffer in unit.buffers:
            increment_version(list(buffer.parameters))
            note_versions(buffer)


def _put_masters(
    engine: Engine, optimizer: Optimizer, buffer: Buffer, parts: Sequence[_Part]
) -> None:
    groups = {tensor: group for group in optimizer.param_groups for tensor in group["params"]}
    for part in parts:
        assert part.master is not None
        tensor = part.master.tensor
        if buffer.separate and buffer.columns is None:
            tensor.copy_(part.kinds["value"])
        # What was read may be a view of a mapped file.
        grad = part.kinds.get("grad")
        tensor.grad = None if grad is None else grad.to(tensor.device, copy=True)
        before = optimizer.state.pop(tensor, {})
        found = {k.removeprefix("state."): t for k, t in part.kinds.items() if _is_state(k)}
        if found or part.scalars:
            scalars = {key: decode(value) for key, value in part.scalars.items()}
            group = groups[tensor]
            optimizer.state[tensor] = {
                key: placed(value, tensor, group, before.get(key))
                for key, value in (found | scalars).items()
            }
    if buffer.columns is not None:
        buffer.store_masters([part.kinds["value"] for part in parts])
    if engine.offload is not None:
        engine.offload.take_states(optimizer, [buffer])


def _is_state(kind: str) -> bool:
    return kind.startswith("state.")


def _spread(engine: Engine, unit: Unit, as_then: bool) -> None:
    if is_decoded(engine, unit) and not as_then:
        engine.publisher.publish_first(unit)
    else:
        spread(engine, unit)


def _read_buffers(
    index: Index, reader: Reader, engine: Engine, model: nn.Module
) -> dict[str, Tensor]:
    rank = engine.comm.rank if index.num_ranks == engine.comm.size else 0
    return {name: index.buffer(reader, name, rank) for name, _ in model.named_buffers()}


@torch.no_grad()
def _put_buffers(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    for name, tensor in model.named_buffers():
        tensor.copy_(saved[name])


def _load_providers(index: Index, reader: Reader, engine: Engine, same_plan: bool) -> None:
    for name, provider in engine.providers.items():
        if same_plan:
            provider.load_state(index.provider(reader, name, engine.comm.rank))
        else:
            ranks = range(index.num_ranks)
            provider.load_foreign([index.plain_provider(name, rank) for rank in ranks])


def _load_groups(index: Index, optimizer: Optimizer) -> None:
    for group, saved in zip(optimizer.param_groups, index.content["groups"], strict=True):
        group.update({key: decode(value) for key, value in saved.items()})


def _load_random(index: Index, engine: Engine) -> None:
    if index.num_ranks != engine.comm.size:
        logger.info(
            "%s was saved by %d ranks, %d load it: the state of random generators stays",
            index.path,
            index.num_ranks,
            engine.comm.size,
        )
        return
    set_random_state(decode(index.part(engine.comm.rank)["random"]))
