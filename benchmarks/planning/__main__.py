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
    if options.fit_to is None:
        return report(simulator, FITTED if options.keep else fit(simulator))
    name, values = options.fit_to
    known = simulator.part(lambda figure: getattr(figure, name) in values)
    return report(simulator.part(lambda figure: figure not in known.figures), fit(known))


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
    which = parser.add_mutually_exclusive_group().add_argument
    which("--keep", action="store_true", help="with the constants of zcomm plan")
    which(
        "--fit-to",
        type=_some,
        metavar="NAME=VALUES",
        help="fit to some figures, as links=1,8, and predict the others; billions, tokens or links",
    )
    options = parser.parse_args(words)
    if options.prefetch < 0:
        raise UsageError(f"--prefetch {options.prefetch}: has to be 0 or more")
    return options


def _some(text: str) -> tuple[str, list[int]]:
    """Return the field and the values that choose figures; some have to be left."""
    name, _, listed = text.partition("=")
    possible = {
        field: sorted({getattr(figure, field) for figure in FIGURES})
        for field in ("billions", "tokens", "links")
    }
    found = listed.split(",")
    known = possible.get(name, [])
    values = [value for value in known if str(value) in found]
    if not values or len(values) != len(found) or len(values) == len(known):
        words = ", ".join(f"{field}={_joined(every)}" for field, every in possible.items())
        raise argparse.ArgumentTypeError(f"{text!r}: some of {words}, not all")
    return name, values


def _joined(values: list[int]) -> str:
    return ",".join(map(str, values))


if __name__ == "__main__":
    sys.exit(main())
