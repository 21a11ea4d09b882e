"""Models built under ``torch.device("meta")``: given memory and values unit by unit.

1. Modules are visited children first, as ``model.apply`` does, which is also the order in which
   constructors draw. A module's parameters and buffers get memory, filled with a pattern that no
   initialiser writes, and its ``reset_parameters`` (or ``_reset_parameters``) runs.
2. When a unit's own module has been visited, all of the unit is there: it is sharded, and its
   memory freed, before the next unit is begun. The root's parameters stay until the end.

With an ``init`` of the user there are two passes: constructors draw first, ``model.apply(init)``
draws after. The first pass draws into scratch memory, one module at a time, and notes the state of
the generator; the second repeats a module's draws from there, then calls ``init``.

A reader must not assume that a parameter of two modules (tied weights) is initialised twice: its
second module draws into scratch memory, as its constructor drew for what was then replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zero.layout import UnitModules
from zero.places import is_away

Init = Callable[[nn.Module], object] | Literal["empty"] | None

# Not-a-number with a payload; no initialiser draws it.
_PATTERNS = {2: (torch.int16, 0x7FA5), 4: (torch.int32, 0x7FA5A5A5)}


def is_meta(model: nn.Module) -> bool:
    """Tell whether a model has parameters without memory."""
    return any(parameter.is_meta for parameter in model.parameters())


def materialise(
    model: nn.Module,
    found: Iterable[UnitModules],
    init: Init,
    finish: Callable[[UnitModules], None],
) -> None:
    """Give a model memory and values, and call ``finish`` with each unit that is complete.

    Args:
        model: its parameters are without memory, all of them.
        found: its units, the root last.
        init: see :func:`zero.shard`.
        finish: shards a unit; until it returns, nothing else gets memory.

    Raises:
        ValueError: a parameter or buffer that nobody initialised, naming it.
    """
    units = {id(unit.module): unit for unit in found}
    names = {id(module): name for name, module in model.named_modules()}
    visited: set[int] = set()
    states = _draw(model) if callable(init) else {}
    for module in _children_first(model):
        new = _allocate(module, visited)
        if init != "empty":
            if id(module) in states:
                with _drawing_from(states[id(module)]):
                    _reset(module, new)
            else:
                _reset(module, new)
        if callable(init):
            with torch.no_grad():
                init(module)
        _check(module, names[id(module)], new, init)
        unit = units.get(id(module))
        if unit is not None:
            finish(unit)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) not in seen:
            seen.add(id(module))
            for child in module.children():
                yield from visit(child)
            yield module

    return visit(module)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((n, t) for n, t in module._parameters.items() if t is not None)
    yield from ((n, t) for n, t in module._buffers.items() if t is not None)


def _generators() -> list[Tensor]:
    """Return the states of the generators that initialisers draw from: CPU, default device."""
    device = torch.get_default_device()
    others = [torch.get_device_module(device).get_rng_state(device)] if is_away(device) else []
    return [torch.get_rng_state(), *others]


def _set_generators(states: list[Tensor]) -> None:
    device = torch.get_default_device()
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def _drawing_from(states: list[Tensor]) -> Iterator[None]:
    """Draw from these states of the generators, and leave those of now as they are."""
    before = _generators()
    _set_generators(states)
    try:
        yield
    finally:
        _set_generators(before)


def _draw(model: nn.Module) -> dict[int, list[Tensor]]:
    """Draw what the constructors draw, for nothing; return the generators' states before each."""
    states = {}
    for module in _children_first(model):
        states[id(module)] = _generators()
        with _scratch(module, {name for name, _ in _own(module)}):
            _run_reset(module)
    return states


def _allocate(module: nn.Module, visited: set[int]) -> dict[str, Tensor]:
    """Give memory to a module's parameters and buffers that have none; return those."""
    new = {}
    for name, tensor in _own(module):
        if id(tensor) in visited:
            continue
        visited.add(id(tensor))
        if tensor.is_meta:
            memory = _patterned(tensor)
            if isinstance(tensor, nn.Parameter):
                memory = nn.Parameter(memory, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, memory)  # type: ignore[no-untyped-call]
            new[name] = tensor
    return new


def _patterned(tensor: Tensor) -> Tensor:
    memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if tensor.is_floating_point() and tensor.element_size() in _PATTERNS:
        bits, pattern = _PATTERNS[tensor.element_size()]
        memory.view(bits).fill_(pattern)
    return memory


def _reset(module: nn.Module, new: dict[str, Tensor]) -> None:
    """Run a module's initialiser; what other modules own already keeps its values."""
    with _scratch(module, {name for name, _ in _own(module)} - new.keys()):
        _run_reset(module)


def _run_reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        with torch.no_grad():
            reset()


@contextmanager
def _scratch(module: nn.Module, names: set[str]) -> Iterator[None]:
    """Put memory of its own in the place of some of a module's parameters and buffers."""
    kept: list[tuple[dict[str, Tensor], str, Tensor]] = []
    owned: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for entries in owned:
        for name in names & entries.keys():
            tensor = entries[name]
            if tensor is not None:
                kept.append((entries, name, tensor))
                memory = torch.zeros(tensor.shape, dtype=tensor.dtype)
                if isinstance(tensor, nn.Parameter):
                    memory = nn.Parameter(memory, tensor.requires_grad)
                entries[name] = memory
    try:
        yield
    finally:
        for place, name, tensor in kept:
            place[name] = tensor


def _check(module: nn.Module, name: str, new: dict[str, Tensor], init: Init) -> None:
    for own, tensor in new.items():
        persistent = own not in module._non_persistent_buffers_set
        if init == "empty" and (persistent or isinstance(tensor, nn.Parameter)):
            continue
        if _is_untouched(tensor):
            kind = type(module).__name__
            raise ValueError(
                f"{name}.{own} of the meta model was initialised by nobody:".lstrip(".")
                + f" {kind} needs reset_parameters(), or pass init= to zero.shard"
            )


def _is_untouched(tensor: Tensor) -> bool:
    if not tensor.numel():
        return False
    if tensor.is_floating_point() and tensor.element_size() in _PATTERNS:
        bits, pattern = _PATTERNS[tensor.element_size()]
        return bool((tensor.detach().view(bits) == pattern).any())
    return tensor._version == 0
