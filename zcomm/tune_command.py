"""``zcomm tune``: measure the job that this is started in, write what was found, and show it."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import zcomm
from zcomm import environment, launcher, tuning
from zcomm.calibrate import MODEL_FROM
from zcomm.codecs import Codec
from zcomm.communicator import Communicator
from zcomm.errors import ZcommError
from zcomm.tune import CODECS, OPERATIONS, Measured, Result, tune


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("--topology", default="auto", help="as in zcomm.init (auto)")
    add("--codecs", nargs="+", default=list(CODECS), metavar="CODEC", help="none int8 int4")
    add("--seconds", type=float, default=25.0, help="about how long to measure (25)")
    add("--output", type=Path, metavar="FILE", help="write here, not to the folder of tunings")
    add("--dry-run", action="store_true", help="write nothing")


def run(arguments: argparse.Namespace) -> int:
    """Measure, write and print; return the exit code.

    Raises:
        ZcommError: one rank, or a folder that is turned off.
        ValueError: a codec that is none.
        OSError: the file cannot be written.
    """
    for codec in arguments.codecs:
        Codec.parse(codec)
    if not arguments.seconds > 0:
        raise ValueError(f"--seconds {arguments.seconds}: more than 0")
    if launcher.world().size == 1:
        raise ZcommError("one rank has nothing to tune: start it as `mpirun -n 4 zcomm tune`")
    comm = zcomm.init(topology=arguments.topology, min_numel=0)
    if not environment.text("ZCOMM_LOG"):  # every algorithm is announced, and the table says it too
        logging.getLogger("zcomm").setLevel(logging.WARNING)
    path = arguments.output or tuning.path_of(comm.topology, comm.tuning.transport)
    if path is None and not arguments.dry_run:
        raise ZcommError("ZCOMM_TUNING=0 turns tuning files off: unset it, or give --output FILE")
    result = tune(comm, arguments.codecs, arguments.seconds)
    if comm.rank == 0:
        if path is not None and not arguments.dry_run:
            tuning.write(path, tuning.to_json(result.tuning, result.facts))
        show(comm, result)
        written = "nothing was written" if arguments.dry_run else f"written to {path}"
        print(f"measured in {result.facts['took_seconds']} s; {written}")
    comm.close()
    return 0


def show(comm: Communicator, result: Result) -> None:
    """Print the constants and every choice."""
    from rich.console import Console
    from rich.table import Table

    # Where the output is a file, rich would take it to be 80 columns wide.
    console = Console(soft_wrap=True, width=None if Console().is_terminal else 120)
    machine = result.tuning.machine
    console.print(f"{comm.topology.describe()}, transport {result.tuning.transport}")
    constants = Table("level", "latency us", "MB/s of a rank", title="Constants")
    for level, link in zip(comm.topology.levels, machine.links, strict=True):
        constants.add_row(level.name, f"{link.latency * 1e6:.0f}", f"{link.bandwidth / 1e6:.1f}")
    for name, speed in machine.speeds.items():
        words = f"encode {speed.encode / 1e6:.0f}, decode {speed.decode / 1e6:.0f}"
        constants.add_row(f"codec {name}", "", f"{words} M elements/s")
    each = {"call": machine.call, "piece": machine.piece, "message": machine.message}
    for name, value in each.items():
        constants.add_row(name, f"{value * 1e6:.0f}", "")
    console.print(constants)
    columns = ("operation", "codec", "KiB", "measured ms", "model ms", "auto takes")
    table = Table(*columns, title="Plans (fastest first)")
    for group in _groups(result.figures):
        table.add_row(*_row(comm, result, group))
    console.print(table)
    errors = model_errors(result.figures)
    if errors:
        console.print(
            f"model against measured from {MODEL_FROM // 2**20} MiB on: median error "
            f"{median(errors):.1%}, largest {max(errors):.1%}, of {len(errors)}"
        )


def model_errors(figures: Sequence[Measured]) -> list[float]:
    """Return how far the model is from what was measured, for large sizes and usual pieces."""
    return [abs(one.predicted - one.seconds) / one.seconds for one in figures if one.fits_model]


def _groups(figures: Sequence[Measured]) -> list[list[Measured]]:
    groups: dict[tuple[str, str, int], list[Measured]] = {}
    for one in figures:
        groups.setdefault((one.key.operation, one.codec, one.size), []).append(one)
    ordered = sorted(groups, key=lambda group: OPERATIONS.index(group[0]))
    return [sorted(groups[group], key=lambda one: one.seconds) for group in ordered]


def _row(comm: Communicator, result: Result, group: Sequence[Measured]) -> list[str]:
    first = group[0]
    measured = ", ".join(f"{one.how} {one.seconds * 1e3:.3f}" for one in group)
    model = ", ".join(f"{one.predicted * 1e3:.3f}" for one in group)
    taken = choice(comm, result.tuning, first)
    return [first.key.operation, first.codec, f"{first.size // 1024}", measured, model, taken]


def choice(comm: Communicator, known: tuning.Tuning, figure: Measured) -> str:
    """Return what ``algorithm="auto"`` takes with a tuning where this was measured."""
    from zcomm.planner import Planner

    planner = Planner("tune", comm.rank, known)
    tensor = "bfloat16", figure.size // 2
    return planner.executed(figure.key.operation, tensor, figure.codec)[0].how
