"""``zero.load_pretrained``: weights from safetensors, each rank reading only what it owns."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from zcomm.errors import CheckpointError
from zero.checkpoint.agree import together
from zero.checkpoint.capture import is_decoded
from zero.checkpoint.files import Reader
from zero.edits import note_versions
from zero.engine import Engine, engine_of
from zero.exact import spread
from zero.layout import Run, Slot
from zero.states import in_memory_order
from zero.tiled import TiledLinear
from zero.unit import Buffer, Unit, split

SINGLE, MANY = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class _Part:
    """Rows and columns of a matrix in a file."""

    source: str
    rows: slice
    columns: slice


class Weights:
    """Named tensors in one or several safetensors files; parts of a matrix may have names, too."""

    def __init__(self, path: Path, reader: Reader) -> None:
        self.path = path
        self._reader = reader
        self._files = _files(path, reader)
        self._parts: dict[str, _Part] = {}

    def name_parts(self, source: str, places: Mapping[str, tuple[slice, slice]]) -> None:
        """Give names to the parts of a matrix; its own name is gone."""
        self._parts |= {name: _Part(source, *place) for name, place in places.items()}

    def find(self, names: Sequence[str]) -> str | None:
        """Return the first of a parameter's names that is there."""
        return next((n for n in names if n in self._files or n in self._parts), None)

    def others(self, names: set[str]) -> list[str]:
        """Return the names of tensors that are not among these."""
        sources = {part.source for part in self._parts.values()}
        return sorted(self._files.keys() - sources - names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        part = self._parts.get(name)
        if part is not None:
            return part.rows.stop - part.rows.start, part.columns.stop - part.columns.start
        return tuple(self._reader.file(self._files[name]).get_slice(name).get_shape())

    def whole(self, name: str) -> Tensor:
        """Return a whole tensor."""
        part = self._parts.get(name)
        if part is not None:
            return self._rows(name, 0, part.rows.stop - part.rows.start)
        return self._reader.tensor(self._files[name], name)

    def run(self, name: str, slot: Slot, run: Run) -> Tensor:
        """Return a run of a tensor; of a row-major one only the rows that it touches are read."""
        if not slot.shape or slot.stride != _row_major(slot.shape):
            flat = in_memory_order(self.whole(name), slot)
            return flat[run.offset : run.offset + run.numel]
        row = slot.numel // slot.shape[0]
        first, last = run.offset // row, -(-(run.offset + run.numel) // row)
        rows = self._rows(name, first, last).flatten()
        return rows[run.offset - first * row :][: run.numel]

    def _rows(self, name: str, first: int, last: int) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            return self._reader.part(self._files[name], name, first, last)
        start, file = part.rows.start, self._files[part.source]
        return self._reader.part(file, part.source, start + first, start + last)[:, part.columns]


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _files(path: Path, reader: Reader) -> dict[str, Path]:
    """Return the file of each tensor: of a file, or of a folder as transformers writes it."""
    if path.is_dir() and (path / MANY).is_file():
        try:
            index = json.loads((path / MANY).read_text(encoding="utf-8"))
            return {name: path / file for name, file in index["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path / MANY} cannot be read as an index: {error}") from error
    file = path / SINGLE if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, and there is no {MANY} beside it")
    return dict.fromkeys(reader.file(file).keys(), file)


def load_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True
) -> list[str]:
    """Read the parameters and buffers of a sharded model from safetensors.

    A collective. Each rank reads the rows that it owns; in stages 0-2 the ranks then exchange them.
    Values are rounded to the parameters' dtype. States of the optimizer stay as they are.

    Args:
        model: returned by ``zero.shard``.
        path: a file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``.
            Names are those of ``model.state_dict()``; one of several tied names is enough. Where
            the model has a ``TiledLinear``, the weight of an ``nn.Linear`` will do.
        strict: whether every parameter and persistent buffer must be there, and nothing else.

    Returns:
        The names that the model has and the files have not; empty when strict.

    Raises:
        CheckpointError: on all ranks, naming what is missing, damaged or of another shape.
        ValueError: inside ``full_params``.
    """
    engine = engine_of(model)
    if engine.gathering.kept:
        raise ValueError("zero.load_pretrained inside full_params: leave it first")
    engine.stepper.take_edits()
    with Reader() as reader:
        with together(engine.comm):
            weights = Weights(Path(path), reader)
            names, missing = match(weights, model, strict=strict)
            streams = engine.offload is not None and engine.offload.drive is not None
            read = {u: [] if streams else list(_read(weights, names, u)) for u in engine.units}
            buffers = {n: weights.whole(names[n]) for n, _ in model.named_buffers() if n in names}
        engine.gathering.forget()
        with torch.no_grad():
            for unit in engine.units:
                # What goes to the disk is read when it can be put there.
                part = list(_read(weights, names, unit)) if streams else read[unit]
                _put(engine, unit, part)
            for name, tensor in model.named_buffers():
                if name in buffers:
                    tensor.copy_(buffers[name])
    return missing


def match(weights: Weights, model: nn.Module, *, strict: bool) -> tuple[dict[str, str], list[str]]:
    """Return for each parameter and buffer its name in the files, and the names that are missing.

    Raises:
        CheckpointError: another shape; where strict, a name on one side only.
    """
    _name_tiles(weights, model)
    tensors: dict[int, tuple[list[str], Any]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        tensors.setdefault(id(tensor), ([], tensor))[0].append(name)
    first = {id(p): n for n, p in (*model.named_parameters(), *model.named_buffers())}
    found: dict[str, str] = {}
    missing: list[str] = []
    for key, (names, tensor) in tensors.items():
        there = weights.find(names)
        if there is None:
            missing += names
            continue
        if weights.shape(there) != tuple(tensor.shape):
            raise CheckpointError(
                f"{there} has shape {list(weights.shape(there))} in {weights.path}, and"
                f" {list(tensor.shape)} in the model"
            )
        found[first.get(key, names[0])] = there
    if strict:
        _refuse(weights.path, "lacks", missing)
        _refuse(weights.path, "has, and the model lacks,", weights.others(set(state)))
    return found, missing


def _name_tiles(weights: Weights, model: nn.Module) -> None:
    """Let tiles be found in the weights of ordinary linear layers.

    Raises:
        CheckpointError: such a weight has another shape than the tiles together.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        source = weights.find([f"{prefix}weight"])
        if not isinstance(module, TiledLinear) or source is None:
            continue
        wanted = module.out_features, module.in_features
        if weights.shape(source) != wanted:
            raise CheckpointError(
                f"{source} has shape {list(weights.shape(source))} in {weights.path}, and"
                f" {list(wanted)} in the model"
            )
        tiles = [f"{prefix}tiles.{number}.weight" for number in range(len(module.tiles))]
        weights.name_parts(source, dict(zip(tiles, module.places(), strict=True)))


def _refuse(path: Path, what: str, names: Sequence[str]) -> None:
    if names:
        shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        raise CheckpointError(f"{path} {what} {len(names)} tensors: {shown}")


def _read(
    weights: Weights, names: Mapping[str, str], unit: Unit
) -> Iterator[tuple[Buffer, Run, Tensor]]:
    for buffer in unit.buffers:
        for run in buffer.runs:
            slot = buffer.layout.slots[run.slot]
            if slot.name in names:
                part = weights.run(names[slot.name], slot, run)
                yield buffer, run, part.to(buffer.layout.dtype)


def _put(engine: Engine, unit: Unit, read: Sequence[tuple[Buffer, Run, Tensor]]) -> None:
    for buffer in unit.buffers:
        parts = {run: part for owner, run, part in read if owner is buffer}
        if buffer.is_cut:
            shard = buffer.load_shard()
            for run, place in zip(buffer.runs, split(shard, buffer.runs), strict=True):
                if run in parts:
                    place.copy_(parts[run])
            buffer.store_shard(shard)
        else:
            assert buffer.full is not None
            for run, part in parts.items():
                buffer.run_view(buffer.full, run).copy_(part)
        if buffer.separate:
            masters = buffer.load_masters()
            for master, value in zip(buffer.masters, masters, strict=True):
                if master.run in parts:
                    value.copy_(parts[master.run])
            buffer.store_masters(masters)
    unit.note_edit()
    if engine.config.stage == 3 or not unit.buffers:
        return
    if is_decoded(engine, unit):
        engine.publisher.publish_first(unit)
    else:
        spread(engine, unit)
    for buffer in unit.buffers:
        assert buffer.full is not None
        for master in buffer.masters:
            if buffer.separate and master.owner != buffer.rank:  # stage 0
                master.tensor.copy_(buffer.run_view(buffer.full, master.run))
        increment_version(list(buffer.parameters))
        note_versions(buffer)
