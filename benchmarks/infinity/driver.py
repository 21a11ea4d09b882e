"""The demonstration from one command: refused, planned, trained under the limit, compared."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.infinity import runs
from benchmarks.infinity.predict import PROCESS_NBYTES, Prediction, predict, sizes
from benchmarks.infinity.rank import Job, Trained
from benchmarks.launch import Parser, UsageError
from benchmarks.training.model import Shape
from zcomm import ZcommError
from zero.estimate import Model
from zero.sizes import gigabytes, size_nbytes

STATES_NBYTES = 16
"""Of a parameter, mixed precision and Adam: model states without sharding."""


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    shape: Shape
    ranks: int
    steps: int
    limit: float
    seed: int
    folder: Path
    output: Path
    compare: bool


def parse(arguments: list[str]) -> Options:
    """Return the options of a command line.

    Raises:
        UsageError: in one line, what is wrong with it.
    """
    parser = Parser(
        prog="python -m benchmarks.infinity",
        description="Train a GPT that is larger than the memory of its ranks, on disk.",
    )
    add = parser.add_argument
    add("--width", type=int, default=1280, help="of the model (1280); a multiple of 64")
    add("--depth", type=int, default=21, help="blocks (21)")
    add("--context", type=int, default=128, help="bytes of a sequence, one a rank (128)")
    add("--ranks", type=int, default=2)
    add("--steps", type=int, default=3)
    add("--limit", type=size_nbytes, default=1.5 * 2**30, help="memory of a rank (1.5GiB)")
    add("--seed", type=int, default=0)
    add("--folder", type=Path, default=Path("build/infinity"), help="on the disk to use")
    add("--no-compare", action="store_true", help="no run without limit and offload")
    given = parser.parse_args(arguments)
    for name, least in (("width", 64), ("depth", 1), ("context", 2), ("ranks", 1), ("steps", 2)):
        if getattr(given, name) < least:
            raise UsageError(f"--{name} {getattr(given, name)}: at least {least}")
    if given.width % 64:
        raise UsageError(f"--width {given.width}: not a multiple of 64")
    shape = Shape(
        context=given.context,
        width=given.width,
        depth=given.depth,
        heads=given.width // 64,
        recompute=True,
    )
    swap = given.folder / "swap"
    try:
        swap.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--folder {given.folder}: {error.strerror}") from None
    return Options(
        shape,
        given.ranks,
        given.steps,
        given.limit,
        given.seed,
        swap,
        given.folder,
        not given.no_compare,
    )


def main(arguments: list[str]) -> int:
    """Run everything; return 1 where something is not as it has to be, 2 for a wrong request."""
    try:
        return demonstrate(parse(arguments))
    except (UsageError, ZcommError) as error:
        print(f"benchmarks.infinity: {error}", file=sys.stderr)
        return 2


def demonstrate(options: Options) -> int:
    """Print what is done, line by line."""
    start = time.perf_counter()
    model = sizes(options.shape)
    say(
        f"A GPT of {model.numel / 1e6:.0f} million bfloat16 parameters, AdamW:"
        f" {gigabytes(STATES_NBYTES * model.numel)} GB of model states; {options.ranks} ranks, each"
        f" with {options.limit / 2**30:.2f} GiB of memory."
    )
    refused = memory_command(options, model, [])
    offload = ["--offload-optimizer", "nvme", "--offload-params", "nvme"]
    accepted = memory_command(options, model, offload)

    job = Job(
        "limited",
        options.shape,
        options.steps,
        options.seed,
        str(options.folder.resolve()),
        Job.block_for(options.limit),
        str((options.output / "limited.json").resolve()),
    )
    say("Measuring the disk, the update and a block of the model, to predict a step ...")
    predicted = predict(job, options.ranks, options.limit)
    say(describe(predicted))

    say(f"Training {options.steps} steps, parameters and optimizer on disk ...")
    limited = runs.limited(job, options.ranks, math.floor(options.limit))
    say(f"the limit was held by {limited.enforcer}")
    if limited.trained is None:
        say(f"FAILED: the limited run did not end; {limited.num_killed} processes were killed")
        return 1
    for line in measured(limited, limited.trained, options, predicted):
        say(line)
    good = refused == 1 and accepted == 0 and not limited.num_killed
    if options.compare:
        good &= compare(options, model, job, limited.trained)
    say(f"{'Done' if good else 'FAILED'} after {time.perf_counter() - start:.0f} s.")
    return 0 if good else 1


def say(line: str) -> None:
    """Print at once: the ranks print too."""
    print(line, flush=True)


def memory_command(options: Options, model: Model, more: list[str]) -> int:
    """Run ``zcomm memory`` with the limit; show the command, its verdict and its exit code."""
    words = ["memory", "--params", f"{model.numel:.0f}", "--ranks", str(options.ranks)]
    words += ["--stage", "3", "--largest-unit", f"{model.unit_numel:.0f}"]
    words += ["--root-unit", f"{model.root_numel:.0f}", "--limit", f"{options.limit:.0f}"]
    words += ["--process", f"{PROCESS_NBYTES:.0f}"]
    if more:
        words += [*more, "--offload-numel", str(Job.block_for(options.limit))]
    say(f"$ zcomm {shlex.join(words)}")
    program = "import sys; from zcomm import cli; sys.exit(cli.main(sys.argv[1:]))"
    run = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    lines = (run.stderr or run.stdout).strip().splitlines()
    say(f"{lines[-1] if lines else ''}\n(exit code {run.returncode})")
    return run.returncode


def describe(predicted: Prediction) -> str:
    """Return the rates, and what they make of a step."""
    machine, planned = predicted.machine, predicted.planned
    return (
        f"disk {machine.read / 1e9:.2f} GB/s reading, {machine.mixed / 1e9:.2f} GB/s both ways;"
        f" a rank steps {machine.update / 1e6:.0f} M elements/s, receives"
        f" {machine.send / 1e9:.2f} GB/s and computes {predicted.compute:.1f} s a step\n"
        f"predicted: {gigabytes(planned.nbytes.memory)} GB of memory a rank and about"
        f" {gigabytes(PROCESS_NBYTES)} GB for the process, {gigabytes(planned.nbytes.disk)} GB on"
        f" disk, {gigabytes(planned.moved)} GB moved and {planned.seconds:.1f} s a step"
    )


def measured(
    limited: runs.Limited, trained: Trained, options: Options, predicted: Prediction
) -> list[str]:
    """Return what the limited run took, beside the prediction."""
    planned = predicted.planned
    later = len(trained.computing) - 1
    computing = sum(trained.computing[1:]) / later
    stepping = sum(trained.stepping[1:]) / later
    lines = [
        "most memory of a rank: "
        f"{max(trained.resident) / 2**30:.2f} GiB resident"
        + (
            f", {max(limited.charged) / 2**30:.2f} GiB charged by the kernel, page cache included"
            if limited.charged
            else ""
        )
        + f", of {options.limit / 2**30:.2f} GiB",
        f"moved: {(max(trained.read) + max(trained.written)) / options.steps / 1e9:.2f} GB a step",
    ]
    rows = (
        ("forward and backward", planned.computing, computing),
        ("optimizer, first step", planned.first, trained.stepping[0]),
        ("optimizer, later steps", planned.stepping, stepping),
        ("a step", planned.seconds, computing + stepping),
    )
    lines.append(f"{'seconds':<24}{'predicted':>10}{'measured':>10}{'missed by':>11}")
    lines += [
        f"{name:<24}{wanted:>10.2f}{found:>10.2f}{(found - wanted) / wanted:>+11.0%}"
        for name, wanted, found in rows
    ]
    return lines


def compare(options: Options, model: Model, job: Job, limited: Trained) -> bool:
    """Train the same without limit and offload; tell whether the losses are the same bits."""
    needed = 1.4 * STATES_NBYTES * model.numel + options.ranks * PROCESS_NBYTES
    available = available_nbytes()
    if needed > available:
        say(
            f"FAILED: the run to compare with needs {gigabytes(needed)} GB, and"
            f" {gigabytes(available)} GB are free here; --no-compare leaves it out"
        )
        return False
    say("Training the same without limit and offload ...")
    output = str(Path(job.output).with_name("free.json"))
    job = Job("free", job.shape, job.steps, job.seed, None, job.block_numel, output)
    free = runs.free(job, options.ranks)
    if free is None:
        say("FAILED: the run without limit did not end")
        return False
    same = free.losses == limited.losses
    say(f"most memory of a rank: {max(free.resident) / 2**30:.2f} GiB resident")
    say(f"losses on disk   {limited.losses}\nlosses in memory {free.losses}")
    say("the same losses, bit for bit" if same else "FAILED: the losses differ")
    return same


def available_nbytes() -> int:
    """Return the memory of this machine that programs can get."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
