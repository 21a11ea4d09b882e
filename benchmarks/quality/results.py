"""The file of results: a JSON object a line, appended as runs end, read by the next call.

A line has the digest of what it is a result of; a file that holds results of another plan or text
is refused. A last line without its end, of a program that was killed while it wrote, is taken away.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.launch import UsageError
from benchmarks.quality.train import Run


class Results:
    """The runs of one file.

    Raises:
        UsageError: it cannot be read or written, or is not of this plan.
    """

    def __init__(self, path: Path, digests: dict[str, str]) -> None:
        self._path, self._digests = path, digests
        self.runs: dict[tuple[str, int], Run] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                path.write_text(whole, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--output {path.parent}: {error.strerror}; give a folder") from None
        for number, line in enumerate(whole.splitlines(), start=1):
            self._take(number, line)

    def _take(self, number: int, line: str) -> None:
        where = f"{self._path}, line {number}"
        try:
            found: dict[str, Any] = json.loads(line)
            digest = found.pop("digest")
            run = Run(**found)
        except (ValueError, TypeError, KeyError):
            raise UsageError(f"{where}: no result of this program; give another folder") from None
        if self._digests.get(run.setting) != digest:
            raise UsageError(
                f"{where}: a run of {run.setting} with another plan or text; give another folder"
            )
        self.runs[run.setting, run.seed] = run

    def add(self, run: Run) -> None:
        """Append a run, on disk when this returns."""
        line = json.dumps({"digest": self._digests[run.setting], **asdict(run)})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
            file.flush()
            os.fsync(file.fileno())
        self.runs[run.setting, run.seed] = run
