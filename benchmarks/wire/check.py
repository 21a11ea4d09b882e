"""Whether results are right, against float64, once per variant and outside any time.

A rank's data are a *pattern* of near-normal numbers, repeated; its length is a prime, so that no
cut of a message repeats with it and a part in the wrong place is found. Gathers without a codec
must be equal. Sums must lie within the bound of any order of summation. Quantised results
must lie within the computed bound of every codec on their way in *windows* at the beginning, the
middle and the end of every chunk, and elsewhere within twice the largest bound found there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.collectives import oracle
from benchmarks.collectives.cases import Case, DataType
from benchmarks.collectives.inputs import Array, normal
from benchmarks.collectives.perform import to_tensor, to_values
from topology import Topology
from zcomm.hops import choose, parse_codecs
from zcomm.layout import Layout

PATTERN = 1_048_573
WINDOW = 2**14
# A multiple of every block, so that blocks are those of the whole chunk.
_ALIGNMENT = 4096
_PIECE = 2**18
_ROUNDING = {"bfloat16": 2.0**-8, "half": 2.0**-11, "float": 2.0**-24, "double": 2.0**-53}

Reals = npt.NDArray[np.float64]


class Data:
    """The inputs of all ranks: element i of rank r is ``pattern(r)[i % PATTERN]``."""

    def __init__(self, dtype: DataType, num_ranks: int) -> None:
        self.dtype = dtype
        self.num_ranks = num_ranks
        # Twice, so that any part of a pattern's length is a view.
        self._patterns = [
            np.tile(normal(dtype, 1, rank, 0, PATTERN), 2) for rank in range(num_ranks)
        ]

    def values(self, rank: int, start: int, stop: int) -> Array:
        """Return a part of a rank's input, of at most ``PATTERN`` elements, in the carrier type."""
        assert stop - start <= PATTERN
        first = start % PATTERN
        return self._patterns[rank][first : first + stop - start]

    def source(self, rank: int, numel: int) -> torch.Tensor:
        """Return a rank's whole input."""
        repeated = to_tensor(self._patterns[rank][:PATTERN], self.dtype).repeat(
            -(-numel // PATTERN)
        )
        return repeated[:numel].clone()


def num_wrong(case: Case, topology: Topology, data: Data, rank: int, out: torch.Tensor) -> int:
    """Return how many elements of a rank's result are wrong."""
    if case.codec is None:
        return sum(_wrong_exact(case, data, *part) for part in _parts(case, rank, out))
    wrong, largest = [], 0.0
    for owner, offset, values in _parts(case, rank, out):
        wrong.append(np.zeros(values.numel(), np.bool_))
        for start, stop in windows(values.numel()):
            true, bound = _expected(case, topology, data, owner, offset + start, offset + stop)
            error = np.abs(_reals(values[start:stop], data.dtype) - true)
            wrong[-1][start:stop] = ~(error <= bound)
            largest = max(largest, float(bound.max(initial=0)))
    for found, (owner, offset, values) in zip(wrong, _parts(case, rank, out), strict=True):
        for start, stop in _pieces(values.numel()):
            true = _truth(case, data, owner, offset + start, offset + stop)[0]
            error = np.abs(_reals(values[start:stop], data.dtype) - true)
            found[start:stop] |= ~(error <= 2 * largest)
    return sum(int(found.sum()) for found in wrong)


def windows(numel: int) -> list[tuple[int, int]]:
    """Return the windows of a chunk: all of a small one."""
    if numel <= 3 * WINDOW:
        return [(0, numel)] if numel else []
    last = (numel - WINDOW) // _ALIGNMENT * _ALIGNMENT
    middle = last // 2 // _ALIGNMENT * _ALIGNMENT
    return [(0, WINDOW), (middle, middle + WINDOW), (last, numel)]


def _parts(case: Case, rank: int, out: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (owner, offset, values): results as chunks, each with its place in a rank's input.

    The owner is the rank whose input is gathered, or -1 for a sum over all.
    """
    match case.operation.name:
        case "all_gather":
            for owner, values in enumerate(out.view(case.num_ranks, -1)):
                yield owner, 0, values
        case "reduce_scatter":
            yield -1, rank * case.count, out
        case _:
            layout = Layout.cut(case.dtype.name, case.numel, case.num_ranks)
            for (run,) in layout.shards:
                yield -1, run.start, out[run.start : run.start + run.numel]


def _pieces(numel: int) -> Iterator[tuple[int, int]]:
    for start in range(0, numel, _PIECE):
        yield start, min(start + _PIECE, numel)


def _wrong_exact(case: Case, data: Data, owner: int, offset: int, values: torch.Tensor) -> int:
    wrong = 0
    for start, stop in _pieces(values.numel()):
        piece = to_values(values[start:stop], data.dtype)
        if owner >= 0:
            wrong += int((piece != data.values(owner, offset + start, offset + stop)).sum())
            continue
        true, size = _truth(case, data, owner, offset + start, offset + stop)
        # Every addition rounds once, in some order; then the result does.
        bound = data.num_ranks * _ROUNDING[data.dtype.name] * size
        wrong += int((~(np.abs(piece.astype(np.float64) - true) <= bound)).sum())
    return wrong


def _truth(case: Case, data: Data, owner: int, start: int, stop: int) -> tuple[Reals, Reals]:
    """Return the result in float64, and the sum of the sizes of its terms."""
    ranks = [owner] if owner >= 0 else range(data.num_ranks)
    total, size = np.zeros(stop - start), np.zeros(stop - start)
    for rank in ranks:
        values = data.values(rank, start, stop).astype(np.float64)
        total += values
        size += np.abs(values)
    return total, size


def _expected(
    case: Case, topology: Topology, data: Data, owner: int, start: int, stop: int
) -> tuple[Reals, Reals]:
    """Return the result in float64 and its bound, from the codecs that it passes."""
    codecs = parse_codecs(case.codec, len(topology.levels))
    last = oracle.outermost_codec(topology, codecs)
    true = _truth(case, data, owner, start, stop)[0]
    if owner >= 0:
        given = oracle.given(data.values(owner, start, stop), data.dtype, last)
        return true, oracle.passed(given, data.dtype, last).bound
    chunks = {rank: data.values(rank, start, stop) for rank in range(data.num_ranks)}
    steps = oracle.stages(topology, choose(case.algorithm, topology), codecs)
    total = oracle.reduce(chunks, steps, data.dtype, "sum")
    if case.operation.name == "all_reduce":
        return true, oracle.passed(total, data.dtype, last).bound
    return true, oracle.stored(total, data.dtype).bound


def _reals(values: torch.Tensor, dtype: DataType) -> Reals:
    return to_values(values, dtype).astype(np.float64)
