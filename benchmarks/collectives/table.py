"""The table: columns of the NCCL tests, then zcomm's. Lines that are not rows start with ``#``.

zcomm's operations work either out of place or in place; the columns of the placement that an
operation does not have hold ``N/A``, so that every column stays where parsers look for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.collectives.cases import Case
from benchmarks.collectives.check import Outcome
from benchmarks.collectives.measure import Timing

_GIGA = 1e9
_MICRO = 1e-6


@dataclass(frozen=True)
class Result:
    """One row's answer. ``outcome`` is None where nothing was checked."""

    case: Case
    timing: Timing
    outcome: Outcome | None

    @property
    def algbw(self) -> float:
        """Bytes of the whole buffer per second."""
        return self.case.size / self.timing.seconds

    @property
    def busbw(self) -> float:
        """Bandwidth that each rank's link must at least have given, in logical bytes per second."""
        return self.case.busbw(self.algbw)


# (title, unit, width): the question, the answer (once per placement), and what zcomm adds.
_CASE = (
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("type", "", 8),
    ("redop", "", 6),
    ("root", "", 6),
)
_ANSWER = (("time", "(us)", 7), ("algbw", "(GB/s)", 6), ("busbw", "(GB/s)", 6), ("#wrong", "", 6))
_ADDED = (
    ("inside", "(B)", 12),
    ("between", "(B)", 12),
    ("ratio", "", 6),
    ("encode", "(us)", 8),
    ("comm", "(us)", 8),
    ("decode", "(us)", 8),
    ("max_rel", "", 8),
    ("rms_rel", "", 8),
)
_GAP = "  "
_ABSENT = "N/A"


def number(value: float, width: int) -> str:
    """Write a number with two decimals, or as many as fit, or else with an exponent."""
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:.0e}"


def header() -> list[str]:
    """Return the three comment lines above the rows."""
    placement_width = _width(_ANSWER)
    above = " " * _width(_CASE)
    for title in ("out-of-place", "in-place"):
        above += _GAP + title.center(placement_width)
    above += _GAP + "wire bytes a rank sends, time, error".center(_width(_ADDED))
    columns = (*_CASE, *_ANSWER, *_ANSWER, *_ADDED)
    titles = _GAP.join(title.rjust(width) for title, _, width in columns)
    units = _GAP.join(unit.rjust(width) for _, unit, width in columns)
    return ["#" + line[1:].rstrip() for line in (above, titles, units)]


def _width(columns: tuple[tuple[str, str, int], ...]) -> int:
    return sum(width for _, _, width in columns) + len(_GAP) * (len(columns) - 1)


def row(result: Result) -> str:
    """Return the row of a result."""
    case = result.case
    asked = [str(case.size), str(case.count), case.dtype.name, case.op or "none"]
    asked.append("-1" if case.root is None else str(case.root))
    placements = [_answer(result), [_ABSENT] * len(_ANSWER)]
    if case.operation.in_place:
        placements.reverse()
    cells = [*asked, *placements[0], *placements[1], *_added(result)]
    columns = (*_CASE, *_ANSWER, *_ANSWER, *_ADDED)
    return _GAP.join(cell.rjust(width) for cell, (_, _, width) in zip(cells, columns, strict=True))


def _answer(result: Result) -> list[str]:
    values = (result.timing.seconds / _MICRO, result.algbw / _GIGA, result.busbw / _GIGA)
    wrong = _ABSENT if result.outcome is None else str(result.outcome.num_wrong)
    return [
        *(number(value, width) for value, (_, _, width) in zip(values, _ANSWER, strict=False)),
        wrong,
    ]


def _added(result: Result) -> list[str]:
    timing, outcome = result.timing, result.outcome
    times = (timing.encode, timing.comm, timing.decode)
    return [
        str(timing.inside_nbytes),
        str(timing.between_nbytes),
        _ABSENT if timing.ratio is None else number(timing.ratio, 6),
        *(number(seconds / _MICRO, 8) for seconds in times),
        *(_errors(outcome) if outcome else (_ABSENT, _ABSENT)),
    ]


def _errors(outcome: Outcome) -> tuple[str, str]:
    return f"{outcome.max_error:.1e}", f"{outcome.rms_error:.1e}"
