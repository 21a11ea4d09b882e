"""``zcomm memory``: what a training needs on each rank, before there is one."""

from __future__ import annotations

import argparse
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from zero.config import PLACES, Config
from zero.estimate import Estimate, Model, estimate
from zero.offload_estimate import Offloaded, offloaded
from zero.sizes import gigabytes, size_nbytes

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
    ("computing", "while units compute"),
    ("step_gradients", "or + float32 gradients"),
    ("peak", "peak, no activations"),
)
PLACE_ROWS = (
    ("device", "device, at the peak"),
    ("host", "host"),
    ("memory", "one memory for both"),
    ("disk", "disk"),
)
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
        add("--offload-optimizer", choices=PLACES, help="masters and states (stages 1-3)")
        add("--offload-params", choices=PLACES, help="shards of the parameters (stage 3)")
        add("--offload-numel", type=int, help="of a block of a step, with --offload-optimizer")
        add(
            "--limit",
            type=size_nbytes,
            help="memory that a rank may use, as 1.5GiB: exit code 1 where nothing printed fits",
        )
        add("--process", type=size_nbytes, help="of --limit, what Python and torch take")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the table: a column for each stage."""
        num_ranks = arguments.ranks
        per_node = arguments.ranks_per_node
        if per_node is None:
            per_node = min(8, max(num_ranks, 1))
        if arguments.offload_numel is None:
            arguments.offload_numel = Config.offload_numel
        elif arguments.offload_optimizer is None:
            raise ValueError("--offload-numel is of the steps of --offload-optimizer: give both")
        if arguments.process is not None and arguments.limit is None:
            raise ValueError("--process counts against --limit: give both")
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
        placed = {
            config.stage: offloaded(config, model, found, num_ranks=num_ranks)
            for config, found in zip(configs, columns, strict=True)
            if config.offload_optimizer is not None or config.offload_params is not None
        }
        console = Console(width=100, highlight=False)
        console.print(
            f"{model.numel:g} parameters, {num_ranks} ranks, {per_node} a node; GB of each rank"
        )
        if placed:
            console.print("Without offload:")
        console.print(table(list(stages), columns))
        if placed:
            console.print("With offload:")
            console.print(places(placed))
        if arguments.limit is None:
            return 0
        needed = {
            config.stage: (arguments.process or 0)
            + (placed[config.stage].memory if config.stage in placed else found.peak)
            for config, found in zip(configs, columns, strict=True)
        }
        return judge(needed, arguments.limit)

    def _config(self, arguments: argparse.Namespace, stage: int) -> Config:
        """Return the configuration; with all stages, each has of the fields what it can have."""
        every = arguments.stage is None
        secondary = arguments.secondary
        if secondary is not None and secondary.isdecimal():
            secondary = int(secondary)
        coded = stage > 0 or not every
        sharded = stage == 3 or not every
        optimizer = arguments.offload_optimizer if stage > 0 or not every else None
        params = arguments.offload_params if sharded else None
        return Config(
            stage=stage,
            weights=arguments.weights if coded else None,
            grads=tuple(arguments.grads) if arguments.grads else None,
            secondary=secondary if sharded else None,
            secondary_codec=arguments.secondary_codec if sharded else None,
            accumulate=arguments.accumulate,
            grads_feedback=arguments.grads_feedback,
            prefetch=arguments.prefetch,
            offload_optimizer=optimizer,
            offload_params=params,
            nvme_path="." if "nvme" in (optimizer, params) else None,  # nothing is written
            offload_numel=arguments.offload_numel,
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


def judge(needed: dict[int, float], limit: float) -> int:
    """Say on stderr which stages fit into a rank's memory; return 1 when none does."""
    within = [stage for stage, nbytes in needed.items() if nbytes <= limit]
    least = min(needed, key=lambda stage: needed[stage])
    if not within:
        print(
            f"zcomm memory: a rank needs {gigabytes(needed[least])} GB in stage {least}, and"
            f" activations; the limit is {gigabytes(limit)} GB",
            file=sys.stderr,
        )
        return 1
    print(
        f"within {gigabytes(limit)} GB, but for activations: stage "
        + ", ".join(f"{stage} ({gigabytes(needed[stage])} GB)" for stage in within)
    )
    return 0


MEMORY = MemoryCommand()
