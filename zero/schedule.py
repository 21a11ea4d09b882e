"""When units are gathered, resharded and reduced: in one order on all ranks.

Module calls and autograd's hooks arrive here. Units go through backward in the reverse order of
their calls; when the backward of one begins, that of every unit called later is complete, because
autograd runs what was recorded last first. Reductions follow the plan, the reverse order of the
units in the model, the root last: a unit waits for those before it, so that ranks whose hooks
differ (a module used on some ranks only) still reduce in one order. A unit that holds others is
complete when the backward of one outside of it begins, the root at the end.

A reader must not assume that every unit's hooks fire: units whose backward never began, or that
were called in another order, are reduced at the end of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from zero.gather import Gathering
from zero.layout import stands_alone
from zero.offload.drive import Faults
from zero.reduce import Reducer
from zero.saved import untraced
from zero.unit import Buffer, Call, State, Unit


class Schedule:
    """Turns calls of modules and of autograd's hooks into gathers, reshards and reductions."""

    def __init__(
        self, units: Sequence[Unit], gathering: Gathering, reducer: Reducer, faults: Faults
    ) -> None:
        self._units = units
        self._gathering = gathering
        self._reducer = reducer
        self._faults = faults
        self._plan = [unit for unit in reversed(units) if not unit.is_root]
        self._plan += [unit for unit in units if unit.is_root]
        self._in_backward = False
        self._num_reduced = 0
        self._holders = holders(units)
        for unit in units:
            self._attach(unit)

    def _attach(self, unit: Unit) -> None:
        module = unit.module
        before = untraced(self._before_forward(unit))
        after = untraced(self._after_forward(unit))
        module.register_forward_pre_hook(before, prepend=True)
        # Called after an exception too: what before_forward did must be undone.
        module.register_forward_hook(after, always_call=True)
        for buffer in unit.buffers:
            for index, parameter in enumerate(buffer.parameters):
                if parameter.requires_grad:
                    trainable = buffer.layout.slots[index].trainable
                    hook = self._collector(buffer, index) if trainable else _discard
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _before_forward(self, unit: Unit) -> Callable[[nn.Module, Any], None]:
        def before_forward(module: nn.Module, args: Any) -> None:
            self._faults.check()
            self._abandon_failed_backward()
            self._refuse_thawed(unit)
            if self._gathering.sharded:
                self._gathering.gather(unit, backward=self._in_backward)
                self._gathering.saved.enter()
            unit.depth += 1

        return before_forward

    def _refuse_thawed(self, unit: Unit) -> None:
        """Stop where a gradient would be lost.

        Raises:
            ValueError: naming a parameter that is trained now, but was frozen when sharded.
        """
        for parameter, name in unit.frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name} was frozen when the model was sharded, and requires a"
                    " gradient now: unfreeze it before zero.shard"
                )

    def _after_forward(self, unit: Unit) -> Callable[[nn.Module, Any, Any], None]:
        def after_forward(module: nn.Module, args: Any, output: Any) -> None:
            if unit.depth == 0:  # before_forward raised, or never ran
                return
            unit.depth -= 1
            if self._gathering.sharded:
                self._gathering.saved.leave()
            if unit.depth:
                return
            begun = len(unit.pending) > 0 or unit.state is State.BACKWARD
            if torch.is_grad_enabled() and not (self._in_backward and begun):
                self._expect_backward(unit, output)
            # What is computed again inside backward is needed whole right after, unless it is one
            # of several that must not be whole together.
            if not self._in_backward:
                self._gathering.reshard(unit)
                if self._gathering.sharded and torch.is_grad_enabled():
                    self._gathering.look_ahead()
            elif unit.state is State.WHOLE and stands_alone(module):
                self._gathering.reshard(unit)

        return after_forward

    def _expect_backward(self, unit: Unit, output: Any) -> None:
        call = Call()

        def before_backward(grad: Tensor) -> None:
            unit.pending.discard(call)
            self.enter_backward(unit)

        for tensor in [t for t in tensors_in(output) if t.grad_fn is not None]:
            unit.pending.add(call)
            tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]

    def _collector(self, buffer: Buffer, index: int) -> Callable[[Tensor], None]:
        # Python's collector does not see through this hook of a tensor: a model whose parameters
        # held what holds them would never be freed.
        schedule, place = ref(self), ref(buffer)

        def collect(parameter: Tensor) -> None:
            owner, found = schedule(), place()
            assert owner is not None
            assert found is not None
            owner._begin()
            owner._reducer.collect(found, index)

        return collect

    def enter_backward(self, unit: Unit) -> None:
        """Make a unit whole for its backward, and end that of units that are complete.

        Raises:
            RuntimeError: outside of a backward.
        """
        if unit.state is State.BACKWARD:
            return
        self._begin()
        self._end_complete(unit)
        self._gathering.gather(unit, backward=True)
        unit.state = State.BACKWARD

    def _begin(self) -> None:
        if self._in_backward:
            return
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._in_backward = True
        self._reducer.begin()

    def _end_complete(self, entered: Unit) -> None:
        """End the backward of units behind ``entered``: called later, and not around it."""
        complete = [u for u in self._units if u.state is State.BACKWARD and not u.pending]
        for unit in complete:
            if unit not in self._holders[entered] and not unit.is_root and not unit.depth:
                self._gathering.reshard(unit)
                unit.ended = True
        if self._reducer.synchronise:
            while self._num_reduced < len(self._plan) and self._plan[self._num_reduced].ended:
                self._reducer.reduce(self._plan[self._num_reduced])
                self._num_reduced += 1

    def _finish(self) -> None:
        inside_forward = any(unit.depth for unit in self._units)
        for unit in self._units:
            if not unit.depth:
                self._gathering.reshard(unit)
        # torch.autograd.grad inside a forward ends here too; the backward is still to come.
        if self._reducer.synchronise and not inside_forward:
            for unit in self._plan[self._num_reduced :]:
                self._reducer.reduce(unit)
            self._reducer.settle()
        self._reset()

    def _reset(self) -> None:
        self._in_backward = False
        self._num_reduced = 0
        for unit in self._units:
            unit.ended = False

    def _abandon_failed_backward(self) -> None:
        """Clean up behind a backward that raised: autograd does not call back then."""
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            for unit in self._units:
                if not unit.depth:
                    self._gathering.reshard(unit)
            self._reducer.drop()
            self._reset()


def holders(units: Sequence[Unit]) -> dict[Unit, frozenset[Unit]]:
    """Return for each unit those whose modules hold its module; the root is not among them."""
    by_module = {id(unit.module): unit for unit in units}
    found: dict[Unit, set[Unit]] = {unit: set() for unit in units}
    for outer in units:
        for module in outer.module.modules() if not outer.is_root else ():
            inner = by_module.get(id(module))
            if inner is not None and inner is not outer:
                found[inner].add(outer)
    return {unit: frozenset(outer) for unit, outer in found.items()}


def _discard(parameter: Tensor) -> None:
    """Take away the gradient of a parameter that the optimizer does not step."""
    parameter.grad = None


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, list | tuple | set):
        for entry in value:
            yield from tensors_in(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors_in(getattr(value, entry.name))
