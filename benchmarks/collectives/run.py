"""From options to rows: which cases there are, in which order, and what is printed about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TextIO

from benchmarks.collectives import record, table
from benchmarks.collectives.cases import (
    DATA_TYPES,
    OPERATIONS,
    Case,
    DataType,
    Operation,
    count_of,
    sweep,
)
from benchmarks.collectives.check import algorithm_of, check
from benchmarks.collectives.measure import measure
from benchmarks.collectives.options import Options
from benchmarks.collectives.perform import Perform, perform
from benchmarks.collectives.table import Result
from benchmarks.launch import UsageError
from topology import Topology
from zcomm import Communicator
from zcomm.hops import choose, parse_codecs

Say = Callable[[str], None]


def validate(options: Options, topology: Topology) -> None:
    """Compare options with the topology of the job, before anything runs.

    Raises:
        UsageError: a root, a codec or an algorithm that this job cannot have.
    """
    if options.root >= topology.size:
        raise UsageError(f"-r {options.root}: possible are ranks 0 to {topology.size - 1}")
    try:
        codecs = parse_codecs(options.codec, len(topology.levels))
        choose(options.algorithm, topology)
    except ValueError as error:
        raise UsageError(str(error)) from None
    operations = (OPERATIONS[name] for name in options.operations)
    if not any(True for item in operations for _ in cases(item, options, topology.size)):
        raise UsageError(f"no row to measure: avg needs floating point, not {options.dtypes[0]}")
    if len(set(codecs)) > 1 and options.operations == ("all_gather",):
        raise UsageError(
            f"all_gather encodes once and takes one codec, got {len(codecs)}: {options.codec}"
        )


def cases(operation: Operation, options: Options, num_ranks: int) -> Iterator[Case]:
    """Yield the cases of one operation, sizes fastest, without what does not exist (int8 avg)."""
    for name in options.dtypes:
        dtype = DATA_TYPES[name]
        for op in options.reductions if operation.reduces else (None,):
            if op == "avg" and not dtype.floating:
                continue
            case = Case(
                operation,
                dtype,
                count=0,
                num_ranks=num_ranks,
                op=op,
                root=options.root if operation.rooted else None,
                codec=codec_for(operation, dtype, op, options),
                algorithm=options.algorithm,
            )
            for nbytes in sweep(
                options.minimum, options.maximum, factor=options.factor, step=options.step
            ):
                yield replace(case, count=count_of(operation, dtype, nbytes, num_ranks))


def codec_for(
    operation: Operation, dtype: DataType, op: str | None, options: Options
) -> str | tuple[str, ...] | None:
    """Return the codec that a case can use of what was asked: a gather the outermost of several."""
    if not operation.takes_codec or not dtype.floating or op not in (None, "sum", "avg"):
        return None
    if operation.name == "all_gather" and isinstance(options.codec, tuple):
        return options.codec[-1]
    return options.codec


def run(
    options: Options, comm: Communicator, *, perform: Perform = perform, file: TextIO | None = None
) -> int:
    """Run all cases and print the table on rank 0. Collective.

    Args:
        options: validated for ``comm``, which must have ``min_numel=0``.
        comm: who takes part.
        perform: runs one operation; a test may give one that makes mistakes.
        file: where rank 0 writes JSON lines.

    Returns:
        1 if any element was wrong, else 0.
    """

    def say(line: str) -> None:
        if comm.rank == 0:
            print(line, flush=True)

    record.write(file, record.header(options, comm))
    for line in _preamble(options, comm):
        say(line)
    results = []
    for name in options.operations:
        results += _run_operation(OPERATIONS[name], options, comm, perform, file, say)
    return _conclude(results, file, say)


def _preamble(options: Options, comm: Communicator) -> list[str]:
    versions = record.versions()
    swept = f"step {options.factor}(factor)" if options.factor else f"step {options.step}(bytes)"
    return [
        f"# zcomm {versions['zcomm']}, torch {versions['torch']}, device cpu",
        f"# ranks {comm.size}, topology {comm.topology.describe()}",
        f"# bytes {options.minimum} to {options.maximum} {swept}, warmup {options.warmup}, "
        f"iterations {options.iterations}, checks {options.check}",
        "# inside, between: wire bytes of one operation that the busiest rank sends in its node "
        "and to other nodes; ratio: logical over wire bytes",
    ]


def _run_operation(
    operation: Operation,
    options: Options,
    comm: Communicator,
    perform: Perform,
    file: TextIO | None,
    say: Say,
) -> list[Result]:
    results: list[Result] = []
    title = None
    for case in cases(operation, options, comm.size):
        if title != (title := _title(case, comm, options)):
            for line in ("#", title, *table.header()):
                say(line)
        timing = measure(comm, case, perform, iterations=options.iterations, warmup=options.warmup)
        outcome = None
        if options.check:
            outcome = check(comm, case, perform, rounds=options.check, seed=options.seed)
        results.append(Result(case, timing, outcome))
        say(table.row(results[-1]))
        record.write(file, record.row(results[-1]))
    return results


def _title(case: Case, comm: Communicator, options: Options) -> str:
    """Return what holds for the rows that follow, an unused codec included."""
    codec = (
        "none"
        if case.codec is None
        else case.codec
        if isinstance(case.codec, str)
        else ",".join(case.codec)
    )
    title = f"# {case.operation.name}"
    if case.operation.takes_codec:
        title += f": codec {codec}, algorithm {algorithm_of(case, comm)}"
    if case.codec != options.codec:
        title += f" (codec {options.codec} does not apply as it stands)"
    return title


def _conclude(results: list[Result], file: TextIO | None, say: Say) -> int:
    checked = [result.outcome for result in results if result.outcome is not None]
    num_wrong = sum(outcome.num_wrong for outcome in checked)
    mean = sum(result.busbw for result in results) / len(results) if results else 0.0
    say("#")
    verdict = f"{num_wrong} {'FAILED' if num_wrong else 'OK'}" if checked else "not checked"
    say(f"# Wrong elements: {verdict}")
    say(f"# Avg bus bandwidth: {mean / 1e9:.4g} GB/s")
    summary = {
        "kind": "summary",
        "num_wrong": num_wrong if checked else None,
        "average_busbw": mean,
    }
    record.write(file, summary)
    return 1 if num_wrong else 0
