"""Results as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.launch import UsageError


def write(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """Write an object a line.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text("".join(f"{json.dumps(item)}\n" for item in items), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}; give a file to write") from None
