"""The program: options, the short table of collectives, three trainings, the report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import launch
from benchmarks.collectives import record
from benchmarks.collectives.cases import DATA_TYPES, OPERATIONS, Case, count_of
from benchmarks.collectives.check import check
from benchmarks.collectives.measure import measure
from benchmarks.collectives.perform import perform
from benchmarks.collectives.table import Result
from benchmarks.launch import Parser, UsageError
from benchmarks.training import data, report
from benchmarks.training.model import GPT, Shape
from benchmarks.training.schemes import SCHEMES, ZEROPP
from benchmarks.training.train import OnStep, Trained, sequences_per_rank, train
from benchmarks.training.verdicts import judge
from zcomm import Communicator, environment, launcher

DEMO_RANKS, DEMO_TOPOLOGY = 4, "2x2"
COLLECTIVE_NBYTES = 4 * 2**20
PIPE_WIDTH = 118
"""Columns where the output is no terminal, as under mpirun."""


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    steps: int
    data: Path | None
    topology: str
    seed: int
    output: Path


def parse(arguments: list[str]) -> Options:
    """Return the options of a command line.

    Raises:
        UsageError: in one line, what is wrong with it.
    """
    parser = Parser(
        prog="python -m benchmarks.training",
        description="Train a byte-level GPT with stage 0, stage 3 and ZeRO++, and compare.",
    )
    parser.add_argument("--steps", type=int, default=60, help="of each training (60)")
    parser.add_argument("--data", type=Path, help="a file or folder of text (standard library)")
    parser.add_argument("--topology", help=f"such as 2x4; {DEMO_TOPOLOGY} for 4 ranks, else found")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (0)")
    parser.add_argument(
        "--output", type=Path, default=Path("build/demo"), help="folder (build/demo)"
    )
    given = parser.parse_args(arguments)
    if given.steps < 2:
        # Adam's moments, which model states are mostly made of, exist after the first step.
        raise UsageError(f"--steps {given.steps}: at least 2")
    if given.seed < 0:
        raise UsageError(f"--seed {given.seed}: at least 0")
    topology = given.topology or _default_topology()
    return Options(given.steps, given.data, topology, given.seed, given.output)


def _default_topology() -> str:
    """Play two nodes where the usual four ranks run on one; a setting is left alone."""
    if environment.text("ZCOMM_TOPOLOGY") or launcher.world().size != DEMO_RANKS:
        return "auto"
    return DEMO_TOPOLOGY


def run(options: Options, comm: Communicator) -> int:
    """Run everything on all ranks; return 1 if a verdict failed or an element was wrong, else 0."""
    console = _console(comm)
    if not comm.topology.uniform:
        raise UsageError(f"{comm.topology.describe()}: theory is about nodes of equal size")
    launch.on_root(comm, lambda: _prepare(options.output))
    text = _shared_text(options, comm)
    numel = sum(parameter.numel() for parameter in GPT(Shape()).parameters())
    for line in _introduction(options, comm, text, numel):
        console.print(line)

    collectives = _collectives(comm)
    console.print(report.collectives_table(collectives))
    results = {}
    for scheme in SCHEMES:
        with _progress(console, scheme.name, options.steps) as on_step:
            results[scheme.name] = train(
                comm,
                text,
                scheme,
                shape=Shape(),
                steps=options.steps,
                seed=options.seed,
                on_step=on_step,
            )
    code = 0
    if comm.rank == 0:
        code = _report(options, comm, console, numel, collectives, results)
    return int(comm.all_gather_values(np.array([code], np.int64)).max())


def _console(comm: Communicator) -> Console:
    """Return a console that only rank 0 is heard through."""
    console = Console(quiet=comm.rank != 0, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: {error.strerror}; give a folder to write") from None


def _shared_text(options: Options, comm: Communicator) -> data.Text:
    """Read the text on rank 0 and give it to all, so that all have the same wherever they run."""
    least = Shape().context + 1
    text = launch.on_root(comm, lambda: data.read(options.data, at_least=least))
    (nbytes, *_), *_ = comm.all_gather_values(np.array([0 if text is None else text.size]))
    shared = torch.empty(int(nbytes), dtype=torch.uint8)
    if text is not None:
        shared.copy_(torch.from_numpy(text.copy()))
    return np.asarray(comm.broadcast(shared, root=0).numpy())


def _introduction(options: Options, comm: Communicator, text: data.Text, numel: int) -> list[str]:
    source = options.data or "the standard library's Python source"
    batch = comm.size * sequences_per_rank(comm.size)
    return [
        f"zcomm demo: {comm.size} ranks, {comm.topology.describe()}",
        f"text: {source}, {text.size / 1e6:.1f} MB",
        f"training: {options.steps} steps, {batch} x {Shape().context} bytes, seed {options.seed}",
        f"model: GPT of {numel:,} parameters, bfloat16 with float32 masters, AdamW",
        "ZeRO++: weights int8, secondary partition in the node, gradients int4 on every hop",
        f"units of less than {ZEROPP.config.min_numel:,} parameters stay exact: {_exact_units()}",
    ]


def _exact_units() -> str:
    """Name the units that ZeRO++ leaves exact."""
    model = GPT(Shape())
    blocks = {f"blocks.{i}": list(block.parameters()) for i, block in enumerate(model.blocks)}
    inside = {id(parameter) for unit in blocks.values() for parameter in unit}
    blocks["root"] = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    sizes = {name: sum(p.numel() for p in unit) for name, unit in blocks.items()}
    exact = [name for name, size in sizes.items() if size < ZEROPP.config.min_numel]
    return ", ".join(exact) or f"none here, the smallest has {min(sizes.values()):,}"


def _collectives(comm: Communicator) -> list[Result]:
    results = []
    for name in ("all_gather", "reduce_scatter"):
        for codec in (None, "int8", "int4"):
            for algorithm in ("flat", "hierarchical"):
                operation, dtype = OPERATIONS[name], DATA_TYPES["bfloat16"]
                case = Case(
                    operation,
                    dtype,
                    count_of(operation, dtype, COLLECTIVE_NBYTES, comm.size),
                    comm.size,
                    op="sum" if operation.reduces else None,
                    codec=codec,
                    algorithm=algorithm,
                )
                timing = measure(comm, case, perform, iterations=5, warmup=1)
                results.append(Result(case, timing, check(comm, case, perform, rounds=1, seed=0)))
    return results


@contextmanager
def _progress(console: Console, name: str, steps: int) -> Iterator[OnStep]:
    """Show a training's progress: a bar on a terminal, else a line for every sixth of it."""
    if not console.is_terminal:
        every = max(1, steps // 6)

        def say(step: int, loss: float) -> None:
            if (step + 1) % every == 0 or step + 1 == steps:
                console.print(f"{name}: step {step + 1}/{steps}, loss {loss:.4f}")

        yield say
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=steps)
        yield lambda _, loss: bar.update(task, advance=1, description=f"{name}: loss {loss:.4f}")


