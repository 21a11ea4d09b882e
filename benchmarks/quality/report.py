"""The tables, as Markdown: those of docs/quality.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.quality import statistics
from benchmarks.quality.gradients import PAPER, SAFE4, Errors
from benchmarks.quality.plan import EXACT, ORDERED, Plan, Setting
from benchmarks.quality.train import Run

Runs = Mapping[tuple[str, int], Run]

TARGET = 0.5
"""The most that safe4's error may be of the paper's."""


def losses(runs: Runs, plan: Plan, settings: Sequence[Setting]) -> Iterable[str]:
    """Yield the table of validation losses after the last step, and the limit of claims."""
    floor = statistics.interval([*_differences(runs, ORDERED.name).values()])
    limit = statistics.limit_of(floor)
    yield (
        f"| setting | validation loss after {plan.steps} steps | difference to exact, pairs"
        " | standard error | 95 % interval | |"
    )
    yield "|---|---|---|---|---|---|"
    for setting in settings:
        mine = [run for (name, _), run in sorted(runs.items()) if name == setting.name]
        mean = sum(run.validation[-1] for run in mine) / len(mine)
        if setting == EXACT:
            yield f"| {setting.name} | {mean:.4f} | | | | |"
            continue
        found = statistics.interval([*_differences(runs, setting.name).values()])
        word = "the floor" if setting == ORDERED else statistics.verdict(found, limit)
        yield (
            f"| {setting.name} | {mean:.4f} | {found.mean:+.3%} | {found.error:.3%}"
            f" | {found.low:+.3%} to {found.high:+.3%} | {word} |"
        )
    yield ""
    yield f"Limit: {limit:.3%}, the larger of 0.2 % and the floor's {floor.reach:.3%}."


def pairs(runs: Runs, plan: Plan, settings: Sequence[Setting]) -> Iterable[str]:
    """Yield the differences of every seed, at every evaluation."""
    seeds = sorted({seed for _, seed in runs})
    yield "| setting | after | " + " | ".join(f"seed {seed}" for seed in seeds) + " |"
    yield "|---" * (len(seeds) + 2) + "|"
    for setting in settings:
        if setting == EXACT:
            continue
        for number, after in enumerate(plan.evaluated_after()):
            found = _differences(runs, setting.name, number)
            cells = " | ".join(f"{found[seed]:+.3%}" if seed in found else "" for seed in seeds)
            yield f"| {setting.name} | {after} steps | {cells} |"


def _differences(runs: Runs, name: str, evaluation: int = -1) -> dict[int, float]:
    return statistics.differences(runs, name, EXACT.name, evaluation)


def gradients(found: Sequence[Errors]) -> Iterable[str]:
    """Yield the table of errors of gradients, and the target's verdicts."""
    yield "| inside the node, between nodes | a step | cosine | moving average | sum |"
    yield "|---|---|---|---|---|"
    for one in found:
        yield (
            f"| {one.name} | {one.relative:.2%} | {one.cosine:.5f} | {one.moving:.2%}"
            f" | {one.total:.2%} |"
        )
    by_name = {one.name: one for one in found}
    safe4, paper = by_name[SAFE4.name], by_name[PAPER.name]
    yield ""
    for what, ratio in (
        ("of a step", safe4.relative / paper.relative),
        ("of the moving average", safe4.moving / paper.moving),
        ("of the sum", safe4.total / paper.total),
    ):
        word = "reached" if ratio <= TARGET else "missed"
        yield f"safe4's error {what} is {ratio:.2f} of the paper's (target {TARGET}: {word})."
