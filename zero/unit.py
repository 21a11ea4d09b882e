"""The live state of a unit: its buffers, the optimizer's tensors, what is held and since when.

Words defined here:

- **master**: the float32 tensor of one run that the optimizer steps. It is the memory of the
  parameter itself where that is float32 and nobody else writes it, and separate otherwise. On disk
  its tensor is *hidden*: it has a shape and a gradient, but one NaN for all elements.
- **whole**: a buffer is whole when all its parameters can be used on this rank.
- **version** of a unit: moved by every step or edit of its parameters; equal on all ranks.

A reader must not assume that a buffer's memory stays the same between two gathers of stage 3, nor
that shards and masters are in memory: ``load_…`` and ``store_…`` of a buffer work in both cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zcomm.seeds import derive
from zero.layout import BufferLayout, Run
from zero.parameters import hide, show
from zero.places import HOST, on_host

if TYPE_CHECKING:
    from zero.offload.disk import Columns, StoredShard


class State(Enum):
    """What a unit's parameters can be used for.

    - ``SHARDED``: nothing; each rank holds its shard (stage 3 only).
    - ``WHOLE``: forward; in stages 0-2 always.
    - ``BACKWARD``: its backward runs; it is resharded when that is complete.
    """

    SHARDED = auto()
    WHOLE = auto()
    BACKWARD = auto()


@dataclass(eq=False)
class Master:
    """The optimizer's ``tensor`` (float32, 1-D) of one run, which ``owner`` steps.

    ``held`` is the run's value in the parameters' dtype, in the shard or the whole buffer; hidden
    where the shard is on disk.
    """

    run: Run
    owner: int
    tensor: Tensor
    held: Tensor


@dataclass(eq=False)
class Buffer:
    """The parameters of one dtype of a unit, as one rank sees them.

    Attributes:
        layout: slots, and the runs of every rank.
        rank: this rank.
        parameters: one per slot.
        full: memory of the whole buffer; None while sharded.
        shard: stage 3: this rank's runs, one after the other, in the parameters' dtype; None on
            disk.
        stored: the shard on disk.
        columns: this rank's masters and their states on disk.
        masters: of this rank's trainable runs; in stage 0 of those of all ranks.
        separate: whether masters have memory of their own.
        offloaded: whether masters are on the host, and the parameters are not.
        local: this rank's own gradients, not yet reduced, in gradient memory.
        written: which slots of ``local`` hold a gradient.
        home: stages 0 and 1: the gradient memory that stays, in the parameters' dtype.
    """

    layout: BufferLayout
    rank: int
    parameters: tuple[nn.Parameter, ...]
    full: Tensor | None
    shard: Tensor | None = None
    stored: StoredShard | None = None
    columns: Columns | None = None
    masters: list[Master] = field(default_factory=list)
    separate: bool = False
    offloaded: bool = False
    local: Tensor | None = None
    written: list[bool] = field(default_factory=list)
    home: Tensor | None = None
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.written = [False] * len(self.parameters)
        self.seen = [p._version for p in self.parameters]
        self._kinds = [type(p) for p in self.parameters]
        self._device = self.parameters[0].device
        self._placeholder = torch.tensor(torch.nan, dtype=self.layout.dtype, device=self._device)

    @property
    def device(self) -> torch.device:
        """Where the parameters are when they are whole."""
        return self._device

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of this rank."""
        return self.layout.runs[self.rank]

    @property
    def trainable_runs(self) -> tuple[Run, ...]:
        """The runs of this rank that have gradients."""
        return self.layout.trainable_runs(self.rank)

    def allocate(self) -> Tensor:
        """Return memory for the whole buffer, not initialised."""
        return torch.empty(self.layout.numel, dtype=self.layout.dtype, device=self._device)

    def allocate_gradient(self, dtype: torch.dtype) -> Tensor:
        """Return memory for the gradients of all parameters, not initialised."""
        return torch.empty(self.layout.gradient_numel, dtype=dtype, device=self._device)

    def slot_view(self, memory: Tensor, index: int) -> Tensor:
        """Return a parameter's place in memory of the whole buffer, in the parameter's shape."""
        slot = self.layout.slots[index]
        return memory.as_strided(slot.shape, slot.stride, slot.start)

    def run_view(self, memory: Tensor, run: Run) -> Tensor:
        """Return a run's place in memory of the whole buffer, 1-D."""
        segment = self.layout.segment(run)
        return memory[segment.start : segment.start + segment.numel]

    def gradient_view(self, memory: Tensor, index: int) -> Tensor:
        """Return a parameter's place in gradient memory, in the parameter's shape."""
        slot = self.layout.slots[index]
        assert slot.gradient_start is not None
        return memory.as_strided(slot.shape, slot.stride, slot.gradient_start)

    def gradient_run(self, memory: Tensor, run: Run) -> Tensor:
        """Return a run's place in gradient memory, 1-D."""
        segment = self.layout.gradient_segment(run)
        return memory[segment.start : segment.start + segment.numel]

    def show(self, memory: Tensor) -> None:
        """Make the buffer whole: its parameters become views of ``memory``."""
        self.full = memory
        for index, parameter in enumerate(self.parameters):
            show(parameter, self._kinds[index], self.slot_view(memory, index))

    def hide(self) -> None:
        """Let go of the whole buffer."""
        self.full = None
        for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
            hide(parameter, slot.name, self._placeholder)

    def own_masters(self) -> list[Master]:
        """Return the masters that this rank is the owner of."""
        return [master for master in self.masters if master.owner == self.rank]

    @property
    def is_cut(self) -> bool:
        """Whether this rank keeps its runs of the parameters only: stage 3."""
        return self.shard is not None or self.stored is not None

    @property
    def disk_nbytes(self) -> int:
        """Bytes that this rank has on disk."""
        columns = 0 if self.columns is None else self.columns.nbytes
        return columns + (0 if self.stored is None else self.stored.nbytes)

    def load_shard(self) -> Tensor:
        """Return the shard: itself where it is in memory, else what the disk has of it."""
        if self.stored is not None:
            return self.stored.load()
        assert self.shard is not None
        return self.shard

    def store_shard(self, shard: Tensor) -> None:
        """Keep a shard that was loaded and changed."""
        if self.stored is not None:
            self.stored.store(shard)

    def load_masters(self) -> list[Tensor]:
        """Return the values of ``masters``: themselves where they are in memory."""
        if self.columns is not None:
            return self.columns.load("value")
        return [master.tensor for master in self.masters]

    def store_masters(self, values: Sequence[Tensor]) -> None:
        """Keep masters that were loaded and changed."""
        if self.columns is not None:
            self.columns.store("value", values)


