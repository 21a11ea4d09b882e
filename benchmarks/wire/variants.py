"""The ways to do an operation that are measured beside each other.

All variants of a case read one source and write one result; where the operation works in place the
source is copied there before each call, outside the time. A variant that cannot be had is absent
with its reason, never left out silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from benchmarks.collectives.cases import Case
from benchmarks.collectives.perform import perform
from benchmarks.wire.gloo import Gloo
from benchmarks.wire.options import Options, Spec
from zcomm import Communicator, launcher

# NumPy has no bfloat16 and MPI no name for it: bytes can be gathered, but not summed.
_MPI_TYPES = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class Variant:
    """One way. ``library`` is zcomm, gloo or mpi; ``case`` holds zcomm's codec and algorithm."""

    name: str
    library: str
    case: Case
    call: Callable[[], object]

    @property
    def codec(self) -> str | None:
        """The codec as text; None for an exact variant."""
        return describe_codec(self.case.codec) if self.case.codec is not None else None


@dataclass(frozen=True)
class Absent:
    """A variant that cannot be had here."""

    name: str
    reason: str


@dataclass
class Arrays:
    """What all variants of a case work on. In place, ``out`` is what the operation works on."""

    case: Case
    source: torch.Tensor
    out: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        numel = self.case.count if self.case.operation.name == "reduce_scatter" else self.case.numel
        self.out = torch.empty(numel, dtype=self.source.dtype)

    def prepare(self) -> None:
        """Make ready for a call."""
        if self.case.operation.in_place:
            self.out.copy_(self.source)

    def poison(self) -> None:
        """Fill the result with what no call may leave there, then make ready."""
        self.out.fill_(torch.nan)
        self.prepare()


def describe_codec(codec: Spec) -> str:
    """Return a codec as it is written on the command line."""
    return "none" if codec is None else codec if isinstance(codec, str) else ",".join(codec)


def build(
    options: Options, comm: Communicator, gloo: Gloo | None, arrays: Arrays
) -> tuple[list[Variant], list[Absent]]:
    """Return the variants of a case in the order of their rows, and what is absent."""
    case = arrays.case
    variants = [
        _zcomm(comm, replace(case, codec=codec, algorithm=algorithm), arrays)
        for codec in options.codecs_of(case.operation.name)
        for algorithm in options.algorithms
    ]
    absent: list[Absent] = []
    if "gloo" in options.peers:
        if gloo is None:
            absent.append(Absent("gloo", "this torch has no gloo"))
        else:
            variants += [
                Variant(name, "gloo", case, call)
                for name, call in gloo.ways(case.operation.name, arrays.source, arrays.out).items()
            ]
    if "mpi" in options.peers:
        found = _mpi(case, arrays)
        if isinstance(found, Absent):
            absent.append(found)
        else:
            variants.append(Variant("MPI", "mpi", case, found))
    return variants, absent


def _zcomm(comm: Communicator, case: Case, arrays: Arrays) -> Variant:
    name = "zcomm " + ("exact" if case.codec is None else describe_codec(case.codec))
    if case.algorithm != "auto":
        name += f" {case.algorithm}"
    in_place = case.operation.in_place
    source, out = (arrays.out, None) if in_place else (arrays.source, arrays.out)

    def call() -> None:
        perform(comm, case, source, out)

    return Variant(name, "zcomm", case, call)


def _mpi(case: Case, arrays: Arrays) -> Callable[[], object] | Absent:
    from mpi4py import MPI

    world = launcher.world()
    if case.operation.name == "all_gather":
        source, out = (_as(x, np.uint8) for x in (arrays.source, arrays.out))
        return lambda: world.Allgather(source, out)
    if case.dtype.torch not in _MPI_TYPES:
        return Absent("MPI", f"MPI has no {case.dtype.name} to sum")
    kind = _MPI_TYPES[case.dtype.torch]
    source, out = (_as(x, kind) for x in (arrays.source, arrays.out))
    if case.operation.name == "reduce_scatter":
        return lambda: world.Reduce_scatter_block(source, out)
    return lambda: world.Allreduce(MPI.IN_PLACE, out)


def _as(x: torch.Tensor, kind: Any) -> Any:
    """Return the memory of a tensor as a NumPy array."""
    return x.view(torch.uint8).numpy().view(kind)
