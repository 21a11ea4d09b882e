"""The tables on the screen, the picture of the loss curves, and the JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed, nor may one be looked for under mpirun

from matplotlib import pyplot
from matplotlib.axes import Axes
from rich.table import Table

from benchmarks.collectives.table import Result
from benchmarks.training.schemes import SCHEMES, STAGE_3, Scheme
from benchmarks.training.theory import Expected
from benchmarks.training.train import Trained
from benchmarks.training.verdicts import Verdict
from topology import Topology

_MEGA = 1e6
SCHEMA = "zcomm.training/1"


def collectives_table(results: Sequence[Result]) -> Table:
    """Return the short table of collectives."""
    size = results[0].case.size / 2**20
    table = Table(
        title=f"Collectives of {size:g} MiB {results[0].case.dtype.name}, checked bit for bit"
    )
    for name in ("operation", "algorithm", "codec"):
        table.add_column(name)
    for name in (
        "time ms",
        "algbw GB/s",
        "inside MB",
        "between MB",
        "ratio",
        "rms error",
        "#wrong",
    ):
        table.add_column(name, justify="right")
    for result in results:
        case, timing, outcome = result.case, result.timing, result.outcome
        assert outcome is not None
        table.add_row(
            case.operation.name,
            case.algorithm,
            str(case.codec or "none"),
            f"{timing.seconds * 1e3:.1f}",
            f"{result.algbw / 1e9:.2f}",
            f"{timing.inside_nbytes / _MEGA:.2f}",
            f"{timing.between_nbytes / _MEGA:.2f}",
            "-" if timing.ratio is None else f"{timing.ratio:.2f}",
            f"{outcome.rms_error:.1e}",
            str(outcome.num_wrong),
        )
    table.caption = (
        "MB: wire bytes that a rank sends in one operation, inside its node and between nodes"
    )
    return table


def side_by_side(
    results: Mapping[str, Trained], expected: Mapping[str, Expected], topology: Topology
) -> Table:
    """Return the table of the three trainings, each figure beside theory."""
    table = Table(title=f"One training, three ways: {topology.describe()}")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
        table.add_column("theory", justify="right", style="dim")
    num_ranks_per_node = topology.size / num_nodes(topology)

    def add(
        title: str, counted: Callable[[Trained], str], theory: Callable[[Expected], str]
    ) -> None:
        pairs = ((counted(results[name]), theory(expected[name])) for name in results)
        table.add_row(title, *(cell for pair in pairs for cell in pair))

    def megabytes(nbytes: float) -> str:
        return f"{nbytes / _MEGA:.3f}"

    add("final loss, nats per byte", lambda t: f"{t.losses[-1]:.4f}", lambda _: "")
    add("tokens/s", lambda t: f"{t.tokens_per_second:.0f}", lambda _: "")
    add(
        "wire MB per step inside a node",
        lambda t: megabytes(inside(t.levels) * num_ranks_per_node),
        lambda e: megabytes(e.inside * num_ranks_per_node),
    )
    add(
        "wire MB per step between nodes, a node",
        lambda t: megabytes(between(t.levels) * num_ranks_per_node),
        lambda e: megabytes(e.between * num_ranks_per_node),
    )
    add("model states MB, a rank", lambda t: megabytes(t.states), lambda e: megabytes(e.states))
    add("secondary MB, a rank", lambda t: megabytes(t.secondary), lambda e: megabytes(e.secondary))
    table.caption = (
        "wire MB: what all ranks of a node send, in 10^6 bytes; theory has no padding in it"
    )
    return table


def num_nodes(topology: Topology) -> int:
    """Return the number of nodes: groups of the last level but one, or one."""
    return len(topology.levels[-2].groups) if len(topology.levels) > 1 else 1


def inside(levels: Sequence[float]) -> float:
    """Return what is sent inside nodes, of bytes per level."""
    return sum(levels[:-1]) if len(levels) > 1 else levels[0]


def between(levels: Sequence[float]) -> float:
    """Return what is sent between nodes, of bytes per level."""
    return levels[-1] if len(levels) > 1 else 0.0


def draw(path: Path, results: Mapping[str, Trained], title: str) -> None:
    """Draw the loss curves, and below them their distance from stage 3 in per cent."""
    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    styles = {
        "stage 0": ("#9ecae1", "-", 6.0),
        "stage 3": ("#08519c", "-", 2.0),
        "ZeRO++": ("#d94801", "--", 1.6),
    }
    reference = results[STAGE_3.name].losses
    for name, trained in results.items():
        color, line, width = styles[name]
        steps = range(1, len(trained.losses) + 1)
        look = {
            "color": color,
            "linestyle": line,
            "linewidth": width,
            "label": name,
        }
        above.plot(steps, trained.losses, **look)
        pairs = zip(trained.losses, reference, strict=True)
        below.plot(steps, [100 * (loss / exact - 1) for loss, exact in pairs], **look)
    _label(above, below)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _label(above: Axes, below: Axes) -> None:
    above.set_ylabel("training loss (nats per byte)")
    above.legend()
    below.set_ylabel("from stage 3 (%)")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)


def write_json(
    path: Path,
    header: Mapping[str, Any],
    collectives: Sequence[Mapping[str, Any]],
    results: Mapping[str, Trained],
    expected: Mapping[str, Expected],
    verdicts: Sequence[Verdict],
) -> None:
    """Write everything that was counted, and what theory says, to a file."""
    content = {
        "schema": SCHEMA,
        **header,
        "collectives": list(collectives),
        "trainings": {
            scheme.name: {
                "config": _config(scheme),
                "counted": asdict(results[scheme.name]),
                "theory": asdict(expected[scheme.name]),
            }
            for scheme in SCHEMES
        },
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _config(scheme: Scheme) -> dict[str, str]:
    return {name: str(value) for name, value in vars(scheme.config).items() if value is not None}
