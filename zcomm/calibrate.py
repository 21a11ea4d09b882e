"""The constants of the cost model that explain what plans took.

Each constant alone is measured first (:mod:`zcomm.tune`): a link by messages of its own, a codec on
data of its own. In a collective they meet: links share processors, small messages cost more of them
than large ones, and a link that is measured on an idle moment is not what a piece finds. So every
constant gets a factor, and the factors are moved until the model predicts the measured operations,
those of usual pieces and of at least :data:`MODEL_FROM` bytes.

Do not assume that a factor says what is true of one constant: two that always work together share
what was wrong with either. A mild weight keeps all near what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from topology import cost
from zcomm.plan import Plan
from zcomm.prediction import predict

MODEL_FROM = 1024 * 1024
"""Bytes of the whole buffer from which the model is fitted, and compared with what was measured."""

Figure = tuple[tuple[Plan, ...], float]
"""What was executed, and its seconds."""

FIRST_STEP, LAST_STEP = 0.4, 0.01
"""Steps of the search, of the logarithm of a factor."""

MOST_ROUNDS = 40

NEAR = 0.0005
"""Weight of a factor's squared logarithm, against the mean of the squared errors."""


def factors(machine: cost.Machine, figures: Sequence[Figure], transport: str) -> list[float]:
    """Return the factor of every constant, in the order of :func:`scaled`.

    A search along one factor after the other: a step that helps is taken and grows, one that does
    not is halved, until all are small. It always ends in the same way for the same figures.
    """
    logs = [0.0] * len(scales(machine))
    steps = [FIRST_STEP] * len(logs)

    def loss() -> float:
        fitted = scaled(machine, [math.exp(value) for value in logs])
        return _mean_square(fitted, figures, transport) + NEAR * sum(v * v for v in logs)

    best = loss() if figures else 0.0
    for _ in range(MOST_ROUNDS if figures else 0):
        for index in range(len(logs)):
            best = _step(logs, steps, index, loss, best)
        if max(steps) < LAST_STEP:
            break
    return [math.exp(value) for value in logs]


def _step(
    logs: list[float], steps: list[float], index: int, loss: Callable[[], float], best: float
) -> float:
    """Move one factor if that helps; return the loss."""
    before = logs[index]
    for step in (steps[index], -steps[index]):
        logs[index] = before + step
        found = loss()
        if found < best:
            steps[index] *= 1.3
            return found
    logs[index] = before
    steps[index] *= 0.5
    return best


def _mean_square(machine: cost.Machine, figures: Sequence[Figure], transport: str) -> float:
    """Return the mean square of the logarithms of predicted over measured."""
    total = 0.0
    for plans, seconds in figures:
        predicted = sum(predict(machine, plan, transport) for plan in plans)
        total += math.log(predicted / seconds) ** 2
    return total / len(figures)


def scales(machine: cost.Machine) -> list[str]:
    """Return what :func:`scaled` scales, in words, in its order."""
    each = ("latency", "bandwidth", "processor")
    names = [f"{name} of level {level}" for level in range(len(machine.links)) for name in each]
    return [*names, "speed of codecs", "call", "piece", "message"]


def scaled(machine: cost.Machine, by: Sequence[float]) -> cost.Machine:
    """Return a machine whose constants are multiplied by factors, see :func:`scales`."""
    links = tuple(
        cost.Link(
            link.latency * by[3 * level],
            link.bandwidth * by[3 * level + 1],
            link.processor * by[3 * level + 2],
        )
        for level, link in enumerate(machine.links)
    )
    speed, call, piece, message = by[3 * len(links) :]
    speeds = {
        name: cost.Speed(one.encode * speed, one.decode * speed)
        for name, one in machine.speeds.items()
    }
    return replace(
        machine,
        links=links,
        speeds=speeds,
        call=machine.call * call,
        piece=machine.piece * piece,
        message=machine.message * message,
    )
