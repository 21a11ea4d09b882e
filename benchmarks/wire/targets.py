"""What is aimed at, as ratios of medians of one run, and where each holds.

A target names a variant by operation, type and codec, and what it is compared with: the floor of
the link, or the best of some libraries' exact variants. Missing one is no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FLOOR = "floor"
MEBI = 2**20


@dataclass(frozen=True)
class Place:
    """Where a target holds: nodes, ranks per node, nominal rate of the links in bit/s, sizes."""

    num_nodes: int
    ranks_per_node: int
    rate: int | None
    nbytes: int


@dataclass(frozen=True)
class Target:
    """Against the floor at most ``ratio`` times its time, against libraries at least as fast.

    ``against``: ``("floor",)``, or libraries, of which the fastest exact variant counts.
    """

    operation: str
    codec: str | None
    against: tuple[str, ...]
    ratio: float
    place: Place
    dtype: str = "bfloat16"

    def describe(self) -> str:
        """Return what is aimed at, in words."""
        name = f"{self.operation} {self.codec or 'exact'}"
        if self.against == (FLOOR,):
            return f"{name}: at most {self.ratio:g} x the floor"
        return f"{name}: at least {self.ratio:g} x as fast as {' or '.join(self.against)}"


@dataclass(frozen=True)
class Measured:
    """A variant's median and the floor of its bytes, in seconds."""

    name: str
    library: str
    codec: str | None
    median: float
    floor: float | None


@dataclass(frozen=True)
class Verdict:
    """A target, the ratio that was measured, and whether it is reached."""

    target: Target
    name: str
    against: str
    ratio: float

    @property
    def reached(self) -> bool:
        """Tell whether the ratio is at least, or at most, what is aimed at."""
        if self.target.against == (FLOOR,):
            return self.ratio <= self.target.ratio
        return self.ratio >= self.target.ratio


def _quantised(place: Place, scatter: float, gather: float) -> list[Target]:
    return [
        Target("reduce_scatter", "int4", (FLOOR,), scatter, place),
        Target("all_gather", "int8", (FLOOR,), gather, place),
    ]


def _table() -> tuple[Target, ...]:
    usual = Place(2, 2, 10**9, 8 * MEBI)
    floats = Place(2, 2, 10**9, 16 * MEBI)
    fast = Place(2, 2, 10**10, 8 * MEBI)
    exact = ("zcomm", "gloo", "mpi")
    targets = [
        Target("reduce_scatter", "int4", ("gloo",), 10, usual),
        Target("all_gather", "int8", ("gloo",), 3.1, usual),
        *_quantised(usual, 1.15, 1.06),
        Target("all_gather", None, ("gloo", "mpi"), 1.4, usual),
        Target("reduce_scatter", None, ("gloo",), 3, usual),
        Target("all_gather", None, (FLOOR,), 1.08, usual),
        Target("reduce_scatter", None, (FLOOR,), 1.08, usual),
        Target("reduce_scatter", None, ("mpi",), 2, floats, "float"),
        *_quantised(Place(2, 2, 2 * 10**8, 8 * MEBI), 1.03, 1.03),
        *_quantised(Place(2, 2, 10**9, 64 * MEBI), 1.03, 1.03),
        *_quantised(Place(2, 2, 10**9, MEBI), 1.5, 1.12),
        *_quantised(Place(4, 1, 10**9, 8 * MEBI), 1.2, 1.12),
        Target("all_gather", "int8", exact, 1.2, fast),
        Target("reduce_scatter", "int4", exact, 1.7, fast),
    ]
    machine = Place(1, 4, None, 64 * MEBI)
    for operation, ratio in (("all_gather", 1.3), ("reduce_scatter", 1.5), ("all_reduce", 1.8)):
        targets.append(Target(operation, None, ("mpi",), ratio, machine, "float"))
    targets.append(Target("all_gather", None, ("mpi",), 1.3, machine))
    return tuple(targets)


TARGETS = _table()


def judge(
    place: Place, operation: str, dtype: str, measured: Sequence[Measured]
) -> tuple[Verdict, ...]:
    """Return the verdicts that these measurements of one case allow, in the order of the table.

    Of several algorithms with one codec the fastest is judged.
    """
    verdicts = []
    for target in TARGETS:
        if (target.place, target.operation, target.dtype) != (place, operation, dtype):
            continue
        ours = [x for x in measured if x.library == "zcomm" and x.codec == target.codec]
        if ours and (verdict := _judge(target, min(ours, key=_median), measured)) is not None:
            verdicts.append(verdict)
    return tuple(verdicts)


def _median(measured: Measured) -> float:
    return measured.median


def _judge(target: Target, ours: Measured, measured: Sequence[Measured]) -> Verdict | None:
    if target.against == (FLOOR,):
        if not ours.floor:
            return None
        return Verdict(target, ours.name, FLOOR, ours.median / ours.floor)
    best = fastest(measured, target.against)
    if best is None:
        return None
    return Verdict(target, ours.name, best.name, best.median / ours.median)


def fastest(measured: Sequence[Measured], libraries: Sequence[str]) -> Measured | None:
    """Return the fastest exact variant of some libraries."""
    found = [x for x in measured if x.library in libraries and x.codec is None]
    return min(found, key=_median, default=None)
