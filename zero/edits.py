"""Changes that the user makes to parameters in place, carried to what the optimizer steps.

Masters and shards live apart from the parameters that the user sees. An element counts as edited
when it differs, bit for bit, from the value that was put there; all others keep the float32 value
of their master. An edit is made on all ranks alike; each owner takes its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero.layout import Run
from zero.places import values_of
from zero.unit import Buffer, split

_BITS = {2: torch.int16, 4: torch.int32}


class _Copy(NamedTuple):
    """A run whose value in the whole buffer has another home: a shard, a separate master."""

    run: Run
    shard: Tensor | None
    master: Tensor | None


def was_edited(buffer: Buffer) -> bool:
    """Tell whether torch saw a parameter change in place since :func:`note_versions`."""
    return any(p._version != seen for p, seen in zip(buffer.parameters, buffer.seen, strict=True))


def note_versions(buffer: Buffer) -> None:
    """Take the parameters as they are for unedited."""
    buffer.seen = [p._version for p in buffer.parameters]


def snapshot(buffer: Buffer) -> list[Tensor]:
    """Copy the values of a whole, unedited buffer that :func:`absorb` compares."""
    assert buffer.full is not None
    return [buffer.run_view(buffer.full, run).clone() for run in _runs(buffer)]


def absorb(buffer: Buffer, *, exact: bool, before: Sequence[Tensor] | None = None) -> bool:
    """Carry edits of a whole buffer to its shard and masters.

    Args:
        buffer: whole.
        exact: whether unedited parameters equal what this rank holds; with a codec they do not.
        before: the :func:`snapshot` from when the buffer was unedited. Without it and without
            ``exact`` every element of a parameter that torch saw change is taken.

    Returns:
        Whether anything was carried.
    """
    full = buffer.full
    assert full is not None
    shard = buffer.load_shard() if buffer.is_cut else None
    masters = buffer.load_masters() if buffer.separate else []

    def changed_in(index: int, copy: _Copy) -> Tensor:
        value = buffer.run_view(full, copy.run)
        if before is not None:
            return differs(value, before[index])
        if exact:
            return differs(value, _expected(copy, value.dtype).to(value.device))
        edited = slot_was_edited(buffer, copy.run.slot)
        return torch.full(value.shape, edited, device=value.device)

    copies = list(enumerate(_copies(buffer, shard, masters)))
    # Whether anything was, first: a device is waited for once, not for each run.
    edited = values_of([changed_in(index, copy).any() for index, copy in copies])
    for (index, copy), found in zip(copies, edited, strict=True):
        if found:
            _carry(copy, buffer.run_view(full, copy.run), changed_in(index, copy))
    if any(edited):
        if shard is not None:
            buffer.store_shard(shard)
        if masters:
            buffer.store_masters(masters)
    note_versions(buffer)
    return any(edited)


def slot_was_edited(buffer: Buffer, slot: int) -> bool:
    """Tell whether torch saw one parameter change in place since :func:`note_versions`."""
    return buffer.parameters[slot]._version != buffer.seen[slot]


def _runs(buffer: Buffer) -> tuple[Run, ...]:
    """Return the runs that have another home."""
    if buffer.is_cut:
        return buffer.runs
    return tuple(master.run for master in buffer.masters if buffer.separate)


def _copies(buffer: Buffer, shard: Tensor | None, masters: Sequence[Tensor]) -> Iterator[_Copy]:
    own = buffer.masters if masters else ()
    by_run = {master.run: tensor for master, tensor in zip(own, masters, strict=True)}
    runs = _runs(buffer)
    shards = [None] * len(runs) if shard is None else split(shard, runs)
    for run, part in zip(runs, shards, strict=True):
        yield _Copy(run, part, by_run.get(run))


def _expected(copy: _Copy, dtype: torch.dtype) -> Tensor:
    if copy.shard is not None:
        return copy.shard
    assert copy.master is not None
    return copy.master.to(dtype)


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Tell for every element whether two tensors of one dtype have other bits there."""
    bits = _BITS[a.element_size()]
    return a.view(bits) != b.view(bits)


def _carry(copy: _Copy, value: Tensor, changed: Tensor) -> None:
    for tensor in (copy.shard, copy.master):
        if tensor is not None:
            new, where = value.to(tensor.device, tensor.dtype), changed.to(tensor.device)
            tensor.copy_(torch.where(where, new, tensor))
