"""Four constants from 52 figures: Gauss-Newton with damping (Levenberg, Marquardt), on logarithms.

The sum of fourth powers of relative errors is minimised, not of squares, because the target is the
largest error beside their root mean square. A reader must not assume that the constants are those
of the machines: what the model leaves out is in them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from benchmarks.planning.published import DEVICE, LAYERS_HIDDEN, LINK_GBIT, NODES, PER_NODE, Figure
from zero.simulate import SCHEMES, Cluster, Efficiency, Rehearsed, Transformer

Vector = npt.NDArray[np.float64]

START = Efficiency(compute=0.6, network=0.8, inside=0.5, codec=0.3)
STEP = 1e-4
LARGEST_STEP = 0.5


class Simulator:
    """Predicts the published figures; ``prefetch`` as in ``zero.Config``."""

    def __init__(self, figures: Sequence[Figure], prefetch: int) -> None:
        self.figures = tuple(figures)
        self._rehearsed = {
            (size, scheme): Rehearsed(
                Transformer(*LAYERS_HIDDEN[size]),
                replace(SCHEMES[scheme], prefetch=prefetch),
                NODES,
                PER_NODE,
            )
            for size, scheme in dict.fromkeys((f.billions, f.scheme) for f in figures)
        }

    def part(self, kept: Callable[[Figure], bool]) -> Simulator:
        """Return one that predicts some of the figures."""
        made = copy(self)
        made.figures = tuple(filter(kept, self.figures))
        return made

    def tflops(self, efficiency: Efficiency) -> Vector:
        """Return a prediction for every figure."""
        return np.array([self._predict(figure, efficiency) for figure in self.figures])

    def errors(self, efficiency: Efficiency) -> Vector:
        """Return prediction / figure - 1."""
        return self.tflops(efficiency) / np.array([f.tflops for f in self.figures]) - 1

    def _predict(self, figure: Figure, efficiency: Efficiency) -> float:
        cluster = Cluster(NODES, PER_NODE, DEVICE, figure.links * LINK_GBIT)
        rehearsed = self._rehearsed[figure.billions, figure.scheme]
        return rehearsed.predict(cluster, efficiency, tokens=figure.tokens).flops / 1e12


def fit(simulator: Simulator, start: Efficiency = START) -> Efficiency:
    """Return the constants with the least sum of fourth powers of errors."""

    def residuals(logarithms: Vector) -> Vector:
        errors = simulator.errors(_efficiency(logarithms))
        return errors * np.abs(errors)

    first = np.log([start.compute, start.network, start.inside, start.codec])
    return _efficiency(least_squares(residuals, first))


def _efficiency(logarithms: Vector) -> Efficiency:
    return Efficiency(*map(float, np.exp(logarithms)))


def least_squares(
    residuals: Callable[[Vector], Vector], x: Vector, *, iterations: int = 60
) -> Vector:
    """Return where the sum of squared residuals is least, near ``x``.

    1. J: derivatives by differences.
    2. (JᵀJ + λ·diag(JᵀJ)) d = -Jᵀr; a step that does not make the sum smaller makes λ larger.
    3. Until no step gains a millionth.
    """
    damping = 1e-3
    now = residuals(x)
    for _ in range(iterations):
        shifts = STEP * np.eye(len(x))
        jacobian = np.stack([(residuals(x + shift) - now) / STEP for shift in shifts], axis=1)
        normal = jacobian.T @ jacobian
        while damping < 1e8:
            matrix = normal + damping * np.diag(np.diag(normal))
            # A constant that nothing depends on stays as it is.
            step = np.linalg.lstsq(matrix, -jacobian.T @ now, rcond=None)[0]
            moved = x + np.clip(step, -LARGEST_STEP, LARGEST_STEP)
            then = residuals(moved)
            if then @ then < now @ now:
                break
            damping *= 10
        else:
            return x
        gain = 1 - (then @ then) / (now @ now)
        x, now, damping = moved, then, damping / 10
        if gain < 1e-6:
            break
    return x
