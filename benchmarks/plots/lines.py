"""Reading JSON lines, and saying which line is not what was expected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.launch import UsageError

Item = dict[str, Any]


@dataclass(frozen=True)
class Lines:
    """The objects of one file."""

    path: Path
    items: tuple[Item, ...]

    def having(self, *keys: str) -> list[Item]:
        """Return the objects that have all keys."""
        return [item for item in self.items if all(key in item for key in keys)]


def read(path: Path) -> Lines:
    """Read a file of JSON lines.

    Raises:
        UsageError: it cannot be read, or a line of it is no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "this is no text"
        raise UsageError(f"{path}: {reason}") from None
    items = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            item = json.loads(line)
        except ValueError:
            item = None
        if not isinstance(item, dict):
            raise UsageError(f"{path}, line {number}: no JSON object")
        items.append(item)
    return Lines(path, tuple(items))


def rows(files: Sequence[Lines], what: str, *keys: str) -> list[Item]:
    """Return the objects of all files that have these keys.

    Raises:
        UsageError: there is none; ``what`` says what was looked for.
    """
    found = [item for file in files for item in file.having(*keys)]
    if not found:
        names = ", ".join(str(file.path) for file in files)
        raise UsageError(f"{names}: no {what}; needed are objects with {', '.join(keys)}")
    return found
