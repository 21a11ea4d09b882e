"""Is what ``algorithm="auto"`` takes as fast as the best that can be forced?

    ZCOMM_TUNING=folder mpirun -n 4 zcomm tune
    ZCOMM_TUNING=folder mpirun -n 4 python -m benchmarks.tuning

Auto and every algorithm that it may take are called in turns, with bfloat16, and a call lasts as
long as on its slowest rank. A row holds the KiB of the whole buffer, the operation, the codec, the
ratio of auto to the fastest, medians in milliseconds, and what auto took. A row over the limit is
measured again, up to three times in all: auto repeats one of the others, so that it is slower
either because of a wrong choice, every time, or by chance. The exit code is 1 when one stays over.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import launch
from benchmarks.collectives.options import size_nbytes
from zcomm import Communicator
from zcomm.hops import candidates
from zcomm.tune import CODECS, OPERATIONS, PIECES_FROM, numel_of, operation_call, time_calls

SIZES = tuple(4096 * 4**power for power in range(8))
ATTEMPTS = 3


@dataclass(frozen=True)
class Options:
    """What to compare; see ``--help``."""

    operations: tuple[str, ...]
    codecs: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float
    rounds: int
    limit: float
    topology: str


@dataclass(frozen=True)
class Row:
    """One size of one operation: seconds of auto and of each that was forced."""

    operation: str
    codec: str
    nbytes: int
    taken: str
    auto: float
    forced: dict[str, float]

    @property
    def ratio(self) -> float:
        """Auto over the fastest."""
        return self.auto / min(self.forced.values())

    def __str__(self) -> str:
        forced = "  ".join(f"{name} {value * 1e3:.3f}" for name, value in self.forced.items())
        words = f"{self.nbytes // 1024:8d} {self.operation:<15}{self.codec:<7}{self.ratio:6.2f}"
        return f"{words}  auto {self.auto * 1e3:.3f} ({self.taken})  {forced}"


def parse(arguments: list[str]) -> Options:
    """Read the command line."""
    parser = launch.Parser(prog="python -m benchmarks.tuning", description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=float, default=1.15, help="the largest ratio (1.15)")
    return Options(**chosen(parser, arguments, SIZES))


def chosen(parser: launch.Parser, arguments: list[str], sizes: tuple[int, ...]) -> dict[str, Any]:
    """Read the fields of Options; the parser has a ``--limit`` already."""
    add = parser.add_argument
    add("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    add("--codecs", nargs="+", default=CODECS)
    add("--sizes", nargs="+", type=size_nbytes, default=sizes, help="as in 4K 1M 64M")
    add("--seconds", type=float, default=1.0, help="about how long for each row (1)")
    add("--rounds", type=int, default=5, help="at least so many turns (5)")
    add("--topology", default="auto")
    given = vars(parser.parse_args(arguments))
    if given["rounds"] < 1:
        raise launch.UsageError(f"--rounds {given['rounds']}: at least 1")
    lists = {name: tuple(given.pop(name)) for name in ("operations", "codecs", "sizes")}
    return lists | given


def run(options: Options, comm: Communicator) -> int:
    """Measure and print every row; return the exit code."""
    say = print if comm.rank == 0 else lambda *_, **__: None
    say(f"# {comm.topology.describe()}; {comm.tuning.source}")
    say("#    KiB operation      codec   ratio  medians in ms")
    rows = []
    for row in _rows(options, comm):
        rows.append(row)
        say(str(row), flush=True)
    worst = max(rows, key=lambda row: row.ratio)
    taken = ", ".join(f"{name} {n}" for name, n in sorted(Counter(r.taken for r in rows).items()))
    say(f"# auto took: {taken}")
    say(f"# worst ratio {worst.ratio:.3f} ({worst.operation} {worst.codec} {worst.nbytes} bytes)")
    over = [row for row in rows if row.ratio > options.limit]
    say(f"# over {options.limit:g}: {len(over)} of {len(rows)}")
    return 1 if over else 0


def _rows(options: Options, comm: Communicator) -> Iterator[Row]:
    for operation in options.operations:
        for codec in options.codecs:
            for nbytes in options.sizes:
                tries = (_row(options, comm, operation, codec, nbytes) for _ in range(ATTEMPTS))
                best = next(tries)
                while best.ratio > options.limit and (again := next(tries, None)):
                    best = min(best, again, key=lambda row: row.ratio)
                yield best


def _row(options: Options, comm: Communicator, operation: str, codec: str, nbytes: int) -> Row:
    numel = numel_of(comm.size, nbytes)
    sizes = comm.tuning.piece_sizes if nbytes >= PIECES_FROM else ()
    names = candidates("auto", comm.topology, sizes)
    calls = [
        operation_call(comm, operation, numel, codec=codec, algorithm=name)
        for name in ("auto", *names)
    ]
    auto, *forced = time_calls(comm, calls, options.seconds, fewest=options.rounds, most=30)
    taken = comm.plans(operation, numel, codec=codec)[0].how
    return Row(operation, codec, numel * 2, taken, auto, dict(zip(names, forced, strict=True)))


if __name__ == "__main__":
    sys.exit(launch.main("benchmarks.tuning", parse, run))
