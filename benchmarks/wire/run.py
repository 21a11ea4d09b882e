"""From options to rows: cases one after the other, in each all variants in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from benchmarks import launch
from benchmarks.collectives import record
from benchmarks.collectives.cases import DATA_TYPES, OPERATIONS, Case, count_of
from benchmarks.collectives.check import algorithm_of
from benchmarks.collectives.measure import OVERHEAD
from benchmarks.launch import UsageError
from benchmarks.wire import check, floor, gloo, instant, others, report
from benchmarks.wire.options import Options
from benchmarks.wire.report import Quality, Row
from benchmarks.wire.targets import Place, judge
from benchmarks.wire.variants import Absent, Arrays, Variant, build
from zcomm import Communicator, launcher
from zcomm.hops import choose, parse_codecs

MAX_ROUNDS = 200
WARMUP, WARMUP_LARGE = 2, 1
LARGE_NBYTES = 32 * 2**20
Say = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """What all cases share. ``spoil``: what a test does to a result before it is checked."""

    options: Options
    comm: Communicator
    pace: instant.Pace
    link: floor.Link | None
    gloo: gloo.Gloo | None
    file: TextIO | None
    spoil: Callable[[Variant, Arrays], None] | None = None

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.comm.rank == 0:
            print(line, flush=True)

    @property
    def where(self) -> dict[str, Any]:
        """Nodes, ranks and link, as they stand in JSON."""
        groups = floor.nodes(self.comm.topology)
        return {
            "num_nodes": len(groups),
            "num_ranks": self.comm.size,
            "rate": None if self.link is None else self.link.rate,
            "nominal_rate": None if self.link is None else self.link.nominal,
            "credit_nbytes": 0 if self.link is None else self.link.credit_nbytes,
        }


def run(
    options: Options,
    comm: Communicator,
    *,
    spoil: Callable[[Variant, Arrays], None] | None = None,
) -> int:
    """Measure and print every case; return 1 if any element was wrong, else 0. Collective."""
    validate(options, comm)
    file = launch.on_root(comm, lambda: record.open_file(options.json))
    world = launcher.world()
    machines = comm.all_gather_values(np.array([instant.kernel()], np.int64))
    pace = instant.Pace(world, shared=len(np.unique(machines)) == 1)
    peers = gloo.connect() if "gloo" in options.peers else None
    link = floor.measure(world, comm.topology)
    bench = Bench(options, comm, pace, link, peers, file, spoil)
    _preamble(bench)
    num_wrong = 0
    for name in options.operations:
        for nbytes in options.sizes:
            num_wrong += _run_case(bench, _case(name, nbytes, options, comm))
    bench.say("#")
    bench.say(f"# Wrong elements: {_verdict(options, num_wrong)}")
    if peers is not None:
        peers.close()
    if file is not None:
        file.close()
        bench.say(f"# JSON lines: {options.json}")
    return 1 if num_wrong else 0


def validate(options: Options, comm: Communicator) -> None:
    """Compare options with the topology of the job, before anything runs.

    Raises:
        UsageError: a codec or an algorithm that this job cannot have, or nothing for a rank to do.
    """
    for name in options.operations:
        if _case(name, options.sizes[0], options, comm).count == 0:
            raise UsageError(
                f"-b {options.sizes[0]}: less than 16 bytes for each of {comm.size} ranks"
            )
    levels = len(comm.topology.levels)
    try:
        for algorithm in options.algorithms:
            choose(algorithm, comm.topology)
        for operation in options.operations:
            for codec in options.codecs_of(operation):
                if operation == "all_gather" and len(set(parse_codecs(codec, levels))) > 1:
                    raise UsageError(f"all_gather takes one codec, not {codec}")
    except ValueError as error:
        raise UsageError(str(error)) from None


def _case(name: str, nbytes: int, options: Options, comm: Communicator) -> Case:
    operation, dtype = OPERATIONS[name], DATA_TYPES[options.dtype]
    case = Case(operation, dtype, 0, comm.size, op="sum" if operation.reduces else None)
    return replace(case, count=count_of(operation, dtype, nbytes, comm.size))


def _verdict(options: Options, num_wrong: int) -> str:
    if not options.check:
        return "not checked"
    return f"{num_wrong} {'FAILED' if num_wrong else 'OK'}"


def _preamble(bench: Bench) -> None:
    from mpi4py import MPI

    versions = record.versions()
    library = MPI.Get_library_version().splitlines()[0].strip("\x00 ")
    bench.say(f"# zcomm {versions['zcomm']}, torch {versions['torch']}, {library}")
    bench.say(f"# {bench.comm.topology.describe()}; {record.cpu_name()}")
    bench.say(f"# link: {'none' if bench.link is None else bench.link.describe()}")
    start = "at an agreed instant of one clock" if bench.pace.shared else "after a barrier"
    bench.say(f"# calls start {start} and end with the last rank; ms: median, least, most")
    record.write(
        bench.file,
        {
            "kind": "header",
            "schema": report.SCHEMA,
            **record.place(bench.comm),
            "mpi": library,
            "shared_clock": bench.pace.shared,
            **bench.where,
        },
    )


def _run_case(bench: Bench, case: Case) -> int:
    """Measure one case; return the number of wrong elements."""
    data = check.Data(case.dtype, case.num_ranks)
    numel = case.count if case.operation.name == "all_gather" else case.numel
    arrays = Arrays(case, data.source(bench.comm.rank, numel))
    variants, absent = build(bench.options, bench.comm, bench.gloo, arrays)
    levels, wrong = _first_calls(bench, variants, arrays, data)
    bench.pace.late = 0
    watch = others.Watch(instant.kernel())
    seconds, left = _time(bench, variants, arrays)
    part = watch.part(launcher.world())
    late = bench.comm.all_gather_values(np.array([bench.pace.late], np.int64))
    quality = Quality(part, int(late.max()))
    rows = [
        _row(bench, variant, levels[i], seconds[i], left[i], wrong[i] if wrong else None)
        for i, variant in enumerate(variants)
    ]
    _tell(bench, case, rows, absent, quality)
    return sum(wrong)


def _first_calls(
    bench: Bench, variants: Sequence[Variant], arrays: Arrays, data: check.Data
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Warm up; return bytes by level of the busiest node, and wrong elements, by variant."""
    levels, wrong = [], []
    for variant in variants:
        for _ in range(WARMUP if variant.case.size < LARGE_NBYTES else WARMUP_LARGE):
            arrays.poison()
            bench.comm.traffic.reset()
            bench.pace.meet()
            variant.call()
        levels.append(_level_nbytes(bench.comm))
        if bench.options.check:
            if bench.spoil is not None:
                bench.spoil(variant, arrays)
            # The bound of a quantised sum depends on the algorithm, which auto chooses by size.
            case = replace(variant.case, algorithm=algorithm_of(variant.case, bench.comm))
            own = check.num_wrong(case, bench.comm.topology, data, bench.comm.rank, arrays.out)
            wrong.append(int(bench.comm.all_gather_values(np.array([own], np.int64)).sum()))
    return levels, wrong


