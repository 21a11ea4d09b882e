"""``python -m benchmarks.planning``: the fit to the ZeRO++ paper, and every residual."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import numpy as np

from benchmarks.launch import Parser, UsageError
from benchmarks.planning.fit import Simulator, fit
from benchmarks.planning.published import BASELINE, FIGURES
from zero.simulate import FITTED, Efficiency

TARGET_RMS, TARGET_LARGEST = 0.10, 0.20


def main(words: list[str] | None = None) -> int:
    """Fit, print, and return 1 where a target is missed, 2 for arguments that cannot be."""
    try:
        options = _parse(words)
    except UsageError as error:
        print(f"benchmarks.planning: {error}", file=sys.stderr)
        return 2
    simulator = Simulator(FIGURES, options.prefetch)
    efficiency = FITTED if options.keep else fit(simulator)
    return report(simulator, efficiency)


def report(simulator: Simulator, efficiency: Efficiency) -> int:
    """Print constants and figures beside predictions; return 1 where a target is missed."""
    constants = ", ".join(f"{name} {value:.3f}" for name, value in asdict(efficiency).items())
    print(f"# constants: {constants}")
    print("| model | tokens | links | ZeRO-3 | predicted | error | ZeRO++ | predicted | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    errors = simulator.errors(efficiency)
    cells = ""
    for figure, error in zip(simulator.figures, errors, strict=True):
        if figure.scheme == BASELINE:
            cells = f"| {figure.billions} B | {figure.tokens} | {figure.links} |"
        predicted = figure.tflops * (1 + error)
        cells += f" {figure.tflops:g} | {predicted:.1f} | {error:+.1%} |"
        if figure.scheme != BASELINE:
            print(cells)
    rms, largest = float(np.sqrt(np.mean(errors**2))), float(np.max(np.abs(errors)))
    print(f"# root mean square {rms:.1%}, largest {largest:.1%} of {len(errors)} figures")
    return int(rms > TARGET_RMS or largest > TARGET_LARGEST)


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="benchmarks.planning", description=__doc__)
    parser.add_argument("--prefetch", type=int, default=0, help="units gathered ahead (0)")
    parser.add_argument("--keep", action="store_true", help="with the constants of zcomm plan")
    options = parser.parse_args(words)
    if options.prefetch < 0:
        raise UsageError(f"--prefetch {options.prefetch}: has to be 0 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