def _report(
    options: Options,
    comm: Communicator,
    console: Console,
    numel: int,
    collectives: list[Result],
    results: dict[str, Trained],
) -> int:
    topology = comm.topology
    expected = {scheme.name: scheme.expected(numel, topology.shape) for scheme in SCHEMES}
    console.print(report.side_by_side(results, expected, topology))
    verdicts = judge(results)
    for verdict in verdicts:
        console.print(f"{verdict.word:>10}  {verdict.text}")
    picture, json_file = options.output / "loss.png", options.output / "results.json"
    title = f"GPT of {numel / 1e6:.1f} M parameters, {topology.describe()}"
    report.draw(picture, results, title)
    header = {
        "options": {name: str(value) for name, value in asdict(options).items()},
        "versions": record.versions(),
        "environment": record.environment(),
        "machine": {"cpu": record.cpu_name(), "cores": os.cpu_count()},
        "topology": {"text": topology.describe(), "digest": topology.digest()},
        "parameters": numel,
    }
    rows = [record.row(result) for result in collectives]
    report.write_json(json_file, header, rows, results, expected, verdicts)
    console.print(
        f"loss curves: {picture.resolve()}\nresults: {json_file.resolve()}", soft_wrap=True
    )
    wrong = sum(result.outcome.num_wrong for result in collectives if result.outcome)
    return 1 if wrong or any(verdict.holds is False for verdict in verdicts) else 0