def _level_nbytes(comm: Communicator) -> tuple[int, ...]:
    """Return wire bytes by level since the last reset, of the node that sends most over each."""
    own = np.zeros(len(comm.topology.levels), np.int64)
    for (operation, level), counter in comm.traffic.snapshot().items():
        if operation not in OVERHEAD:
            own[level] += counter.wire_nbytes
    rows = comm.all_gather_values(own)
    sums = [rows[list(group)].sum(axis=0) for group in floor.nodes(comm.topology)]
    return tuple(int(x) for x in np.max(sums, axis=0))


def _time(
    bench: Bench, variants: Sequence[Variant], arrays: Arrays
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return seconds of calls, and bytes that left this node by its interface: variants x rounds.

    The first variant of a round is another one each time, so that none always follows the same.
    """
    options, pace = bench.options, bench.pace
    instants: list[list[float]] = [[] for _ in variants]
    ends: list[list[float]] = [[] for _ in variants]
    left: list[list[int]] = [[] for _ in variants]
    begin = pace.meet()
    for number in range(MAX_ROUNDS):
        enough = pace.meet() - begin >= options.seconds
        if number >= options.rounds and enough:
            break
        for place in range(len(variants)):
            which = (place + number) % len(variants)
            arrays.prepare()
            before = floor.interface_nbytes() or 0
            start, end = pace.time(variants[which].call)
            instants[which].append(start)
            ends[which].append(end)
            # What others still send at the end of this call is counted at the next one: little.
            pace.meet()
            left[which].append((floor.interface_nbytes() or 0) - before)
    seconds = instant.durations(launcher.world(), np.array(instants), np.array(ends))
    return seconds, np.array(left)


def _row(
    bench: Bench,
    variant: Variant,
    levels: tuple[int, ...],
    seconds: npt.NDArray[np.float64],
    left: npt.NDArray[np.int64],
    num_wrong: int | None,
) -> Row:
    case, ours = variant.case, variant.library == "zcomm"
    nbytes = floor.least_nbytes(case, bench.comm.topology)
    busiest = bench.comm.all_gather_values(np.array([np.median(left)])).max()
    return Row(
        operation=case.operation.name,
        dtype=case.dtype.name,
        nbytes=case.size,
        name=variant.name,
        library=variant.library,
        codec=variant.codec,
        algorithm=algorithm_of(case, bench.comm) if ours else None,
        seconds=tuple(float(x) for x in seconds),
        floor=None if bench.link is None else bench.link.seconds(nbytes),
        level_nbytes=levels if ours else None,
        interface_nbytes=int(busiest) if floor.interface_nbytes() is not None else None,
        num_wrong=num_wrong,
    )


def _tell(
    bench: Bench, case: Case, rows: Sequence[Row], absent: Sequence[Absent], quality: Quality
) -> None:
    """Print a case and write its lines."""
    name = case.operation.name
    bench.say("#")
    bench.say(f"# {name}, {case.numel} elements of {case.dtype.name}, {len(rows[0].seconds)} calls")
    bench.say(report.header())
    for row in rows:
        bench.say(report.line(row, rows))
        record.write(bench.file, report.row_object(row, bench.where, quality))
    for item in absent:
        bench.say(f"# {item.name}: absent, {item.reason}")
    where = bench.where
    place = Place(
        where["num_nodes"],
        bench.comm.size // where["num_nodes"],
        where["nominal_rate"],
        case.size,
    )
    for verdict in judge(place, name, case.dtype.name, [row.measured() for row in rows]):
        bench.say(report.verdict_line(verdict))
        record.write(bench.file, report.verdict_object(verdict, where, case.size))
    bench.say(report.quality_line(quality))
