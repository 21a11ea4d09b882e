"""Where every parameter lies, and who owns which part of it: plain descriptions, no tensors.

Words defined here:

- **unit**: parameters that are gathered and reduced together; its module is the outermost one.
  A unit may hold others, which are gathered apart from it: the root does, and so does the unit of
  a module in which others *stand alone*.
- **buffer**: the flat memory of a unit's parameters of one dtype. **slot**: the place of one
  parameter in it. Slots start at 64-byte boundaries in every stage, because the alignment of a
  matrix changes the bits of a product.
- **piece**: 256 consecutive elements of a parameter from its start (the last may be short).
- **run**: consecutive pieces of one parameter with one owner; a segment of the wire formats.

A reader must not assume that shard i belongs to rank i: the order of owners is
``Topology.ownership()``; nor that a buffer has no gaps between slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import nn

from zcomm.layout import Layout, Segment

ALIGNMENT_NBYTES = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Run:
    """``numel`` elements of parameter number ``slot`` of a buffer, from its element ``offset``."""

    slot: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Slot:
    """One parameter in a buffer: its elements start at element ``start``, in memory order.

    ``gradient_start`` is its place in gradient memory, which has no room for parameters that have
    no gradient (None).
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    start: int
    gradient_start: int | None

    @property
    def trainable(self) -> bool:
        """Whether the parameter has gradients that the optimizer steps."""
        return self.gradient_start is not None


@dataclass(frozen=True)
class BufferLayout:
    """The slots of a buffer, and the runs of every rank.

    ``numel`` and ``gradient_numel`` are elements of the whole memory, gaps included.
    """

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int
    gradient_numel: int
    runs: tuple[tuple[Run, ...], ...]

    @cached_property
    def all(self) -> Layout:
        """Segments of all parameters."""
        shards = [[self.segment(run) for run in runs] for runs in self.runs]
        return Layout(dtype_name(self.dtype), tuple(map(tuple, shards)))

    @cached_property
    def trainable(self) -> Layout:
        """Segments of the parameters that have gradients."""
        ranks = range(len(self.runs))
        shards = [[self.segment(run) for run in self.trainable_runs(rank)] for rank in ranks]
        return Layout(dtype_name(self.dtype), tuple(map(tuple, shards)))

    def gradients(self, dtype: torch.dtype) -> Layout:
        """Return the segments of gradient memory of a dtype."""
        layout = self._gradients
        name = dtype_name(dtype)
        return layout if layout.dtype == name else Layout(name, layout.shards)

    @cached_property
    def _gradients(self) -> Layout:
        ranks = range(len(self.runs))
        shards = [
            [self.gradient_segment(run) for run in self.trainable_runs(rank)] for rank in ranks
        ]
        return Layout(dtype_name(self.dtype), tuple(map(tuple, shards)))

    def in_a_row(self, ranks: Sequence[int], dtype: str) -> Layout:
        """Return where the trainable runs of these ranks lie when nothing is between them."""
        start = 0
        shards = []
        for rank in ranks:
            segments = []
            for run in self.trainable_runs(rank):
                segments.append(Segment(start, run.numel))
                start += run.numel
            shards.append(tuple(segments))
        return Layout(dtype, tuple(shards))

    def trainable_runs(self, rank: int) -> tuple[Run, ...]:
        """Return the runs of one rank whose parameters have gradients."""
        return tuple(run for run in self.runs[rank] if self.slots[run.slot].trainable)

    def segment(self, run: Run) -> Segment:
        """Return the place of a run in the buffer."""
        return Segment(self.slots[run.slot].start + run.offset, run.numel)

    def gradient_segment(self, run: Run) -> Segment:
        """Return the place of a run in gradient memory."""
        start = self.slots[run.slot].gradient_start
        assert start is not None
        return Segment(start + run.offset, run.numel)


@dataclass(frozen=True)
class UnitModules:
    """A unit before it has memory: its name (empty for the root), module and parameters."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that zcomm uses for a dtype."""
    return str(dtype).removeprefix("torch.")


