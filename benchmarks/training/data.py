"""The text: bytes of files in a fixed order, and the batches cut from it.

By default the Python source of the standard library that runs this program, tests and installed
packages left out: real text that is on every machine. Batches depend on seed and step alone, so
schemes, and any number of ranks that divides the batch, see the same tokens.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.launch import UsageError

Text = npt.NDArray[np.uint8]

MAX_NBYTES = 64 * 2**20
"""Text beyond this is left unread: a short training never gets there."""

_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests"})


@dataclass(frozen=True)
class Batch:
    """Sequences of bytes, (sequences, tokens) int64, and the byte that follows each."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def part(self, rank: int, num_ranks: int) -> Batch:
        """Return one rank's share, in rank order."""
        each = len(self.inputs) // num_ranks
        own = slice(rank * each, (rank + 1) * each)
        return Batch(self.inputs[own], self.targets[own])


def read(path: Path | None, *, at_least: int) -> Text:
    """Read the text: a file, all files below a folder in the order of their paths, or by default
    the standard library.

    Args:
        path: what ``--data`` names; None is the standard library.
        at_least: bytes without which no batch can be cut.

    Raises:
        UsageError: nothing is there, it cannot be read, or it is too short.
    """
    try:
        parts, total = [], 0
        for file in standard_library() if path is None else files(path):
            part = file.read_bytes()[: MAX_NBYTES - total]
            parts.append(part)
            total += len(part)
            if total == MAX_NBYTES:
                break
    except OSError as error:
        raise UsageError(
            f"--data {path or 'standard library'}: {error.filename}: {error.strerror}; "
            "give a readable file, or a folder of them"
        ) from None
    if total < at_least:
        raise UsageError(f"--data {path}: {total} bytes in {len(parts)} files, need {at_least}")
    return np.frombuffer(b"".join(parts), np.uint8)


def files(path: Path) -> list[Path]:
    """Return a file itself, or all below a folder in the order of their paths, hidden ones not.

    Raises:
        OSError: there is neither.
    """
    return _in_order(path, frozenset()) if path.is_dir() else [path]


def standard_library() -> list[Path]:
    """Return the source files of the running Python's standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    return [file for file in _in_order(root, _NOT_SOURCE) if file.suffix == ".py"]


def _in_order(folder: Path, excluded: frozenset[str]) -> list[Path]:
    found = _walk(folder, excluded)
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _walk(folder: Path, excluded: frozenset[str]) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name.startswith(".") or entry.name in excluded:
            continue
        if entry.is_dir():
            yield from _walk(entry, excluded)
        elif entry.is_file():
            yield entry


def batch(text: Text, *, seed: int, step: int, num_sequences: int, num_tokens: int) -> Batch:
    """Cut the batch of one step from random places of the text."""
    random = np.random.default_rng([seed, step])
    starts = random.integers(0, len(text) - num_tokens, num_sequences)
    rows = text[starts[:, None] + np.arange(num_tokens + 1)].astype(np.int64)
    return Batch(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy()))
