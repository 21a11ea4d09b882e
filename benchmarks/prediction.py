"""Does the cost model predict what operations take, at sizes that it was not fitted to?

    ZCOMM_TUNING=folder mpirun -n 4 zcomm tune
    ZCOMM_TUNING=folder mpirun -n 4 python -m benchmarks.prediction
    mpirun -n 4 python -m benchmarks.prediction --tune 30    # measured and fitted in the same job

Every algorithm that auto may take, with pieces of the usual sizes, is called in turns with the
others, with bfloat16; a call lasts as long as on its slowest rank. A row holds the KiB of the whole
buffer, the operation, the codec, the algorithm, the median and the predicted milliseconds, and how
far the second is from the first. The exit code is 1 when one is further than the limit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks import launch, tuning
from benchmarks.tuning import chosen
from zcomm import Communicator
from zcomm.hops import candidates
from zcomm.tune import numel_of, operation_call, time_calls, tune
from zcomm.tuning import Tuning

SIZES = (3 * 2**19, 6 * 2**20, 24 * 2**20)
"""Between those that ``zcomm tune`` measures."""


@dataclass(frozen=True)
class Options(tuning.Options):
    """What to compare; see ``--help``."""

    tune: float | None


@dataclass(frozen=True)
class Row:
    """One way to do one operation: seconds, measured and predicted."""

    operation: str
    codec: str
    nbytes: int
    how: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """How far the prediction is from what was measured, as a part of that."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        words = f"{self.nbytes // 1024:8d} {self.operation:<15}{self.codec:<7}{self.how:<14}"
        return f"{words}{self.measured * 1e3:10.3f}{self.predicted * 1e3:10.3f}{self.error:+8.1%}"


def parse(arguments: list[str]) -> Options:
    """Read the command line."""
    parser = launch.Parser(
        prog="python -m benchmarks.prediction", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--limit", type=float, default=0.2, help="the largest error (0.2)")
    add("--tune", type=float, metavar="SECONDS", help="measure the constants first, so long")
    options = Options(**chosen(parser, arguments, SIZES))
    if options.tune is not None and not options.tune > 0:
        raise launch.UsageError(f"--tune {options.tune}: more than 0")
    return options


def run(options: Options, comm: Communicator) -> int:
    """Measure and print every row; return the exit code."""
    say = print if comm.rank == 0 else lambda *_, **__: None
    known = comm.tuning
    if options.tune is not None:
        known = tune(comm, options.codecs, options.tune).tuning
    say(f"# {comm.topology.describe()}; {known.source}")
    say("#    KiB operation      codec  algorithm     measured   model ms   error")
    rows = []
    for nbytes in options.sizes:
        for operation in options.operations:
            for codec in options.codecs:
                for row in _rows(options, comm, known, operation, codec, nbytes):
                    rows.append(row)
                    say(str(row), flush=True)
    errors = [abs(row.error) for row in rows]
    over = sum(error > options.limit for error in errors)
    say(f"# error: median {median(errors):.1%}, largest {max(errors):.1%}, of {len(rows)}")
    say(f"# over {options.limit:.0%}: {over}")
    return 1 if over else 0


def _rows(
    options: Options,
    comm: Communicator,
    known: Tuning,
    operation: str,
    codec: str,
    nbytes: int,
) -> Iterator[Row]:
    numel = numel_of(comm.size, nbytes)
    names = candidates("auto", comm.topology)
    how = [{"codec": codec, "algorithm": name} for name in names]
    calls = [operation_call(comm, operation, numel, **each) for each in how]
    taken = time_calls(comm, calls, options.seconds * len(calls), fewest=options.rounds, most=30)
    for name, each, measured in zip(names, how, taken, strict=True):
        predicted = known.model_seconds(comm.plans(operation, numel, **each))
        yield Row(operation, codec, numel * 2, name, measured, predicted)


if __name__ == "__main__":
    sys.exit(launch.main("benchmarks.prediction", parse, run))
