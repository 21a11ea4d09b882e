"""The program: options, the runs that are missing, the tables."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch import Parser, UsageError
from benchmarks.quality import gradients, report
from benchmarks.quality.plan import EXACT, ORDERED, SETTINGS, USUAL, Plan, Setting, Texts, divide
from benchmarks.quality.results import Results
from benchmarks.quality.train import Run, train
from benchmarks.training import data
from zcomm import ZcommError

NUM_CAPTURED = 16
"""Steps whose gradients are kept, 30 MB for four ranks."""


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    plan: Plan
    settings: tuple[Setting, ...]
    seeds: int
    data: Path | None
    output: Path
    seconds: float


def parse(arguments: list[str]) -> Options:
    """Return the options of a command line.

    Raises:
        UsageError: in one line, what is wrong with it.
    """
    parser = Parser(
        prog="python -m benchmarks.quality",
        description="Train a small GPT with every setting and seed; compare validation losses.",
    )
    plan = Plan()
    add = parser.add_argument
    add("--seeds", type=_positive, default=5, help="of each setting, at least 2 (5)")
    add("--steps", type=_positive, default=plan.steps, help=f"of a run ({plan.steps})")
    names = [setting.name for setting in SETTINGS]
    add("--settings", nargs="+", choices=names, default=USUAL, help=f"({' '.join(USUAL)})")
    add("--data", type=Path, help="a file or folder of text (standard library)")
    add("--output", type=Path, default=Path("build/quality"), help="folder (build/quality)")
    add(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no run later than this; the next call goes on",
    )
    given = parser.parse_args(arguments)
    if given.seeds < 2:
        raise UsageError("--seeds 1: one pair has no interval, at least 2")
    if given.steps < plan.evaluations:
        raise UsageError(f"--steps {given.steps}: at least {plan.evaluations}")
    # Without these two there are no pairs and no floor.
    chosen = {EXACT.name, ORDERED.name, *given.settings}
    settings = tuple(setting for setting in SETTINGS if setting.name in chosen)
    return Options(
        Plan(steps=given.steps), settings, given.seeds, given.data, given.output, given.seconds
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing and print; 0 also where runs are left for the next call."""
    try:
        return _run(parse(sys.argv[1:] if arguments is None else arguments))
    except (ValueError, ZcommError) as error:
        print(f"benchmarks.quality: {error}", file=sys.stderr, flush=True)
        return 2


def _run(options: Options) -> int:
    start = time.monotonic()
    plan = options.plan
    text = data.read(options.data, at_least=1 << 20)
    texts = divide(text)
    digests = {setting.name: plan.digest(text, setting) for setting in SETTINGS}
    results = Results(options.output / "runs.jsonl", digests)
    wanted = [(setting, seed) for seed in range(options.seeds) for setting in options.settings]
    missing = [(s, seed) for s, seed in wanted if (s.name, seed) not in results.runs]
    print(f"# {len(wanted)} runs of {plan.steps} steps, {len(missing)} to do", flush=True)
    for setting, seed in missing:
        if time.monotonic() - start > options.seconds:
            print("# time is over: call again for the rest", flush=True)
            return 0
        run = train(plan, setting, texts, seed)
        results.add(run)
        print(
            f"# {run.setting:<14} seed {seed}: validation {run.validation[-1]:.4f},"
            f" {run.seconds:.0f} s",
            flush=True,
        )
    asked = {(setting.name, seed): results.runs[setting.name, seed] for setting, seed in wanted}
    for table in (report.losses, report.pairs):
        print(*table(asked, plan, options.settings), "", sep="\n")
    return _gradients(options, texts, results.runs[EXACT.name, 0])


def _gradients(options: Options, texts: Texts, exact: Run) -> int:
    """Capture and measure, which takes as long as a run; 1 if it was not that run's training."""
    after, count = options.plan.steps // 2, min(NUM_CAPTURED, options.plan.steps // 2)
    print(f"# gradients of {count} steps of {EXACT.name}, seed 0, after {after}", flush=True)
    captured, losses = gradients.capture(options.plan, texts, after=after, count=count)
    if losses != exact.training[: len(losses)]:
        print("# WRONG: the losses are not those of the run", flush=True)
        return 1
    for line in report.gradients([*gradients.measure(captured)]):
        print(line)
    return 0
