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
from zero.unit import Buffer, Master, split

_BITS = {2: torch.int16, 4: torch.int32}


class _Copy(NamedTuple):
    """A run whose value in the whole buffer has another home: a shard, a separate master."""

    run: Run
    shard: Tensor | None
    master: Master | None


def was_edited(buffer: Buffer) -> bool:
    """Tell whether torch saw a parameter change in place since :func:`note_versions`."""
    return any(p._version != seen for p, seen in zip(buffer.parameters, buffer.seen, strict=True))


def note_versions(buffer: Buffer) -> None:
    """Take the parameters as they are for unedited."""
    buffer.seen = [p._version for p in buffer.parameters]


def snapshot(buffer: Buffer) -> list[Tensor]:
    """Copy the values of a whole, unedited buffer that :func:`absorb` compares."""
    assert buffer.full is not None
    return [buffer.run_view(buffer.full, copy.run).clone() for copy in _copies(buffer)]


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
    assert buffer.full is not None
    found = False
    for index, copy in enumerate(_copies(buffer)):
        value = buffer.run_view(buffer.full, copy.run)
        if before is not None:
            changed = _differs(value, before[index])
        elif exact:
            changed = _differs(value, _expected(copy))
        else:
            slot = copy.run.slot
            edited = buffer.parameters[slot]._version != buffer.seen[slot]
            changed = torch.full(value.shape, edited)
        if bool(changed.any()):
            found = True
            _carry(copy, value, changed)
    note_versions(buffer)
    return found


def _copies(buffer: Buffer) -> Iterator[_Copy]:
    if buffer.shard is not None:
        masters = {master.run: master for master in buffer.masters if buffer.separate}
        for run, shard in zip(buffer.runs, split(buffer.shard, buffer.runs), strict=True):
            yield _Copy(run, shard, masters.get(run))
    elif buffer.separate:
        yield from (_Copy(master.run, None, master) for master in buffer.masters)


def _expected(copy: _Copy) -> Tensor:
    if copy.shard is not None:
        return copy.shard
    assert copy.master is not None
    return copy.master.tensor.to(copy.master.held.dtype)


def _differs(a: Tensor, b: Tensor) -> Tensor:
    bits = _BITS[a.element_size()]
    return a.view(bits) != b.view(bits)


def _carry(copy: _Copy, value: Tensor, changed: Tensor) -> None:
    if copy.shard is not None:
        copy.shard.copy_(torch.where(changed, value, copy.shard))
    if copy.master is not None:
        tensor = copy.master.tensor
        tensor.copy_(torch.where(changed, value.to(tensor.dtype), tensor))
