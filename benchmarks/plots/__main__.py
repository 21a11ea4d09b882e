"""``python -m benchmarks.plots sizes|levels|steps FILE ... -o PICTURE``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import figures
from benchmarks.collectives.options import size_nbytes
from benchmarks.launch import Parser, UsageError
from benchmarks.plots import levels, lines, sizes, steps

Draw = Callable[[list[lines.Lines], int | None], Figure]
KINDS: dict[str, Draw] = {"sizes": sizes.figure, "levels": levels.figure, "steps": steps.figure}


@dataclass(frozen=True)
class Options:
    """What to draw from which files. ``nbytes``: the message of ``levels``."""

    kind: str
    files: tuple[Path, ...]
    output: Path
    nbytes: int | None


def parse(arguments: list[str]) -> Options:
    """Return the options of a command line.

    Raises:
        UsageError: in one line, what is wrong with it.
    """
    parser = Parser(prog="python -m benchmarks.plots", description="Pictures of results.")
    parser.add_argument(
        "kind",
        choices=tuple(KINDS),
        help="time over message size; bytes by level; what training steps consist of",
    )
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a picture: .png, .svg")
    parser.add_argument("-b", "--bytes", type=size_nbytes, help="levels: of which message size")
    given = parser.parse_args(arguments)
    figures.check(given.output, "-o")
    return Options(given.kind, tuple(given.files), given.output, given.bytes)


def main(arguments: list[str]) -> int:
    """Draw; return the exit code."""
    try:
        options = parse(arguments)
        drawn = KINDS[options.kind]([lines.read(file) for file in options.files], options.nbytes)
        figures.save(drawn, options.output, "-o", dpi=140)
    except UsageError as error:
        print(f"benchmarks.plots: {error}", file=sys.stderr)
        return 2
    print(f"# picture: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
