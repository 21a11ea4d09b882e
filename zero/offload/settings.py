"""What a step changes beside tensors: settings of groups, and the optimizer's own numbers.

Some optimizers count their steps in a group or in themselves, not in the state of a tensor. A step
in blocks is several calls for them, of which each has to find what the first one found, and only
one may count. *Settings* are numbers, texts, tensors, and lists and dictionaries of those.

A reader must not assume that other objects which an optimizer holds are put back.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

TENSORS = ("param_groups", "state")
"""Of an optimizer: where what it steps is."""


class Settings:
    """The settings of an optimizer when its step began."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._own = _taken(vars(optimizer), TENSORS)
        self._groups = [_taken(group, ("params",)) for group in optimizer.param_groups]
        self._stepped: dict[int, dict[str, Any]] = {}
        self._called = False

    def begin(self) -> None:
        """Before a call: put everything back."""
        if self._called:
            _put_back(vars(self._optimizer), self._own, TENSORS)
            for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
                _put_back(group, before, ("params",))
        self._called = True

    def end(self, stepped: Collection[int]) -> None:
        """After a call: groups that it did not step keep what the call that stepped them left.

        Args:
            stepped: the numbers of the groups of which the call stepped something.
        """
        for number, group in enumerate(self._optimizer.param_groups):
            if number in stepped:
                self._stepped[number] = _taken(group, ("params",))
            elif number in self._stepped:
                _put_back(group, self._stepped[number], ("params",))


def _taken(source: MutableMapping[str, Any], but: Collection[str]) -> dict[str, Any]:
    return {key: (value, copied(value)) for key, value in source.items() if key not in but}


def _put_back(
    target: MutableMapping[str, Any], before: dict[str, Any], but: Collection[str]
) -> None:
    for key in [key for key in target if key not in before and key not in but]:
        del target[key]
    for key, (value, kept) in before.items():
        # In place: groups may share a list, and schedulers write into a tensor.
        if isinstance(value, Tensor):
            value.detach().copy_(kept)
        elif type(value) is list:
            value[:] = copied(kept)
        elif type(value) is dict:
            value.clear()
            value.update(copied(kept))
        target[key] = value


def copied(value: Any) -> Any:
    """Return a value that shares no tensor, list or dictionary with another."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(copied(entry) for entry in value)
    if type(value) is dict:
        return {key: copied(entry) for key, entry in value.items()}
    return value
