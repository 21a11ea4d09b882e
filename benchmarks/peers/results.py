"""From the reports of ranks to the row of a peer, to ratios, and to a verdict on the losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.rank import Report
from benchmarks.peers.registry import BASELINES, PEERS, Peer

EXACT_BOUND = 0.005
"""Of losses of exact peers: they round to bfloat16 in different places, and sum in other orders."""

QUANTISED_BOUND = 0.02

LONG = 100
"""Steps from which on a training's end is judged too: the mean loss of the ``LATE`` last steps."""

LATE = 20
LATE_BOUND = 0.01


@dataclass(frozen=True)
class Failed:
    """Why a peer has no row, though it could run."""

    reason: str


@dataclass(frozen=True)
class Row:
    """One peer.

    Attributes:
        step_s: the median step, of the rank that was slowest in it.
        compute_s: of it, busy for what the training alone is busy; see ``other_s``.
        comm_s: of it, waiting for communication; the mean over ranks.
        other_s: of it, busy beyond ``compute_s``: what sharding adds on the training's thread.
        link_bytes: that left a node per step, the mean over nodes.
        counted_bytes: those of them that the ranks say to have sent; None where they do not.
        peak_rss: bytes of the rank with most, in the measured steps.
        losses: of all steps, the mean over ranks; ``loss`` is the last.
    """

    name: str
    step_s: float
    compute_s: float
    comm_s: float
    other_s: float
    tokens_per_s: float
    link_bytes: float
    counted_bytes: float | None
    peak_rss: int
    loss: float
    losses: tuple[float, ...]


def merge(
    name: str, reports: Sequence[Report], *, tokens: int, alone_s: float | None = None
) -> Row:
    """Return the row of a peer.

    Args:
        name: of the peer.
        reports: of all its ranks.
        tokens: of a step, all ranks together.
        alone_s: busy seconds of a step without communication; None for that training itself.
    """
    per_step = list(zip(*(report.steps for report in reports), strict=True))
    step = statistics.median(max(wall for wall, _, _ in ranks) for ranks in per_step)
    share = statistics.median(_busy_share(ranks) for ranks in per_step)
    busy = share * step
    compute = busy if alone_s is None else min(busy, alone_s)
    first = [report for report in reports if report.local_rank == 0]
    counted = [r.counted_nbytes for r in reports if r.counted_nbytes is not None]
    per_node = len(first) * len(per_step)
    losses = tuple(map(statistics.fmean, zip(*(r.losses for r in reports), strict=True)))
    return Row(
        name,
        step,
        compute,
        step - busy,
        busy - compute,
        tokens / step,
        sum(report.link_nbytes for report in first) / per_node,
        sum(counted) / per_node if counted else None,
        max(report.peak_nbytes for report in reports),
        losses[-1],
        losses,
    )


def _busy_share(ranks: Sequence[tuple[float, float, float]]) -> float:
    """Return the part of a step that threads were on a core or waited for one."""
    wall = sum(wall for wall, _, _ in ranks)
    return min(1.0, sum(core + queue for _, core, queue in ranks) / wall)


@dataclass(frozen=True)
class Ratio:
    """One of our peers beside one of the others: ``speed`` in tokens/s, ``link`` in bytes."""

    name: str
    baseline: str
    speed: float
    link: float | None


def ratios(rows: Mapping[str, Row]) -> list[Ratio]:
    """Compare what zcomm carries with each baseline, as far as both have rows."""
    ours = [peer.name for peer in PEERS.values() if peer.ours and peer.name in rows]
    theirs = [peer.name for peer in BASELINES if peer.name in rows]
    return [_ratio(rows[name], rows[baseline]) for name in ours for baseline in theirs]


def _ratio(row: Row, baseline: Row) -> Ratio:
    link = row.link_bytes / baseline.link_bytes if baseline.link_bytes else None
    return Ratio(row.name, baseline.name, row.tokens_per_s / baseline.tokens_per_s, link)


@dataclass(frozen=True)
class Verdict:
    """Whether the losses of a peer are those of the reference, in every step."""

    name: str
    reference: str
    difference: float
    bound: float

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= self.bound


def _distance(difference: float) -> float:
    """Return how bad a difference is; nothing is worse than a loss that is no number."""
    return math.inf if math.isnan(difference) else abs(difference)


def judge(rows: Mapping[str, Row]) -> list[Verdict]:
    """Compare all peers with the first exact one, by the step in which they differ most."""
    reference, others = _reference(rows)
    verdicts = []
    for peer in others:
        pairs = zip(rows[peer.name].losses, reference.losses, strict=True)
        difference = max((loss / other - 1 for loss, other in pairs), key=_distance)
        bound = EXACT_BOUND if peer.exact else QUANTISED_BOUND
        verdicts.append(Verdict(peer.name, reference.name, difference, bound))
    return verdicts


def _reference(rows: Mapping[str, Row]) -> tuple[Row, list[Peer]]:
    """Return the row of the first exact peer, and the other peers that have rows, if any."""
    trained = [peer for peer in PEERS.values() if peer.name in rows]
    exact = next((peer for peer in trained if peer.exact), None)
    if exact is None:
        return next(iter(rows.values())), []
    return rows[exact.name], [peer for peer in trained if peer is not exact]


@dataclass(frozen=True)
class End:
    """How a long training ends beside the reference: mean losses of the ``LATE`` last steps."""

    name: str
    reference: str
    first: float
    last: float
    expected: float

    @property
    def difference(self) -> float:
        """Return by how much of it the loss is above the reference's."""
        return self.last / self.expected - 1

    @property
    def holds(self) -> bool:
        """Tell whether it has learnt, and as much as the reference."""
        return self.last < self.first and abs(self.difference) <= LATE_BOUND


def ends(rows: Mapping[str, Row]) -> list[End]:
    """Compare the ends of all peers' trainings with the first exact one's; none of short ones."""
    reference, others = _reference(rows)
    if len(reference.losses) < LONG:
        return []
    expected = statistics.fmean(reference.losses[-LATE:])
    return [
        End(name, reference.name, losses[0], statistics.fmean(losses[-LATE:]), expected)
        for name, losses in ((peer.name, rows[peer.name].losses) for peer in others)
    ]