def cut(numels: Sequence[int], size: int, piece: int) -> tuple[tuple[Run, ...], ...]:
    """Deal the pieces of parameters, in order, to ``size`` contiguous shards.

    Shard i ends at the first end of a piece at or behind (i + 1)·ceil(N / size), so that no shard
    has more than ceil(N / size) + piece - 1 of the N elements.
    """
    ends = list(accumulate(numels))
    share = -(-(ends[-1] if ends else 0) // size)
    bounds = [0, *(_piece_end(numels, ends, share * (i + 1), piece) for i in range(size))]
    return tuple(tuple(_runs(numels, ends, lo, hi)) for lo, hi in pairwise(bounds))


def _piece_end(numels: Sequence[int], ends: Sequence[int], target: int, piece: int) -> int:
    for numel, end in zip(numels, ends, strict=True):
        if target <= end:
            start = end - numel
            pieces = -(-max(0, target - start) // piece)
            return min(start + pieces * piece, end)
    return ends[-1] if ends else 0


def _runs(numels: Sequence[int], ends: Sequence[int], lo: int, hi: int) -> Iterator[Run]:
    for slot, (numel, end) in enumerate(zip(numels, ends, strict=True)):
        start = end - numel
        first, last = max(lo, start), min(hi, end)
        if first < last:
            yield Run(slot, first - start, last - first)


def lay_out(
    parameters: Sequence[tuple[str, nn.Parameter]],
    owners: Sequence[int],
    piece: int,
    trained: Collection[nn.Parameter],
) -> tuple[BufferLayout, ...]:
    """Place a unit's parameters in one buffer per dtype and cut each buffer.

    Args:
        parameters: names and parameters, in the unit's order.
        owners: ranks in the order of ownership, ``Topology.ownership()``.
        piece: elements of the grid on which parameters are cut.
        trained: the parameters that the optimizer steps.

    Raises:
        ValueError: a parameter whose dtype is not float32, bfloat16 or float16.
    """
    layouts = []
    for name, parameter in parameters:
        if parameter.dtype not in DTYPES:
            raise ValueError(
                f"parameter {name} is {dtype_name(parameter.dtype)}: possible are "
                + ", ".join(map(dtype_name, DTYPES))
            )
    for dtype in dict.fromkeys(parameter.dtype for _, parameter in parameters):
        alike = [(n, p) for n, p in parameters if p.dtype == dtype]
        slots, numel, gradient_numel = _slots(alike, dtype, trained)
        shards = cut([slot.numel for slot in slots], len(owners), piece)
        runs = tuple(shard for _, shard in sorted(zip(owners, shards, strict=True)))
        layouts.append(BufferLayout(dtype, slots, numel, gradient_numel, runs))
    return tuple(layouts)


def _slots(
    parameters: Sequence[tuple[str, nn.Parameter]],
    dtype: torch.dtype,
    trained: Collection[nn.Parameter],
) -> tuple[tuple[Slot, ...], int, int]:
    grid = ALIGNMENT_NBYTES // dtype.itemsize
    slots = []
    start = gradient_start = 0
    for name, p in parameters:
        extent = -(-p.numel() // grid) * grid
        trainable = p.requires_grad and p in trained
        place = gradient_start if trainable else None
        slots.append(Slot(name, tuple(p.shape), _stride(p), p.numel(), start, place))
        start += extent
        gradient_start += extent if trainable else 0
    return tuple(slots), start, gradient_start


def _stride(parameter: nn.Parameter) -> tuple[int, ...]:
    """Keep the strides of a parameter that fills its memory (channels last), else row-major."""
    numel = 1
    for extent, step in sorted(
        zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if extent != 1 and step != numel:
            return torch.empty(parameter.shape, device="meta").stride()
        numel *= extent
    return tuple(parameter.stride())


def find_units(model: nn.Module, names: str | Sequence[str]) -> tuple[UnitModules, ...]:
    """Divide a model's parameters into units; the root is the last.

    With ``"auto"`` the modules of units are the children of each outermost ModuleList or
    Sequential; a child that is itself a container without forward stands for its children. Modules
    that stand alone are units too, wherever they are; behind the unit that holds them. A parameter
    used by two units, or by a unit and the rest, belongs to the root.

    Raises:
        ValueError: a name that is no module of the model, or a unit inside another.
    """
    modules = _automatic(model) if names == "auto" else _named(model, names)
    modules = _with_those_alone(model, modules)
    units = {id(module) for module in modules.values()}
    users: dict[int, set[str]] = {}
    inside: set[int] = set()
    for name, module in modules.items():
        for own in _up_to_units(module, units):
            inside.add(id(own))
            for parameter in own.parameters(recurse=False):
                users.setdefault(id(parameter), set()).add(name)
    for module in model.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                users.setdefault(id(parameter), set()).add("")
    members: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in (*modules, "")}
    for name, parameter in model.named_parameters():
        using = users[id(parameter)]
        members[next(iter(using)) if len(using) == 1 else ""].append((name, parameter))
    found = [UnitModules(n, m, tuple(members[n])) for n, m in modules.items() if members[n]]
    return (*found, UnitModules("", model, tuple(members[""])))


def stands_alone(module: nn.Module) -> bool:
    """Tell whether a module is marked as a unit of its own, also inside of another unit.

    The mark is an attribute, ``zero_unit = True``. Such a unit is resharded after a recomputation
    in backward too, and gathered again: it is one of several that must not be whole together.
    """
    return getattr(module, "zero_unit", False) is True


def _with_those_alone(model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules of units, and those that stand alone where the model has them."""
    alone = {id(module) for name, module in model.named_modules() if name and stands_alone(module)}
    if not alone:
        return modules
    # In the order of the model, which is the order of reductions backwards.
    units = alone | {id(module) for module in modules.values()}
    return {name: module for name, module in model.named_modules() if id(module) in units}


def _up_to_units(module: nn.Module, units: Collection[int]) -> Iterator[nn.Module]:
    """Yield a module and those below it that are in no unit of their own."""
    yield module
    for child in module.children():
        if id(child) not in units:
            yield from _up_to_units(child, units)


def _automatic(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, name: str, *, in_container: bool) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if in_container and type(module).forward is not nn.Module.forward:
            found[name] = module
            seen.update(map(id, module.modules()))
            return
        inside = in_container or isinstance(module, nn.ModuleList | nn.Sequential)
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}".lstrip("."), in_container=inside)

    visit(model, "", in_container=False)
    return found


def _named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    known = dict(model.named_modules())
    for name in names:
        if name not in known or not name:
            raise ValueError(f"units: {name!r} is no module inside the model")
        outer = [other for other in names if name.startswith(f"{other}.")]
        if outer:
            raise ValueError(f"units: {name!r} is inside {outer[0]!r}; a unit cannot hold another")
    return {name: known[name] for name in names}
