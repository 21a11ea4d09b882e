"""What must hold for the demonstration to have shown anything; a failed verdict is exit code 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.training.schemes import STAGE_0, STAGE_3, ZEROPP
from benchmarks.training.train import Trained

LEAST_RATIO = 3.8
MOST_LOSS_DIFFERENCE = 0.02
STEPS_THAT_SHOW_A_LOSS = 60


@dataclass(frozen=True)
class Verdict:
    """A statement with its figure. ``holds`` is None where nothing can be said."""

    text: str
    holds: bool | None

    @property
    def word(self) -> str:
        """The verdict in one word."""
        return {True: "OK", False: "FAILED", None: "not judged"}[self.holds]


def judge(results: Mapping[str, Trained]) -> list[Verdict]:
    """Return the verdicts on the three trainings, by the names of their schemes."""
    replicated, sharded, quantised = (results[s.name] for s in (STAGE_0, STAGE_3, ZEROPP))
    return [
        _same_losses(replicated, sharded),
        _ratio_between(sharded, quantised),
        _loss_difference(sharded, quantised),
    ]


def _same_losses(replicated: Trained, sharded: Trained) -> Verdict:
    differ = [a != b for a, b in zip(replicated.losses, sharded.losses, strict=True)]
    text = f"losses of stage 0 and stage 3 are the same bits in {len(differ)} steps"
    if any(differ):
        text += f" (they part in step {differ.index(True) + 1})"
    return Verdict(text, not any(differ))


def _ratio_between(exact: Trained, quantised: Trained) -> Verdict:
    if len(exact.levels) == 1 or not exact.levels[-1]:
        return Verdict("bytes between nodes: there is one node", None)
    ratio = exact.levels[-1] / quantised.levels[-1]
    text = f"ZeRO++ sends {ratio:.2f} times fewer bytes between nodes than stage 3"
    return Verdict(f"{text} (at least {LEAST_RATIO})", ratio >= LEAST_RATIO)


def _loss_difference(exact: Trained, quantised: Trained) -> Verdict:
    difference = quantised.losses[-1] / exact.losses[-1] - 1
    text = f"the last loss of ZeRO++ is {difference:+.2%} from that of stage 3"
    if len(exact.losses) < STEPS_THAT_SHOW_A_LOSS:
        return Verdict(f"{text} (judged from {STEPS_THAT_SHOW_A_LOSS} steps)", None)
    holds = abs(difference) <= MOST_LOSS_DIFFERENCE
    return Verdict(f"{text} (at most {MOST_LOSS_DIFFERENCE:.0%})", holds)
