"""The index of a checkpoint: who saved which elements of which parameter, and in which file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zcomm.errors import CheckpointError
from zero.checkpoint.capture import key_of
from zero.checkpoint.files import INDEX, Reader, read_index, verify
from zero.checkpoint.plain import decode
from zero.layout import Slot
from zero.states import in_memory_order


@dataclass(frozen=True)
class Index:
    """A checkpoint that can be read; ``content`` is that of ``index.json``."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def read(cls, path: Path, kind: str) -> Index:
        """Read the index of a checkpoint.

        Raises:
            CheckpointError: naming the file, and what is wrong.
        """
        content = read_index(path / INDEX)
        if content.get("format") != kind:
            raise CheckpointError(
                f"{path / INDEX} has the format {content.get('format')!r}; this version reads"
                f" {kind!r}"
            )
        return cls(path, content)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that saved."""
        return len(self.content["ranks"])

    @property
    def parameters(self) -> dict[str, Any]:
        """Shape, stride, dtype, names of every parameter."""
        parameters: dict[str, Any] = self.content["parameters"]
        return parameters

    def part(self, rank: int) -> dict[str, Any]:
        """Return what a rank that saved says."""
        part: dict[str, Any] = self.content["ranks"][rank]
        return part

    def file(self, rank: int) -> Path:
        """Return the file of a rank that saved."""
        return self.path / str(self.content["folder"]) / str(self.part(rank)["file"])

    def verify(self, ranks: Iterable[int]) -> None:
        """Check the files of some ranks.

        Raises:
            CheckpointError: naming the file, and what is wrong.
        """
        for rank in ranks:
            verify(self.file(rank), self.part(rank)["nbytes"], self.part(rank)["checksum"])

    @cached_property
    def _runs(self) -> dict[str, list[tuple[int, int, int]]]:
        """Offset, elements and rank of the runs of every parameter, ascending."""
        found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in self.parameters}
        for rank in range(self.num_ranks):
            for name, runs in self.part(rank)["runs"].items():
                found[name] += [(offset, numel, rank) for offset, numel in runs]
        return {name: sorted(runs) for name, runs in found.items()}

    @cached_property
    def kinds(self) -> dict[str, list[str]]:
        """The kinds of tensors of every parameter that has elements."""
        return self._merged("kinds")

    @cached_property
    def scalars(self) -> dict[str, dict[str, Any]]:
        """The states of every parameter that are numbers, encoded."""
        return self._merged("scalars")

    @cached_property
    def groups(self) -> dict[str, int]:
        """The number of the group of every parameter that the optimizer steps."""
        return self._merged("groups")

    def _merged(self, field: str) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for rank in range(self.num_ranks):
            merged |= self.part(rank)[field]
        return merged

    def run(self, reader: Reader, name: str, kind: str, first: int, numel: int) -> Tensor:
        """Return ``numel`` elements of a parameter, in the memory order of when it was saved."""
        return torch.cat([*self._pieces(reader, name, kind, first, first + numel)])

    def _pieces(
        self, reader: Reader, name: str, kind: str, first: int, last: int
    ) -> Iterator[Tensor]:
        reached = first
        for offset, numel, rank in self._runs[name]:
            lo, hi = max(first, offset), min(last, offset + numel)
            if lo < hi:
                if lo != reached:
                    break
                key = key_of(kind, name, offset)
                yield reader.part(self.file(rank), key, lo - offset, hi - offset)
                reached = hi
        if reached != last:
            raise CheckpointError(
                f"{self.path / INDEX} lists no file with element {reached} of {name}"
            )

    def whole(self, reader: Reader, name: str, kind: str) -> Tensor:
        """Return a whole tensor of a parameter's shape."""
        entry = self.parameters[name]
        shape, stride = entry["shape"], entry["stride"]
        numel = torch.Size(shape).numel()
        if not numel:
            return torch.empty(shape, dtype=getattr(torch, entry["dtype"]))
        return self.run(reader, name, kind, 0, numel).as_strided(shape, stride)

    def slice(self, reader: Reader, slot: Slot, kind: str, first: int, numel: int) -> Tensor:
        """Return elements of a parameter in the memory order of a slot."""
        if list(slot.stride) == self.parameters[slot.name]["stride"]:
            return self.run(reader, slot.name, kind, first, numel)
        return in_memory_order(self.whole(reader, slot.name, kind), slot)[first : first + numel]

    def buffer(self, reader: Reader, name: str, rank: int) -> Tensor:
        """Return a buffer of the model as a rank had it."""
        key = key_of("buffer", name, 0)
        if rank and key in reader.file(self.file(rank)).keys():  # noqa: SIM118  # not a mapping
            return reader.tensor(self.file(rank), key)
        return reader.tensor(self.file(0), key)

    def provider(self, reader: Reader, provider: str, rank: int) -> dict[str, Any]:
        """Return what a provider of a rank saved, tensors included."""
        found = self.plain_provider(provider, rank)
        prefix = f"provider.{provider}|"
        for key in reader.file(self.file(rank)).keys():  # noqa: SIM118
            if key.startswith(prefix):
                found[key.split("|")[1]] = reader.tensor(self.file(rank), key)
        return found

    def plain_provider(self, provider: str, rank: int) -> dict[str, Any]:
        """Return the plain values that a provider of a rank saved."""
        saved = self.part(rank)["providers"].get(provider, {})
        return {key: decode(value) for key, value in saved.items()}
