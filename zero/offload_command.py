"""``zcomm plan-offload``: what has to leave memory for a training to fit, and what that costs."""

from __future__ import annotations

import argparse

from rich import box
from rich.console import Console
from rich.table import Table

from zero.config import Config
from zero.estimate import Model
from zero.offload_plan import Machine, Planned, choice, plans
from zero.offload_probe import probe_disk, probe_send, probe_update
from zero.sizes import gigabytes, rate_nbytes, size_nbytes


class PlanOffloadCommand:
    """``zcomm plan-offload``: print a row for each setting, and which one to take."""

    help = "say what to offload so that a training fits, and how long a step takes"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare sizes of the model and the job, and rates, which are measured by default."""
        parser.usage = argparse.SUPPRESS  # an error is one line
        add = parser.add_argument
        add("--params", type=float, required=True, help="parameters of the model, 7.5e9")
        add("--ranks", type=int, required=True)
        add("--ranks-per-node", type=int, help="that share a disk; by default all")
        add("--stage", type=int, choices=range(4), default=3)
        add("--largest-unit", type=float, default=0, help="its parameters")
        add("--root-unit", type=float, default=0, help="parameters of the root")
        add("--itemsize", type=int, choices=(2, 4), default=2, help="bytes of a parameter")
        add("--states", type=int, default=2, help="float32 states of the optimizer; Adam has 2")
        add("--prefetch", type=int, default=1)
        add("--offload-numel", type=int, default=Config.offload_numel, help="of a block of a step")
        add("--ram", type=size_nbytes, required=True, help="memory that a rank may use, as 1.5GiB")
        add("--process", type=size_nbytes, default=0.0, help="of it, what Python and torch take")
        add("--path", help="a folder on the disk: how much and how fast is measured there")
        add("--disk", type=size_nbytes, help="free bytes, instead of what is free there")
        add("--read", type=rate_nbytes, help="of the disk, as 2.1GB/s, instead of measuring")
        add("--mixed", type=rate_nbytes, help="reading and writing at once, both together")
        add("--update", type=float, help="elements per second that a rank steps")
        add("--send", type=rate_nbytes, help="that a rank receives in a gather")
        add("--compute", type=float, default=0, help="seconds of forward and backward of a rank")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the table; return 1 when nothing fits."""
        num_ranks = arguments.ranks
        model = Model(
            arguments.params,
            arguments.largest_unit,
            arguments.root_unit,
            arguments.itemsize,
            arguments.states,
        )
        config = Config(
            stage=arguments.stage,
            prefetch=arguments.prefetch,
            offload_numel=arguments.offload_numel,
        )
        if not arguments.compute >= 0:
            raise ValueError(f"--compute {arguments.compute:g}: expected 0 or more")
        machine = _machine(arguments)
        found = plans(config, model, machine, num_ranks=num_ranks, compute=arguments.compute)
        console = Console(width=100, highlight=False)
        for line in heading(model, machine, num_ranks):
            console.print(line)
        console.print(table(found))
        taken = choice(found)
        print("nothing fits" if taken is None else f"the fastest that fits: {taken}")
        return 1 if taken is None else 0


def _machine(arguments: argparse.Namespace) -> Machine:
    """Return what was given, and measure the rest."""
    ranks = arguments.ranks_per_node
    if ranks is None:
        ranks = max(arguments.ranks, 1)
    if arguments.process >= arguments.ram:
        raise ValueError(
            f"--process {gigabytes(arguments.process)} GB of --ram {gigabytes(arguments.ram)} GB"
            " leaves nothing"
        )
    disk, read, mixed = arguments.disk, arguments.read, arguments.mixed
    if ranks < 1:
        raise ValueError(f"--ranks-per-node {ranks}: expected 1 or more")
    if None in (disk, read, mixed):
        if arguments.path is None:
            raise ValueError("give --path, a folder to measure, or --disk, --read and --mixed")
        rates = probe_disk(arguments.path)
        disk, read, mixed = disk or rates.free, read or rates.read, mixed or rates.mixed
    update, send = arguments.update, arguments.send
    return Machine(
        memory=arguments.ram - arguments.process,
        disk=disk,
        ranks=ranks,
        read=read,
        mixed=mixed,
        update=probe_update(ranks) if update is None else update,
        send=probe_send(ranks) if send is None else send,
    )


def heading(model: Model, machine: Machine, num_ranks: int) -> list[str]:
    """Return what the table below is of."""
    return [
        f"{model.numel:g} parameters, {num_ranks} ranks, {machine.ranks} share a disk; a rank has"
        f" {gigabytes(machine.memory)} GB of memory, the disk {gigabytes(machine.disk)} GB",
        f"rates: disk reads {machine.read / 1e9:.2f} GB/s, reads and writes"
        f" {machine.mixed / 1e9:.2f} GB/s together; a rank steps {machine.update / 1e6:.0f} M"
        f" elements/s, receives {machine.send / 1e9:.2f} GB/s",
        "A prediction, not a measurement; activations and the process itself are not in it.",
    ]


def table(found: dict[str, Planned]) -> Table:
    """Return a row for each setting, in GB (10^9 bytes) of a rank and seconds."""
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("offload")
    for name in (
        "memory GB",
        "disk GB",
        "fits",
        "moved GB",
        "forward, backward s",
        "optimizer s",
        "step s",
    ):
        made.add_column(name, justify="right")
    for name, each in found.items():
        made.add_row(
            name,
            gigabytes(each.nbytes.memory),
            gigabytes(each.nbytes.disk),
            "yes" if each.fits else "no",
            gigabytes(each.moved),
            f"{each.computing:.3g}",
            f"{each.stepping:.3g}",
            f"{each.seconds:.3g}",
        )
    return made


PLAN_OFFLOAD = PlanOffloadCommand()
