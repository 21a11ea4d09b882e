"""What the kernels do for one piece: worked out once for a plan, done at every call.

A *job* says what is read and written in numbered memories (:mod:`zcomm.collectives.memories`). Jobs
in host memory are one call of the native module, which runs all of them without the GIL. Where it
is not there, or NumPy has to do the arithmetic, they are done one by one by the functions of
:mod:`zcomm.collectives.wire`; on a device several are one launch. The bits are the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from topology import Topology
from zcomm.collectives.memories import Memories, Region, Run
from zcomm.collectives.wire import (
    CARRIER,
    Packing,
    Recoding,
    Reduction,
    Unpacking,
    encoder,
    is_one_sum,
    nested_reduce,
    pack_all,
    reduce,
    reduce_pack_all,
    unpack_all,
)
from zcomm.device import copy
from zcomm.layout import Indices
from zcomm.plan import WireFormat
from zcomm.seeds import Draws
from zcomm.traffic import Clock

if TYPE_CHECKING:
    from zcomm.codecs.native import Program


class Pack(NamedTuple):
    """Write a chunk of ``source``; its seed is made from the numbers ``where``."""

    wire: WireFormat
    source: Run
    out: Region
    where: tuple[int, ...]


class Unpack(NamedTuple):
    """Write the elements of a chunk to ``target``."""

    wire: WireFormat
    chunk: Region
    target: Run


class Recode(NamedTuple):
    """Combine chunks in the order given, and write the sum as a chunk of another format."""

    wire: WireFormat
    chunks: tuple[Region, ...]
    into: WireFormat
    lengths: Indices
    out: Region
    where: tuple[int, ...]


class Reduce(NamedTuple):
    """Combine chunks in the order given, divide, and write the result to ``target``.

    With ``nesting`` they are those of all ranks, summed as its levels nest; partial sums are
    rounded to ``partial``.
    """

    wire: WireFormat
    chunks: tuple[Region, ...]
    target: Run
    partial: WireFormat
    nesting: Topology | None


class Move(NamedTuple):
    """Copy bytes."""

    source: Region
    target: Region


class Jobs:
    """Jobs of one piece that follow each other."""

    def __init__(self, jobs: Sequence[Job], reduction: Reduction | None = None) -> None:
        self._jobs = tuple(jobs)
        self._reduction = reduction or Reduction("sum")
        self._draws = any(map(_draws, self._jobs))

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def timed(self, clock: Clock, phase: str, memories: Memories, draws: Draws) -> None:
        """Do all of them, and add how long that took to a phase.

        Raises:
            CodecError: a message holds what no encoder writes.
        """
        if self._jobs:
            start = time.perf_counter()
            self._run(memories, draws)
            clock.add(phase, time.perf_counter() - start)

    def _run(self, memories: Memories, draws: Draws) -> None:
        if memories.rows is not None and self._program is not None:
            seeds = [_seed(job, draws) for job in self._jobs] if self._draws else ()
            if self._program.run(memories.rows, seeds):
                return
        self._one_by_one(memories, draws)  # which also says what is wrong

    @cached_property
    def _program(self) -> Program | None:
        """The same for the native kernels, None where they cannot do it."""
        from zcomm.codecs.native import Program

        program = Program()
        added = [_add(job, self._reduction, program) for job in self._jobs]
        return program if all(added) else None

    def _one_by_one(self, memories: Memories, draws: Draws) -> None:
        for kind, jobs in groupby(self._jobs, type):
            if kind is Pack:
                pack_all(_packing(job, memories, draws) for job in jobs)
            elif kind is Unpack:
                unpack_all(_unpacking(job, memories) for job in jobs)
            elif kind is Recode:
                recodings = (_recoding(job, memories, draws) for job in jobs)
                reduce_pack_all(recodings, self._reduction)
            else:
                for job in jobs:
                    _do(job, memories, self._reduction)


Job = Pack | Unpack | Recode | Reduce | Move


def _draws(job: Job) -> bool:
    wire = job.wire if isinstance(job, Pack) else job.into if isinstance(job, Recode) else None
    return wire is not None and wire.codec is not None and wire.codec.rounding == "stochastic"


def _seed(job: Job, draws: Draws) -> int:
    if isinstance(job, Pack):
        return draws.of(job.wire.codec, *job.where)
    return draws.of(job.into.codec, *job.where) if isinstance(job, Recode) else 0


def _packing(job: Any, memories: Memories, draws: Draws) -> Packing:
    place, out = memories.place(job.source), memories.at(job.out)
    return Packing(job.wire, place, out, _seed(job, draws))


def _unpacking(job: Any, memories: Memories) -> Unpacking:
    return Unpacking(job.wire, memories.at(job.chunk), memories.place(job.target))


def _recoding(job: Any, memories: Memories, draws: Draws) -> Recoding:
    chunks = [memories.at(chunk) for chunk in job.chunks]
    out = memories.at(job.out)
    return Recoding(job.wire, chunks, job.into, job.lengths, out, _seed(job, draws))


def _do(job: Job, memories: Memories, reduction: Reduction) -> None:
    if isinstance(job, Move):
        copy(memories.at(job.target), memories.at(job.source))
        return
    assert isinstance(job, Reduce)
    chunks, place = [memories.at(chunk) for chunk in job.chunks], memories.place(job.target)
    if job.nesting is None:
        reduce(job.wire, chunks, place, reduction)
    else:
        nested_reduce(job.nesting, (job.wire, job.partial), chunks, place, reduction)


def _add(job: Job, reduction: Reduction, program: Program) -> bool:
    """Add a job to a program; tell whether the native kernels have it."""
    if isinstance(job, Move):
        program.copy(job.source, job.target)
        return True
    if isinstance(job, Pack):
        return _add_pack(job, program)
    if isinstance(job, Unpack):
        return _add_unpack(job, program)
    codec = reduction.carrier(job.wire)
    if codec is None:
        return False
    if isinstance(job, Recode):
        into = job.into.codec or CARRIER[job.into.dtype]
        program.decode_reduce_encode(codec, job.chunks, into, job.lengths, job.out)
        return True
    if job.nesting is not None and not is_one_sum(job.nesting):
        return False
    run = job.target
    place = run.starts, run.lengths, _whole(run), run.dtype
    program.decode_reduce(codec, job.chunks, *place, reduction.divisor)
    return True


def _add_pack(job: Pack, program: Program) -> bool:
    run, codec = job.source, encoder(job.wire, job.source.dtype)
    if codec is not None:
        program.encode(codec, _whole(run), run.dtype, run.starts, run.lengths, job.out)
        return True
    at = 0
    for segment in run.regions():
        program.copy(segment, job.out.part(slice(at, at + segment.nbytes)))
        at += segment.nbytes
    return True


def _add_unpack(job: Unpack, program: Program) -> bool:
    run, codec = job.target, encoder(job.wire, job.target.dtype)
    if codec is not None:
        program.decode(codec, job.chunk, run.starts, run.lengths, _whole(run), run.dtype)
        return True
    at = 0
    for segment in run.regions():
        program.copy(job.chunk.part(slice(at, at + segment.nbytes)), segment)
        at += segment.nbytes
    return True


def _whole(run: Run) -> tuple[int, int, int]:
    return run.array, 0, -1
