"""The table on the screen, and JSON lines for benchmarks.plots."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from benchmarks.collectives import record
from benchmarks.launch import UsageError
from benchmarks.peers.options import Options
from benchmarks.peers.registry import ALONE, PEERS
from benchmarks.peers.results import LATE, LATE_BOUND, End, Failed, Ratio, Row, Verdict

SCHEMA = "zcomm.peers/1"
_MEGA = 1e6

Outcome = Row | Failed


def table(outcomes: Mapping[str, Outcome], absent: Mapping[str, str], title: str) -> Table:
    """Return the table: a line for every peer, also for those that did not run."""
    made = Table(title=title)
    made.add_column("peer")
    for name in _COLUMNS:
        made.add_column(name, justify="right")
    for peer in (ALONE, *PEERS.values()):
        if peer.name in absent:
            made.add_row(peer.title, "absent")
        elif isinstance(outcome := outcomes.get(peer.name), Failed):
            made.add_row(peer.title, "failed")
        elif outcome is not None:
            made.add_row(peer.title, *_cells(outcome))
    made.caption = "link MB: bytes leaving a node per step, by its interface; counted: by zcomm"
    return made


_COLUMNS = (
    "tokens/s",
    "step s",
    "compute s",
    "comm. s",
    "other s",
    "link MB",
    "counted MB",
    "peak MB",
    "loss",
)


def _cells(row: Row) -> list[str]:
    counted = "-" if row.counted_bytes is None else f"{row.counted_bytes / _MEGA:.2f}"
    return [
        f"{row.tokens_per_s:.1f}",
        f"{row.step_s:.3f}",
        f"{row.compute_s:.3f}",
        f"{row.comm_s:.3f}",
        f"{row.other_s:.3f}",
        f"{row.link_bytes / _MEGA:.2f}",
        counted,
        f"{row.peak_rss / _MEGA:.0f}",
        "-" if row.name == ALONE.name else f"{row.loss:.4f}",
    ]


def ratio_line(ratio: Ratio) -> str:
    """Return one line about two peers."""
    ours, theirs = PEERS[ratio.name].title, PEERS[ratio.baseline].title
    line = f"{ours} / {theirs}: {ratio.speed:.2f} times the tokens/s"
    return line if ratio.link is None else f"{line}, {ratio.link:.3f} of the link bytes"


def verdict_line(verdict: Verdict) -> str:
    """Return one line about the losses of two peers."""
    word = "OK" if verdict.holds else "FAILED"
    ours, theirs = PEERS[verdict.name].title, PEERS[verdict.reference].title
    return (
        f"{word}: losses of {ours} are those of {theirs} within {verdict.bound:.1%}"
        f" ({verdict.difference:+.2%} where they differ most)"
    )


def end_line(end: End) -> str:
    """Return one line about what a long training has learnt."""
    word = "OK" if end.holds else "FAILED"
    ours, theirs = PEERS[end.name].title, PEERS[end.reference].title
    return (
        f"{word}: loss of {ours} from {end.first:.4f} to {end.last:.4f}, the mean of the last"
        f" {LATE} steps, that of {theirs} to {end.expected:.4f}:"
        f" within {LATE_BOUND:.1%} ({end.difference:+.3%})"
    )


def open_new(path: Path | None) -> TextIO | None:
    """Open the file that was asked for, which must be new.

    Raises:
        UsageError: it exists, or cannot be made.
    """
    try:
        return None if path is None else path.open("x", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-J {path}: {error.strerror}; give a file that can be created") from None


def header(options: Options, numel: int, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return the header object."""
    asked = asdict(options) | {
        "data": str(options.data or "standard library"),
        "json": str(options.json),
    }
    return {
        "kind": "header",
        "schema": SCHEMA,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": record.versions(),
        "peers": dict(versions),
        "machine": {"cpu": record.cpu_name(), "cores": os.cpu_count()},
        "environment": record.environment(),
        "options": asked,
        "parameters": numel,
    }


def rows(outcomes: Mapping[str, Outcome], absent: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return an object for every peer: ``row``, ``failed`` or ``absent``."""
    objects: list[dict[str, Any]] = [
        {"kind": "failed" if isinstance(outcome, Failed) else "row", "name": name} | asdict(outcome)
        for name, outcome in outcomes.items()
    ]
    return objects + [
        {"kind": "absent", "name": name, "reason": reason} for name, reason in absent.items()
    ]


def closing(
    ratios: Sequence[Ratio], verdicts: Sequence[Verdict], ends: Sequence[End]
) -> dict[str, Any]:
    """Return the closing object."""
    return {
        "kind": "end",
        "ratios": [asdict(ratio) for ratio in ratios],
        "losses": [asdict(verdict) | {"holds": verdict.holds} for verdict in verdicts],
        "ends": [asdict(end) | {"holds": end.holds} for end in ends],
    }


def write(file: TextIO | None, item: dict[str, Any]) -> None:
    """Append an object, if there is a file."""
    if file is not None:
        file.write(json.dumps(item) + "\n")
        file.flush()
