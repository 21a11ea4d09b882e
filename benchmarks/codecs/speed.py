"""The time of a case beside that of its yardsticks, and the table of it.

*GB/s* counts the bytes that a kernel reads and writes, *copy* those of a copy of the float32
elements; *ratio* is the first divided by the second, the median over rounds in which all are timed
one after the other, *best* the largest of them. */int8* compares elements per second with those of
encoding float32 to int8 in the same rounds, where a target is about that. Rows start with a number,
every other line with ``#``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from benchmarks.codecs.calls import differs, prepare
from benchmarks.codecs.cases import CASES, ENCODE_INT8, Case, Target
from benchmarks.codecs.lines import write
from benchmarks.codecs.options import Options
from benchmarks.codecs.places import Call, Place, ones

TargetOf = Callable[[Case], Target | None]

HEADER = (
    f"#{'numel':>11} {'kernel':>20} {'dtype':>8} {'wires':>5} {'codec':>24}"
    f" {'GB/s':>8} {'Gelem/s':>8} {'copy':>8} {'ratio':>6} {'best':>6} {'/int8':>6}"
    f" {'target':>9} {'reached':>7}"
)


@dataclass(frozen=True)
class Result:
    """What one case gave; speeds in 1e9 bytes or elements per second, ratios are medians."""

    case: Case
    numel: int
    nbytes: int
    gb_per_s: float
    gelem_per_s: float
    copy_gb_per_s: float
    ratio: float
    best_ratio: float
    of_int8: float | None
    target: Target | None

    @property
    def reached(self) -> bool | None:
        """Whether the median meets the target; None where there is no target."""
        if self.target is None:
            return None
        figure = self.of_int8 if self.target.of_int8 else self.ratio
        return figure is not None and figure >= self.target.ratio

    def row(self) -> str:
        """Return the line under :data:`HEADER`."""
        case, of_int8 = self.case, "-" if self.of_int8 is None else f"{self.of_int8:.2f}"
        return (
            f"{self.numel:12d} {case.kernel:>20} {case.dtype:>8} {case.wires:5d} {case.codec:>24}"
            f" {self.gb_per_s:8.2f} {self.gelem_per_s:8.2f} {self.copy_gb_per_s:8.2f}"
            f" {self.ratio:6.2f} {self.best_ratio:6.2f} {of_int8:>6}"
            f" {self.target or '-'!s:>9} {_WORDS[self.reached]:>7}"
        )

    def item(self) -> dict[str, Any]:
        """Return the object of a line of JSON."""
        return {**asdict(self), "reached": self.reached}


_WORDS = {True: "yes", False: "NO", None: "-"}


@dataclass(frozen=True)
class Bench:
    """What is the same for all cases of a run."""

    place: Place
    numel: int
    repeats: int
    target: TargetOf
    copy: Call

    def measure(self, case: Case) -> Result:
        """Time a case, its copy and, if its target asks for it, the encoding to int8."""
        target = self.target(case)
        prepared = prepare(case, self.place, self.numel, self.place)
        calls = [self.copy, prepared.call]
        if target and target.of_int8:
            calls.append(prepare(ENCODE_INT8, self.place, self.numel, self.place).call)
        copy, kernel, *int8 = self._rounds(calls)
        ratios = [
            prepared.nbytes / own / (8 * self.numel / other)
            for own, other in zip(kernel, copy, strict=True)
        ]
        seconds = statistics.median(kernel)
        return Result(
            case=case,
            numel=self.numel,
            nbytes=prepared.nbytes,
            gb_per_s=prepared.nbytes / seconds / 1e9,
            gelem_per_s=self.numel / seconds / 1e9,
            copy_gb_per_s=8 * self.numel / statistics.median(copy) / 1e9,
            ratio=statistics.median(ratios),
            best_ratio=max(ratios),
            of_int8=_median_ratio(int8[0], kernel) if int8 else None,
            target=target,
        )

    def _rounds(self, calls: Sequence[Call]) -> list[tuple[float, ...]]:
        """Return the seconds of every call in every round; the first round is not counted."""
        rounds = [[self.place.seconds(call) for call in calls] for _ in range(self.repeats + 1)]
        return list(zip(*rounds[1:], strict=True))


def run(place: Place, target: TargetOf, options: Options) -> int:
    """Compare every case asked for with the reference and time it; return the exit code."""
    print(f"# codec kernels: {place.title}, {date.today()}")
    print(f"# copy of {4 * options.numel} bytes; ratio, best and target are parts of its speed")
    print(HEADER)
    measuring = bench(place, target, numel=options.numel, repeats=options.repeats)
    results, wrong = [], []
    for case in CASES:
        if options.kernel not in ("all", case.kernel):
            continue
        if differs(case, place):
            wrong.append(case)
        results.append(measuring.measure(case))
        print(results[-1].row(), flush=True)
    if options.json:
        write(options.json, [result.item() for result in results])
    for case in wrong:
        print(f"# WRONG: {case} differs from the reference")
    print(f"# {len(wrong)} of {len(results)} differ from the reference")
    judged = [result.reached for result in results if result.reached is not None]
    print(f"# {sum(judged)} of {len(judged)} targets reached")
    return 1 if wrong else 0


def bench(place: Place, target: TargetOf, *, numel: int, repeats: int) -> Bench:
    """Return what measures cases of ``numel`` elements in one place."""
    source, copied = place.put(ones(4 * numel)), place.put(ones(4 * numel))
    return Bench(place, numel, repeats, target, place.copy(copied, source))


def _median_ratio(others: Sequence[float], own: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(others, own, strict=True))