class Call:
    """One call of a unit's module, for as long as autograd can run it backward."""


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered and reduced together.

    Attributes:
        number: of the unit in the model.
        name: of the module in the model; empty for the root.
        module: whose call gathers the unit.
        buffers: one per dtype.
        quantise: whether the unit is large enough for codecs.
        state: what the parameters can be used for.
        version: moved by every change of the parameters.
        published: the version that shards hold; with a persistent secondary they lag behind
            masters until the next gather.
        depth: number of calls of the module that have not returned.
        pending: calls whose backward has not begun and can still come: the graph holds them.
        ended: whether the unit is complete in the backward that runs.
    """

    number: int
    name: str
    module: nn.Module
    buffers: tuple[Buffer, ...]
    quantise: bool
    state: State = State.WHOLE
    version: int = 0
    published: int = 0
    depth: int = 0
    pending: WeakSet[Call] = field(default_factory=WeakSet)
    ended: bool = False

    def __post_init__(self) -> None:
        self.frozen = [
            (parameter, slot.name)
            for buffer in self.buffers
            for parameter, slot in zip(buffer.parameters, buffer.layout.slots, strict=True)
            if not parameter.requires_grad
        ]

    @property
    def label(self) -> str:
        """What messages about the unit call it."""
        return f"unit {self.name}" if self.name else "the root unit"

    def seed(self, base: int, shard: int) -> int:
        """Return the seed with which a rank's shard of the current version is encoded."""
        return derive(base, self.number, shard, self.version)

    def note_edit(self) -> None:
        """Move the version: shards hold what the user wrote."""
        self.version += 1
        self.published = self.version

    @property
    def is_root(self) -> bool:
        """Whether this is the unit of everything that is in no other."""
        return not self.name

    @property
    def trainable(self) -> tuple[Buffer, ...]:
        """The buffers that have gradients."""
        return tuple(b for b in self.buffers if any(slot.trainable for slot in b.layout.slots))


def hidden(like: Tensor) -> Tensor:
    """Return one NaN in the shape and dtype of a tensor: what it reads as while it is on disk."""
    return torch.tensor(torch.nan, dtype=like.dtype, device=like.device).expand(like.shape)


def check_hidden(tensor: Tensor, name: str) -> None:
    """Raise ValueError where a hidden tensor was written to; of one element torch allows that."""
    if tensor.numel() == 1 and not bool(tensor.isnan().all()):
        tensor.fill_(torch.nan)
        raise ValueError(
            f"the optimizer's tensor of {name}, one element, was written to, and its value is on"
            " disk: edit the parameter, in zero.full_params (in stages 1 and 2 in place)"
        )


def split(compact: Tensor, runs: Iterable[Run]) -> list[Tensor]:
    """Return views of runs that lie one after the other in a 1-D tensor, which may be longer."""
    views = []
    start = 0
    for run in runs:
        views.append(compact[start : start + run.numel])
        start += run.numel
    return views


def pack(
    parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> Tensor:
    """Copy 1-D tensors one after the other into a new one of ``dtype`` on ``device``.

    ``pinned``: what is on the host stays there, and is copied to and from a GPU.
    """
    numel = sum(part.numel() for part in parts)
    if pinned and device == HOST:
        compact = on_host(numel, dtype)
    else:
        compact = torch.empty(numel, dtype=dtype, device=device)
    start = 0
    for part in parts:
        compact[start : start + part.numel()].copy_(part)
        start += part.numel()
    return compact
