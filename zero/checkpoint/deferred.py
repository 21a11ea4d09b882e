"""Tensors of a checkpoint that are on disk: read when they are written, one column at a time.

A *source* reads several of them at once; whoever needs many takes them source by source, so that
each is read once and no two are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Source:
    """Reads tensors that lie together."""

    load: Callable[[], list[Tensor]]


@dataclass(frozen=True, eq=False)
class Deferred:
    """The 1-D tensor number ``index`` of a source."""

    dtype: torch.dtype
    numel: int
    source: Source
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        """As that of a tensor."""
        return (self.numel,)


def in_turn(tensors: Mapping[str, Tensor | Deferred]) -> list[str]:
    """Return the names in an order in which those of one source follow each other.

    Wide dtypes come first, so that in a file every tensor is aligned for its dtype.
    """
    sources: dict[Source, int] = {}
    for tensor in tensors.values():
        if isinstance(tensor, Deferred):
            sources.setdefault(tensor.source, len(sources))

    def place(name: str) -> tuple[int, int]:
        tensor = tensors[name]
        number = sources[tensor.source] if isinstance(tensor, Deferred) else -1
        return -tensor.dtype.itemsize, number

    return sorted(tensors, key=place)


def loaded(tensors: Mapping[str, Tensor | Deferred]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors in that order; a deferred one is good until the next."""
    last: Source | None = None
    parts: list[Tensor] = []
    for name in in_turn(tensors):
        tensor = tensors[name]
        if isinstance(tensor, Deferred):
            if tensor.source is not last:
                parts.clear()
                last, parts = tensor.source, tensor.source.load()
            tensor = parts[tensor.index]
        yield name, tensor


def load_all(tensors: MutableMapping[str, Tensor | Deferred]) -> None:
    """Replace all deferred tensors by copies in memory."""
    deferred = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Deferred)}
    for name, tensor in loaded(deferred):
        tensors[name] = tensor.clone()
