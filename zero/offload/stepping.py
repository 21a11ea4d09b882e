"""An optimizer's step of some tensors and nothing else, and how it takes the step's place.

What a reader must not assume: that ``optimizer.step`` of the object is that of its class; that the
groups hold the masters while a block is stepped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zero.offload.settings import Settings

States = dict[str, Any]


class Stepping:
    """One call of ``step`` by the user, which becomes a call for each block, or one for all.

    Attributes:
        optimizer: whose step it is.
        result: what the last call returned.
    """

    def __init__(self, optimizer: Optimizer, call: Callable[[], Any]) -> None:
        self.optimizer = optimizer
        self.result: Any = None
        self._call = call
        self._settings: Settings | None = None
        self._groups = {
            id(tensor): number
            for number, group in enumerate(optimizer.param_groups)
            for tensor in group["params"]
        }

    def step(
        self, masters: Sequence[Tensor], pieces: Sequence[tuple[Tensor, States]]
    ) -> list[States]:
        """Step pieces with the settings of their masters' groups.

        Args:
            masters: for each piece, the tensor in the groups of which it is a part.
            pieces: tensors with their gradients, and states; an empty state does not exist yet.

        Returns:
            The states after the step.
        """
        groups, state = self.optimizer.param_groups, self.optimizer.state
        before = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        numbers = [self._groups[id(master)] for master in masters]
        for number, (tensor, states) in zip(numbers, pieces, strict=True):
            groups[number]["params"].append(tensor)
            if states:
                state[tensor] = states
        self._settings = self._settings or Settings(self.optimizer)
        self._settings.begin()
        try:
            self.result = self._call()
            self._settings.end(set(numbers))
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params
            after = [state.pop(tensor, {}) for tensor, _ in pieces]
        return after

    def step_whole(self) -> Any:
        """Step everything in the groups, as without offload; return what that returned."""
        self.result = self._call()
        return self.result


def replace_step(optimizer: Optimizer, run: Callable[[Stepping], Any]) -> None:
    """Let ``optimizer.step`` call ``run``, with all hooks around it, once.

    Raises:
        ValueError: somebody else replaced the step of this object before.
    """
    kind = type(optimizer)
    step: Any = kind.step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step

    def in_blocks(owner: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _no_hooks(owner):
            return run(Stepping(owner, lambda: step(owner, *args, **kwargs)))

    hooked = Optimizer.profile_hook_step(in_blocks)
    given = optimizer.__dict__.get("step")
    if given is None:
        optimizer.__dict__["step"] = MethodType(hooked, optimizer)
    elif getattr(given, "_wrapped_by_lr_sched", False):
        optimizer.__dict__["step"] = _counted(optimizer, hooked)
    else:
        raise ValueError(
            f"the step of this {kind.__name__} was replaced by {given!r}, and zero.shard has to do"
            " so too: replace it after zero.shard"
        )


def calls_the_step_of_its_base(kind: type[Optimizer]) -> bool:
    """Tell whether hooks would run once more inside a step: torch hooks the base's step, too."""
    return sum("step" in base.__dict__ for base in kind.__mro__ if base is not Optimizer) > 1


def refuse_state_dict(optimizer: Optimizer) -> None:
    """Let ``state_dict`` and ``load_state_dict`` say that states are not in memory."""

    def refuse(owner: Optimizer, *_: Any) -> None:
        raise ValueError(
            f"the states of this {type(owner).__name__} are on disk (offload_optimizer='nvme'):"
            " use zero.save and zero.load"
        )

    optimizer.register_state_dict_pre_hook(refuse)
    optimizer.register_load_state_dict_pre_hook(refuse)


@contextmanager
def _no_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Keep the step of a base class from running the hooks again for every block."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    before = {name: optimizer.__dict__[name] for name in names}
    optimizer.__dict__.update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        optimizer.__dict__.update(before)


def _counted(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that schedulers made before it know as the one they count."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(optimizer, *args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return counted
