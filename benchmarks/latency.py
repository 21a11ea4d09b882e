"""Latency of small operations beside the raw MPI call of mpi4py, in one run.

    mpirun -n 2 python -m benchmarks.latency
    python -m benchmarks.cluster --nodes 2 --ranks-per-node 1 --rate 1gbit -- \
        python -m benchmarks.latency

Calls of both kinds take turns in blocks. All ranks meet in a raw barrier before each call, and a
call lasts as long as on its slowest rank. A row holds the size (bytes of one rank's array), the
operation, median and 99th percentile of both in microseconds, and the ratio and the difference of
the medians. Every result is checked, outside the time; the exit code is 1 when one is wrong. The
last line says what part of the CPU time other programs took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import launch
from benchmarks.wire import instant, others, report
from zcomm import Communicator, launcher

OPERATIONS = ("all_reduce", "all_gather", "broadcast", "barrier")
SIZES = (8, 64, 512, 4096, 16384, 65536)
ARRAYS = ("numpy", "torch")
BLOCK = 50
"""Calls of one kind before the other has its turn."""

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Options:
    """What to measure; see ``--help``."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    calls: int
    arrays: str
    topology: str


@dataclass(frozen=True)
class Case:
    """One operation twice, raw and ours: each returns nothing and fills what ``check`` reads."""

    operation: str
    nbytes: int
    prepare: Callable[[], None]
    raw: Callable[[], None]
    ours: Callable[[], None]
    check: Callable[[], bool]


def parse(arguments: list[str]) -> Options:
    """Read the command line."""
    parser = launch.Parser(prog="python -m benchmarks.latency", description=__doc__.split("\n")[0])
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--sizes", nargs="+", type=_size, default=SIZES, help="bytes")
    parser.add_argument("--calls", type=int, default=2000, help="of each kind (default: 2000)")
    parser.add_argument("--arrays", choices=ARRAYS, default="numpy")
    parser.add_argument("--topology", default="auto")
    given = parser.parse_args(arguments)
    if given.calls < 1:
        raise launch.UsageError(f"--calls {given.calls}: possible are numbers from 1")
    operations, sizes = tuple(given.operations), tuple(given.sizes)
    return Options(operations, sizes, given.calls, given.arrays, given.topology)


def run(options: Options, comm: Communicator) -> int:
    """Measure and print every case; return the exit code."""
    say = print if comm.rank == 0 else lambda *_, **__: None
    say(f"# {comm.topology.describe()}, {options.arrays}, {options.calls} calls of each kind")
    columns = f"{'raw us':>9}{'p99':>9}{'zcomm us':>10}{'p99':>9}{'ratio':>8}{'difference':>12}"
    say(f"# {'bytes':>6} {'operation':<11}{columns}")
    right = True
    watch = others.Watch(instant.kernel())
    for case in _cases(options, comm):
        raw, ours, correct = _measure(case, options.calls)
        right = right and correct
        say(_row(case, raw, ours) + ("" if correct else "   WRONG"), flush=True)
    say(report.quality_line(report.Quality(watch.part(launcher.world()), 0)))
    return 0 if right else 1


def _size(text: str) -> int:
    nbytes = int(text)
    if nbytes < 4 or nbytes % 4:
        raise ValueError(f"{text} bytes are no float32 elements")
    return nbytes


def _cases(options: Options, comm: Communicator) -> list[Case]:
    cases = []
    for operation in options.operations:
        # A barrier has no bytes.
        sizes = options.sizes if operation != "barrier" else (0,)
        cases += [_case(operation, nbytes, options.arrays, comm) for nbytes in sizes]
    return cases


def _case(operation: str, nbytes: int, arrays: str, comm: Communicator) -> Case:
    from mpi4py import MPI

    world = launcher.world()
    own = np.zeros(nbytes // 4, np.float32)
    gathered = np.zeros(own.size * comm.size, np.float32)
    x, out = _as(arrays, own), _as(arrays, gathered)
    tokens = np.arange(1, comm.size + 1, dtype=np.float32)
    results = {
        "all_reduce": (own, np.full(own.size, tokens.sum(), np.float32)),
        "all_gather": (gathered, np.repeat(tokens, own.size)),
        "broadcast": (own, np.full(own.size, tokens[0])),
        "barrier": (own, own),
    }
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "all_reduce": (lambda: world.Allreduce(MPI.IN_PLACE, own), lambda: comm.all_reduce(x)),
        "all_gather": (lambda: world.Allgather(own, gathered), lambda: comm.all_gather(x, out)),
        "broadcast": (lambda: world.Bcast(own), lambda: comm.broadcast(x)),
        "barrier": (world.Barrier, comm.barrier),
    }

    def prepare() -> None:
        gathered.fill(0)
        own.fill(tokens[comm.rank])

    def check() -> bool:
        return np.array_equal(*results[operation])

    return Case(operation, nbytes, prepare, *calls[operation], check)


def _as(arrays: str, x: npt.NDArray[np.float32]) -> Any:
    """Return the same memory as an array of the kind that is measured."""
    if arrays == "numpy":
        return x
    import torch

    return torch.from_numpy(x)


def _measure(case: Case, calls: int) -> tuple[Times, Times, bool]:
    """Return the seconds of both kinds of calls, and whether all results were right everywhere."""
    from mpi4py import MPI

    world = launcher.world()
    times: list[list[float]] = [[], []]
    right = True
    block = min(BLOCK, calls)
    for call in (case.raw, case.ours):
        _block(case, call, block, world)  # plans, pages and connections
    while len(times[1]) < calls:
        for kind, call in enumerate((case.raw, case.ours)):
            seconds, correct = _block(case, call, block, world)
            times[kind] += seconds
            right = right and correct
    slowest = np.array(times)
    world.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    verdict = np.array([right])
    world.Allreduce(MPI.IN_PLACE, verdict, MPI.LAND)
    return slowest[0], slowest[1], bool(verdict[0])


def _block(case: Case, call: Callable[[], Any], calls: int, world: Any) -> tuple[list[float], bool]:
    seconds, right = [], True
    for _ in range(calls):
        case.prepare()
        world.Barrier()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
        right = case.check() and right
    return seconds, right


def _row(case: Case, raw: Times, ours: Times) -> str:
    a, b = (np.percentile(times, (50, 99)) * 1e6 for times in (raw, ours))
    figures = f"{a[0]:9.1f}{a[1]:9.1f}{b[0]:10.1f}{b[1]:9.1f}{b[0] / a[0]:8.2f}{b[0] - a[0]:12.1f}"
    return f"{case.nbytes:8d} {case.operation:<11}{figures}"


if __name__ == "__main__":
    sys.exit(launch.main("benchmarks.latency", parse, run))
