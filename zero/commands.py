"""``zcomm memory``: what a training needs on each rank, before there is one."""

from __future__ import annotations

import argparse

from rich import box
from rich.console import Console
from rich.table import Table

from zero.config import Config
from zero.estimate import Estimate, Model, estimate
from zero.offload_estimate import PLACES, Offload, Offloaded, offloaded

GB = 1e9

ROWS = (
    ("parameters", "parameters"),
    ("gradients", "gradients"),
    ("masters", "float32 masters"),
    ("optimizer", "optimizer states"),
    ("model_states", "model states"),
    ("secondary", "+ secondary (hpZ)"),
    ("waiting", "+ sums of the node"),
    ("residuals", "+ residuals"),
    ("held", "held before the step"),
    ("whole_units", "+ whole units"),
    ("local_gradients", "+ local gradients"),
    ("codec_buffers", "+ codec buffers"),
    ("peak", "peak, no activations"),
)
PLACE_ROWS = (("device", "device, at the peak"), ("host", "host"), ("disk", "disk"))
TOTALS = ("model_states", "held", "peak")


class MemoryCommand:
    """``zcomm memory``: print bytes of each rank, of all stages or of one configuration."""

    help = "say how many bytes a training needs on each rank"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare sizes of the model and the job, and the fields of ``zero.Config``."""
        add = parser.add_argument
        add("--params", type=float, required=True, help="parameters of the model, 7.5e9")
        add("--ranks", type=int, required=True)
        add("--ranks-per-node", type=int, help="by default 8, or all ranks where fewer")
        add("--stage", type=int, choices=range(4), help="by default all")
        add("--largest-unit", type=float, default=0, help="its parameters, for the peak")
        add("--root-unit", type=float, default=0, help="parameters of the root, for the peak")
        add("--itemsize", type=int, choices=(2, 4), default=2, help="bytes of a parameter")
        add("--states", type=int, default=2, help="float32 states of the optimizer; Adam has 2")
        add("--weights", help="codec of the parameters")
        add("--grads", action="append", help="codec of the gradients; twice: innermost first")
        add("--secondary", help="node, persistent, or ranks of a group (stage 3)")
        add("--secondary-codec", help="that of --weights: the secondary holds codes")
        add("--accumulate", choices=("rank", "node"), default="rank")
        add("--grads-feedback", action="store_true")
        add("--prefetch", type=int, default=1)
        papers = "by the papers' formulas (stages 2 and 3)"
        add("--offload-optimizer", choices=PLACES, help=f"with the gradients, {papers}")
        add("--offload-params", choices=PLACES, help="by ZeRO-Infinity's formula (stage 3)")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the table: a column for each stage."""
        num_ranks = arguments.ranks
        per_node = arguments.ranks_per_node or min(8, max(num_ranks, 1))
        model = Model(
            arguments.params,
            arguments.largest_unit,
            arguments.root_unit,
            arguments.itemsize,
            arguments.states,
        )
        stages = range(4) if arguments.stage is None else [arguments.stage]
        configs = [self._config(arguments, stage) for stage in stages]
        columns = [
            estimate(config, model, num_ranks=num_ranks, ranks_per_node=per_node)
            for config in configs
        ]
        offload = Offload(arguments.offload_optimizer, arguments.offload_params)
        placed = {
            config.stage: offloaded(offload, config, model, found, num_ranks=num_ranks)
            for config, found in zip(configs, columns, strict=True)
            if offload != Offload()
            if offload.possible(config.stage) or arguments.stage is not None
        }
        console = Console(width=100, highlight=False)
        console.print(
            f"{model.numel:g} parameters, {num_ranks} ranks, {per_node} a node; GB of each rank"
        )
        console.print(table(list(stages), columns))
        if placed:
            console.print(
                "Offload as ZeRO-Offload (stage 2) and ZeRO-Infinity (stage 3) have it, without"
                " buffers of\ntransfers; zero itself cannot offload yet"
            )
            console.print(places(placed))
        return 0

    def _config(self, arguments: argparse.Namespace, stage: int) -> Config:
        """Return the configuration; with all stages, each has of the fields what it can have."""
        every = arguments.stage is None
        secondary = arguments.secondary
        if secondary is not None and secondary.isdecimal():
            secondary = int(secondary)
        coded = stage > 0 or not every
        sharded = stage == 3 or not every
        return Config(
            stage=stage,
            weights=arguments.weights if coded else None,
            grads=tuple(arguments.grads) if arguments.grads else None,
            secondary=secondary if sharded else None,
            secondary_codec=arguments.secondary_codec if sharded else None,
            accumulate=arguments.accumulate,
            grads_feedback=arguments.grads_feedback,
            prefetch=arguments.prefetch,
        )


def table(stages: list[int], columns: list[Estimate]) -> Table:
    """Return the rows that are not zero everywhere, in GB (10^9 bytes)."""
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("")
    for stage in stages:
        made.add_column(f"stage {stage}", justify="right")
    for name, label in ROWS:
        values = [getattr(column, name) for column in columns]
        if any(values):
            style = "bold" if name in TOTALS else None
            made.add_row(label, *map(gigabytes, values), style=style)
    return made


def places(columns: dict[int, Offloaded]) -> Table:
    """Return where the bytes of each stage lie, in GB (10^9 bytes)."""
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("")
    for stage in columns:
        made.add_column(f"stage {stage}", justify="right")
    for name, label in PLACE_ROWS:
        made.add_row(label, *(gigabytes(getattr(column, name)) for column in columns.values()))
    return made


def gigabytes(nbytes: float) -> str:
    """Return GB as the paper prints them: 120, 41.3 (of 41.25), 1.88."""
    value = nbytes / GB * (1 + 1e-12)
    if value >= 100:
        return f"{value:.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


MEMORY = MemoryCommand()
