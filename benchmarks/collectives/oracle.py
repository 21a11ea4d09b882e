"""What a result must be, computed on one rank from all inputs, without the library's executors.

*Exact* reductions follow DESIGN's definition: sums nest as the levels do, inside out, ascending, in
float32 for 16-bit types; a group's partial sum is rounded to the type that travels. *Quantised*
ones follow the hops of the plan, with the NumPy reference of the codec at each. A *term* carries a
bound of its distance from the real number that it stands for.

Values are NumPy arrays in carrier types (see ``cases``). Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.collectives.cases import DataType
from benchmarks.collectives.inputs import Array, round_to
from topology import Topology
from zcomm.codecs import Codec, reference

Reals = npt.NDArray[np.float64]

_UNIT_FLOAT32 = 2.0**-24
_COMBINE = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
# What rounding x to a type adds: relative to |x|, and absolute (NUMERICS.md, "Error bound").
_ROUNDING = {"bfloat16": (2.0**-8, 2.0**-134), "half": (2.0**-11, 2.0**-25)}


@dataclass(frozen=True)
class Stage:
    """One step of a reduction: within each group, the terms of its members are combined, ascending.

    ``codec``: what each term passes before; None leaves it in the type that travels.
    """

    groups: tuple[tuple[int, ...], ...]
    codec: Codec | None


@dataclass(frozen=True)
class Term:
    """A value on its way to the result, and how far it may be from what it stands for."""

    values: Array
    bound: Reals


def stages(topology: Topology, algorithm: str, codecs: Sequence[Codec | None]) -> tuple[Stage, ...]:
    """Return the steps of a reduction: one per level, or one in all for a flat one with a codec.

    ``algorithm`` is one that the plan settled on, not "auto".
    """
    outermost = outermost_codec(topology, codecs)
    if algorithm == "ordered" or (algorithm == "flat" and outermost is not None):
        return (Stage(topology.levels[-1].groups, outermost),)
    used = codecs if algorithm == "hierarchical" else (None,) * len(codecs)
    return tuple(
        Stage(level.groups, codec) for level, codec in zip(topology.levels, used, strict=True)
    )


def outermost_codec(topology: Topology, codecs: Sequence[Codec | None]) -> Codec | None:
    """Return the codec of the outermost level that has peers: that of flat hops and of gathers."""
    num_members = topology.size
    found = None
    for level, codec in zip(topology.levels, codecs, strict=True):
        if len(level.groups) < num_members:
            found = codec
        num_members = len(level.groups)
    return found


def reduce(inputs: Mapping[int, Array], steps: Sequence[Stage], dtype: DataType, op: str) -> Term:
    """Return the reduction of one chunk, divided for avg, in the type of partial results.

    Args:
        inputs: every rank's values of the chunk, in the carrier type.
        steps: from :func:`stages`.
        dtype: of the inputs.
        op: by its NCCL name.
    """
    wide = accumulator(dtype, steps)
    terms = {rank: _converted(values, wide) for rank, values in inputs.items()}
    is_partial = False
    for step in steps:
        members = [[rank for rank in group if rank in terms] for group in step.groups]
        if all(len(group) == 1 for group in members):
            continue
        if step.codec is not None:
            terms = {rank: _through(step.codec, term) for rank, term in terms.items()}
        elif is_partial and dtype.name == "bfloat16":
            terms = {rank: stored(term, dtype) for rank, term in terms.items()}
        terms = {group[0]: _combined([terms[rank] for rank in group], op) for group in members}
        is_partial = True
    (total,) = terms.values()
    return _divided(total, len(inputs)) if op == "avg" else total


def stored(term: Term, dtype: DataType) -> Term:
    """Return a term as it is written to memory of ``dtype``: rounded once."""
    values = term.values
    if dtype.name not in _ROUNDING:
        return Term(values.astype(dtype.carrier), term.bound)
    relative, absolute = _ROUNDING[dtype.name]
    error = relative * np.abs(values.astype(np.float64)) + absolute
    return Term(round_to(values, dtype), term.bound + error)


def passed(term: Term, dtype: DataType, codec: Codec | None) -> Term:
    """Return a term as the ranks of a gather receive it: encoded once, decoded to ``dtype``."""
    if codec is None:
        return stored(term, dtype)
    values = term.values.astype(np.float32)
    name = {"half": "float16", "bfloat16": "bfloat16"}.get(dtype.name, "float32")
    out = _round_trip(codec, values, name)
    if name == "bfloat16":
        received: Array = (out.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        received = out.view(name)
    return Term(received.astype(dtype.carrier), term.bound + codec.error_bound(values, name))


def given(values: Array, dtype: DataType, codec: Codec | None) -> Term:
    """Return what a rank puts in: the values, or the float32 that a codec makes of float64."""
    return _converted(values, dtype.carrier if codec is None else np.dtype(np.float32))


def accumulator(dtype: DataType, steps: Sequence[Stage]) -> np.dtype:
    """Return the type of partial results: float32 for 16-bit types and wherever a codec is used."""
    if dtype.itemsize == 2 or any(step.codec for step in steps):
        return np.dtype(np.float32)
    return dtype.carrier


def true_reduction(inputs: Mapping[int, Array], op: str) -> Reals:
    """Return the reduction of all ranks' values in float64."""
    wide = [values.astype(np.float64) for _, values in sorted(inputs.items())]
    total = wide[0]
    for values in wide[1:]:
        total = _COMBINE[op](total, values)
    return total / len(wide) if op == "avg" else total


def _converted(values: Array, wide: np.dtype) -> Term:
    """Return values in a wider type, or float64 as the float32 that codecs make of it."""
    narrowed = values.dtype == np.float64 and wide == np.float32
    bound = _UNIT_FLOAT32 * np.abs(values) if narrowed else np.zeros(values.shape)
    return Term(values.astype(wide), bound)


def _through(codec: Codec, term: Term) -> Term:
    values = _round_trip(codec, term.values, "float32").view(np.float32)
    return Term(values, term.bound + codec.error_bound(term.values))


def _round_trip(codec: Codec, values: Array, name: str) -> npt.NDArray[np.uint8]:
    """Return the memory of float32 values, encoded as one segment and decoded to type ``name``."""
    start, length = np.zeros(1, np.int64), np.array([values.size], np.int64)
    wire = np.empty(codec.wire_nbytes(values.size), np.uint8)
    reference.encode(codec, values.view(np.uint8), "float32", start, length, wire)
    out = np.empty(values.size * (4 if name == "float32" else 2), np.uint8)
    reference.decode(codec, wire, start, length, out, name)
    return out


def _combined(terms: Sequence[Term], op: str) -> Term:
    total, bound = terms[0].values, terms[0].bound
    magnitude = np.abs(total.astype(np.float64))
    with np.errstate(over="ignore", invalid="ignore"):
        for term in terms[1:]:
            total = _COMBINE[op](total, term.values)
            bound = bound + term.bound
            magnitude += np.abs(term.values.astype(np.float64))
    # As in float32 also for float64 sums: these serve as the truth, which a bound cannot refine.
    return Term(total, bound + (len(terms) - 1) * _UNIT_FLOAT32 * magnitude)


def _divided(total: Term, divisor: int) -> Term:
    values = total.values / total.values.dtype.type(divisor)
    return Term(values, total.bound / divisor + _UNIT_FLOAT32 * np.abs(values))
