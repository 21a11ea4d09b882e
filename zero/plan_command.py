"""``zcomm plan``: what a training would cost on a cluster that nobody has to own."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from zcomm.errors import ZcommError
from zero.config import Config
from zero.simulate import (
    DEVICES,
    FITTED,
    SCHEMES,
    STAGES,
    Cluster,
    Efficiency,
    Prediction,
    Rehearsed,
    Transformer,
)

GB = 1e9
SWEEP_GBIT = (10, 25, 50, 100, 200, 400, 800, 1600, 3200)


class PlanCommand:
    """``zcomm plan``: predict steps of all schemes on one cluster, or over rates of its network."""

    help = "predict step time, bytes and memory of ZeRO-3 and ZeRO++ on any cluster"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the model, the cluster, and what its resources reach."""
        parser.usage = argparse.SUPPRESS  # an error is one line
        add = parser.add_argument
        add("--model", type=float, required=True, help="parameters, as 18e9")
        add("--layers", type=int, required=True, help="blocks of the transformer")
        add("--vocabulary", type=int, default=50304, help="rows of the embedding (50304)")
        add("--nodes", type=int, required=True)
        add("--gpus-per-node", type=int, required=True, help="ranks that NVLink joins")
        add("--inter-gbit", type=float, required=True, help="of a node, all its links together")
        add("--tokens-per-gpu", type=int, required=True, help="in a step")
        add("--gpu", default="h200", help=f"one of {', '.join(DEVICES)} (h200)")
        add("--prefetch", type=int, default=1, help="as in zero.Config (1)")
        add("--stages", action="store_true", help="stages 0, 1 and 2 without codecs too")
        add("--no-recompute", action="store_true", help="no activation checkpointing")
        for name, value in asdict(FITTED).items():
            text = f"part of the data sheet that is reached ({value:g})"
            add(f"--{name}-efficiency", type=float, default=value, help=text)
        shown = parser.add_mutually_exclusive_group().add_argument
        shown("--json", action="store_true", help="print JSON instead of a table")
        shown(
            "--sweep",
            nargs="?",
            const=Path("plan.png"),
            type=Path,
            metavar="FILE",
            help="draw TFLOPs of all schemes over the rate of the network (plan.png)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the table, JSON, or write the picture; return 2 for arguments that cannot be."""
        try:
            cluster = Cluster(
                arguments.nodes, arguments.gpus_per_node, arguments.gpu, arguments.inter_gbit
            )
            model = Transformer.of_size(arguments.model, arguments.layers, arguments.vocabulary)
            efficiency = _efficiency(arguments)
            if arguments.tokens_per_gpu < 1:
                raise ValueError(
                    f"--tokens-per-gpu {arguments.tokens_per_gpu}: has to be 1 or more"
                )
            schemes = {**SCHEMES, **STAGES} if arguments.stages else SCHEMES
            rehearsed = rehearse_schemes(model, cluster, arguments.prefetch, schemes)
        except ValueError as error:
            print(f"zcomm plan: {error}", file=sys.stderr)
            return 2
        tokens, recompute = arguments.tokens_per_gpu, not arguments.no_recompute
        if arguments.sweep is not None:
            _sweep(arguments.sweep, rehearsed, cluster, efficiency, tokens, recompute)
            return 0
        found = {
            name: each.predict(cluster, efficiency, tokens=tokens, recompute=recompute)
            for name, each in rehearsed.items()
        }
        if arguments.json:
            print(as_json(model, cluster, efficiency, tokens, recompute, found))
            return 0
        console = Console(width=110, highlight=False)
        for line in heading(model, cluster, efficiency, tokens):
            console.print(line)
        console.print(table(found, cluster))
        return 0


def _efficiency(arguments: argparse.Namespace) -> Efficiency:
    values = {name: getattr(arguments, f"{name}_efficiency") for name in asdict(FITTED)}
    for name, value in values.items():
        if not 0 < value <= 1:
            raise ValueError(f"--{name}-efficiency {value:g}: has to be more than 0, at most 1")
    return Efficiency(**values)


def rehearse_schemes(
    model: Transformer,
    cluster: Cluster,
    prefetch: int = 1,
    schemes: Mapping[str, Config] = SCHEMES,
) -> dict[str, Rehearsed]:
    """Return a step of every scheme, by its name; units are gathered ahead in stage 3 only.

    Raises:
        ValueError: a prefetch below 0.
    """
    return {
        name: Rehearsed(model, replace(config, prefetch=prefetch), cluster.nodes, cluster.per_node)
        for name, config in schemes.items()
    }


def heading(model: Transformer, cluster: Cluster, efficiency: Efficiency, tokens: int) -> list[str]:
    """Return what the numbers below are of, and what they are not."""
    reached = ", ".join(f"{name} {value:.0%}" for name, value in asdict(efficiency).items())
    return [
        f"{_words(model, tokens)}; {cluster.nodes} nodes of {cluster.per_node} {cluster.device},"
        f" {cluster.inter_gbit:g} Gbit/s a node",
        f"A prediction, not a measurement. Of data sheets is reached: {reached}.",
    ]


def _words(model: Transformer, tokens: int) -> str:
    return (
        f"{model.numel:.4g} parameters ({model.layers} layers of width {model.hidden}), {tokens}"
        " tokens per GPU"
    )


def table(found: Mapping[str, Prediction], cluster: Cluster) -> Table:
    """Return a row for each scheme; GB (10^9 bytes) are those that one GPU sends, or holds.

    ``> 141`` behind its memory: it has no more.
    """
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("")
    for name in ("step s", "TFLOPs/GPU", "speed-up", "inside GB", "network GB", "memory GB"):
        made.add_column(name, justify="right")
    made.add_column("busiest, of the step")
    base = next(iter(found.values())).seconds
    for name, each in found.items():
        inside, network = (nbytes / GB for nbytes in each.nbytes)
        share = each.busy[each.bottleneck] / each.seconds
        room = DEVICES[cluster.device].memory_nbytes
        made.add_row(
            name,
            f"{each.seconds:.3g}",
            f"{each.flops / 1e12:.1f}",
            f"{base / each.seconds:.2f}",
            f"{inside:.1f}",
            f"{network:.2f}",
            f"{each.memory.peak / GB:.1f}"
            + (f" > {room / GB:g}" if each.memory.peak > room else ""),
            f"{each.bottleneck} {share:.0%}",
        )
    return made


def as_json(
    model: Transformer,
    cluster: Cluster,
    efficiency: Efficiency,
    tokens: int,
    recompute: bool,
    found: Mapping[str, Prediction],
) -> str:
    """Return the table as JSON, in bytes, seconds and operations per second."""
    schemes = {
        name: {
            "seconds": each.seconds,
            "flops": each.flops,
            "nbytes": each.nbytes,
            "memory_nbytes": each.memory.peak,
            "busy_seconds": dict(each.busy),
            "bottleneck": each.bottleneck,
        }
        for name, each in found.items()
    }
    document = {
        "prediction": True,
        "model": {**asdict(model), "numel": model.numel},
        "cluster": asdict(cluster),
        "efficiency": asdict(efficiency),
        "tokens": tokens,
        "recompute": recompute,
        "schemes": schemes,
    }
    return json.dumps(document, indent=1)


def _sweep(
    path: Path,
    rehearsed: Mapping[str, Rehearsed],
    cluster: Cluster,
    efficiency: Efficiency,
    tokens: int,
    recompute: bool,
) -> None:
    given = cluster.inter_gbit
    rates = sorted([given, *(rate for rate in SWEEP_GBIT if not 0.7 < rate / given < 1.4)])
    lines = {}
    for name, each in rehearsed.items():
        clusters = [replace(cluster, inter_gbit=rate) for rate in rates]
        lines[name] = [
            each.predict(one, efficiency, tokens=tokens, recompute=recompute).flops / 1e12
            for one in clusters
        ]
    *_, model = (each.model for each in rehearsed.values())
    title = f"{_words(model, tokens)}\n{cluster.nodes} nodes of {cluster.per_node} {cluster.device}"
    draw(path, rates, lines, title)
    print(f"wrote {path}: TFLOPs per GPU over {rates[0]:g} to {rates[-1]:g} Gbit/s of a node")


def draw(
    path: Path, rates: Sequence[float], lines: Mapping[str, Sequence[float]], title: str
) -> None:
    """Write a picture of TFLOPs over rates.

    Raises:
        ZcommError: matplotlib is not there.
        ValueError: a suffix that is no format of pictures.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ZcommError(
            "--sweep draws with matplotlib, which is not installed: pip install 'zcomm[bench]'"
        ) from None
    drawn = Figure(figsize=(8, 4.8), layout="constrained")
    axes = drawn.add_subplot()
    for number, (name, values) in enumerate(lines.items()):
        color, style = _COLORS[number % len(_COLORS)], "-" if name in SCHEMES else "--"
        axes.plot(rates, values, label=name, color=color, ls=style, marker="o", markersize=3)
    axes.set_xscale("log")
    axes.set_xticks(list(rates), [f"{rate:g}" for rate in rates])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("Gbit/s of a node")
    axes.set_ylabel("TFLOPs per GPU, predicted")
    axes.set_title(title, loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    drawn.savefig(path, dpi=150)


# Okabe and Ito (2008), which colour-blind readers tell apart; one for each scheme.
_COLORS = ("#222222", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#56B4E9", "#D55E00")

PLAN = PlanCommand()
