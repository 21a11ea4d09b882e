"""What is printed, and the JSON lines: a header, then for every case its rows and verdicts.

Rows start with the size, every other line with ``#``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.wire.others import NOISY
from benchmarks.wire.targets import Measured, Verdict, fastest

SCHEMA = "zcomm.wire/1"
_MILLI = 1e3
_ABSENT = "-"


@dataclass(frozen=True)
class Row:
    """A variant's measurement; seconds of every call, and bytes of one call.

    ``level_nbytes``: wire bytes by level, innermost first, of the node that sends most: what zcomm
    counts itself. ``interface_nbytes``: what left the busiest node by its interface, headers
    included, the median over calls. ``floor``: seconds, or None without a known link.
    """

    operation: str
    dtype: str
    nbytes: int
    name: str
    library: str
    codec: str | None
    algorithm: str | None
    seconds: tuple[float, ...]
    floor: float | None
    level_nbytes: tuple[int, ...] | None
    interface_nbytes: int | None
    num_wrong: int | None

    @property
    def median(self) -> float:
        """Median of the calls in seconds."""
        return median(self.seconds)

    def measured(self) -> Measured:
        """Return what targets are judged by."""
        return Measured(self.name, self.library, self.codec, self.median, self.floor)


@dataclass(frozen=True)
class Quality:
    """How far the figures of a case can be trusted.

    ``others``: the part of the machine's CPU time that other programs took; None where unknown.
    ``late``: calls that a rank started after their instant.
    """

    others: float | None
    late: int

    @property
    def noisy(self) -> bool:
        """Tell whether others took so much that the figures are not the machine's."""
        return self.others is not None and self.others > NOISY


def header() -> str:
    """Return the titles of the columns."""
    return (
        f"# {'bytes':>9}  {'variant':<22}{'ms':>9}{'min':>9}{'max':>9}{'floor':>9}{'x floor':>9}"
        f"{'gloo':>8}{'MPI':>8}{'left MB':>9}{'#wrong':>8}"
    )


def line(row: Row, rows: Sequence[Row]) -> str:
    """Return a row of the table; ratios say how many times as fast as the peer's best."""
    times = [f"{x * _MILLI:9.3f}" for x in (row.median, min(row.seconds), max(row.seconds))]
    floor, times_floor = f"{_ABSENT:>9}", f"{_ABSENT:>9}"
    if row.floor:
        floor, times_floor = f"{row.floor * _MILLI:9.3f}", f"{row.median / row.floor:9.3f}"
    everyone = [each.measured() for each in rows]
    peers = [_against(row, fastest(everyone, (library,))) for library in ("gloo", "mpi")]
    left = _ABSENT if row.interface_nbytes is None else f"{row.interface_nbytes / 1e6:.3f}"
    wrong = "N/A" if row.num_wrong is None else str(row.num_wrong)
    return (
        f"{row.nbytes:11d}  {row.name:<22}{''.join(times)}{floor}{times_floor}"
        f"{''.join(peers)}{left:>9}{wrong:>8}"
    )


def _against(row: Row, peer: Measured | None) -> str:
    return f"{_ABSENT:>8}" if peer is None else f"{peer.median / row.median:8.2f}"


def verdict_line(verdict: Verdict) -> str:
    """Return what a target asks and what was measured."""
    reached = "reached" if verdict.reached else "missed"
    return (
        f"# target {verdict.target.describe()}: {verdict.ratio:.3f} "
        f"({verdict.name} against {verdict.against}), {reached}"
    )


def quality_line(quality: Quality) -> str:
    """Return how far the figures above can be trusted."""
    if quality.others is None:
        taken = "CPU time of other programs: unknown"
    else:
        taken = f"CPU time of other programs: {quality.others:.1%} of the machine"
    noisy = ", NOISY: measure again" if quality.noisy else ""
    late = f", {quality.late} calls began late" if quality.late else ""
    return f"# {taken}{noisy}{late}"


def row_object(row: Row, where: dict[str, Any], quality: Quality) -> dict[str, Any]:
    """Return the JSON object of a row; ``where``: nodes, ranks and the link."""
    return {
        "kind": "row",
        **where,
        **asdict(row),
        "median": row.median,
        "others": quality.others,
        "noisy": quality.noisy,
    }


def verdict_object(verdict: Verdict, where: dict[str, Any], nbytes: int) -> dict[str, Any]:
    """Return the JSON object of a verdict."""
    target = verdict.target
    return {
        "kind": "target",
        **where,
        "operation": target.operation,
        "dtype": target.dtype,
        "nbytes": nbytes,
        "codec": target.codec,
        "name": verdict.name,
        "aimed_against": list(target.against),
        "against": verdict.against,
        "aimed": target.ratio,
        "ratio": verdict.ratio,
        "reached": verdict.reached,
    }
