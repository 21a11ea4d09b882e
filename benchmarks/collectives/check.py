"""Whether a result is right, element by element, and how far it is from the true one.

Every round runs the operation on two inputs, apart from any timing. *Designed* data have one right
result, known in float64: without a codec whole numbers, whose sums are exact in every order; with
one, numbers on its grid, which it must not change. *Random* data must give the bits of DESIGN's
nested sum, or of the reference implementation of the codec, and with a codec lie within the
computed bound of the true result. Outputs are poisoned before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.collectives import inputs, oracle
from benchmarks.collectives.cases import Case
from benchmarks.collectives.inputs import Array
from benchmarks.collectives.oracle import Reals, Term
from benchmarks.collectives.perform import Perform, poisoned, source_span, to_tensor, to_values
from zcomm import Communicator
from zcomm.codecs import Codec
from zcomm.hops import parse_codecs
from zcomm.layout import Layout

Make = Callable[[int, int, int], Array]
"""(rank, start, stop) -> that rank's input in that range of the whole buffer."""


@dataclass(frozen=True)
class Outcome:
    """Of all ranks together: wrong elements, and how far random data are from the true result.

    ``max_error`` is the largest error over the largest true value, ``rms_error`` the ratio of the
    root mean squares.
    """

    num_wrong: int
    max_error: float
    rms_error: float


@dataclass(frozen=True)
class _Tally:
    wrong: int
    error: Reals
    true: Reals


def check(comm: Communicator, case: Case, perform: Perform, *, rounds: int, seed: int) -> Outcome:
    """Run ``rounds`` rounds of checks and combine what all ranks found."""
    wrong, squares, largest = 0, np.zeros(2), np.zeros(2)
    for number in range(rounds):
        wrong += _check_designed(comm, case, perform, seed + number)
        if not case.dtype.floating:
            continue
        tally = _check_random(comm, case, perform, seed + number)
        wrong += tally.wrong
        squares += [(tally.error**2).sum(), (tally.true**2).sum()]
        largest = np.maximum(
            largest, [tally.error.max(initial=0), np.abs(tally.true).max(initial=0)]
        )
    everyone = comm.all_gather_values(np.array([wrong, *squares, *largest], np.float64))
    num_wrong, error2, true2 = everyone[:, :3].sum(axis=0)
    worst, highest = everyone[:, 3:].max(axis=0)
    return Outcome(int(num_wrong), _ratio(worst, highest), _ratio(error2, true2) ** 0.5)


def _ratio(error: float, true: float) -> float:
    return float(error / true) if true > 0 else 0.0


def _check_designed(comm: Communicator, case: Case, perform: Perform, seed: int) -> int:
    def make(rank: int, start: int, stop: int) -> Array:
        if case.codec is None:
            return inputs.exact(case.dtype, case.op, case.num_ranks, seed, rank, start, stop)
        chunk = case.count if case.operation.chunked else case.numel
        return inputs.grid(case.dtype, chunk, seed, start, stop)

    true = _true_result(comm, case, make)
    right = (
        inputs.round_to(true, case.dtype)
        if case.dtype.floating
        else true.astype(case.dtype.carrier)
    )
    return int(_differs(_result(comm, case, perform, make), right).sum())


def _check_random(comm: Communicator, case: Case, perform: Perform, seed: int) -> _Tally:
    def make(rank: int, start: int, stop: int) -> Array:
        return inputs.normal(case.dtype, seed, rank, start, stop)

    expected, true = _expected(comm, case, make), _true_result(comm, case, make)
    result = _result(comm, case, perform, make)
    error = np.abs(result.astype(np.float64) - true)
    wrong = _differs(result, expected.values)
    if case.codec is not None:
        wrong |= ~(error <= expected.bound)
    return _Tally(int(wrong.sum()), error, true)


def _result(comm: Communicator, case: Case, perform: Perform, make: Make) -> Array:
    source = to_tensor(make(comm.rank, *source_span(case, comm.rank)), case.dtype)
    out = poisoned(case)
    perform(comm, case, source, out)
    return to_values(source if out is None else out, case.dtype)


def _differs(result: Array, right: Array) -> npt.NDArray[np.bool_]:
    """Compare bits, not values: +0 is not -0, and no NaN is right."""
    assert result.shape == right.shape
    assert result.dtype == right.dtype
    bits = np.dtype(f"u{result.itemsize}")
    differs: npt.NDArray[np.bool_] = np.ascontiguousarray(result).view(
        bits
    ) != np.ascontiguousarray(right).view(bits)
    return differs


def _true_result(comm: Communicator, case: Case, make: Make) -> Reals:
    ranks = range(case.num_ranks)
    match case.operation.name:
        case "all_gather":
            parts = [make(rank, *source_span(case, rank)) for rank in ranks]
            return np.concatenate(parts).astype(np.float64)
        case "all_to_all":
            span = _own_chunk(comm, case)
            return np.concatenate([make(rank, *span) for rank in ranks]).astype(np.float64)
        case "broadcast":
            assert case.root is not None
            return make(case.root, 0, case.numel).astype(np.float64)
        case "reduce_scatter":
            span = _own_chunk(comm, case)
        case _:
            span = (0, case.numel)
    assert case.op is not None
    return oracle.true_reduction({rank: make(rank, *span) for rank in ranks}, case.op)


def _own_chunk(comm: Communicator, case: Case) -> tuple[int, int]:
    return comm.rank * case.count, (comm.rank + 1) * case.count


def _expected(comm: Communicator, case: Case, make: Make) -> Term:
    """Return the bits that random data must give, and their bound."""
    codecs = parse_codecs(case.codec, len(comm.topology.levels))
    match case.operation.name:
        case "all_gather":
            parts = [make(rank, *source_span(case, rank)) for rank in range(case.num_ranks)]
            codec = oracle.outermost_codec(comm.topology, codecs)
            sent = [oracle.given(part, case.dtype, codec) for part in parts]
            return _joined([oracle.passed(term, case.dtype, codec) for term in sent])
        case "reduce_scatter":
            return oracle.stored(
                _reduced(comm, case, codecs, make, *_own_chunk(comm, case)), case.dtype
            )
        case "all_reduce":
            layout = Layout.cut(case.dtype.name, case.numel, case.num_ranks)
            spans = [(run.start, run.start + run.numel) for (run,) in layout.shards]
            reduced = [_reduced(comm, case, codecs, make, *span) for span in spans]
            codec = oracle.outermost_codec(comm.topology, codecs)
            return _joined([oracle.passed(term, case.dtype, codec) for term in reduced])
        case _:
            true = _true_result(comm, case, make)
            return Term(true.astype(case.dtype.carrier), np.zeros(true.shape))


def _reduced(
    comm: Communicator,
    case: Case,
    codecs: Sequence[Codec | None],
    make: Make,
    start: int,
    stop: int,
) -> Term:
    steps = oracle.stages(comm.topology, algorithm_of(case, comm), codecs)
    chunks = {rank: make(rank, start, stop) for rank in range(case.num_ranks)}
    assert case.op is not None
    return oracle.reduce(chunks, steps, case.dtype, case.op)


def algorithm_of(case: Case, comm: Communicator) -> str:
    """Return the algorithm that a case runs with."""
    dtype = str(case.dtype.torch).removeprefix("torch.")
    how = {"codec": case.codec, "algorithm": case.algorithm}
    return comm.plans(case.operation.name, case.numel, dtype, **how)[0].algorithm


def _joined(terms: Sequence[Term]) -> Term:
    return Term(
        np.concatenate([term.values for term in terms]),
        np.concatenate([term.bound for term in terms]),
    )
