"""Measure this job: the constants of the cost model, and which plans are the fastest at which size.

All ranks call the functions here together, and decide from numbers that all of them have, so that
they go on alike. A *call* is an operation with its arrays; calls take turns, so that what disturbs
the machine disturbs all of them, and last as long as on their slowest rank. Elements are bfloat16.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

from topology import cost
from zcomm.arrays import view
from zcomm.calibrate import MODEL_FROM, factors, scaled, scales
from zcomm.codecs import Codec
from zcomm.collectives.wire import Place, Reduction, pack, reduce
from zcomm.communicator import Communicator
from zcomm.device import copy, scratch
from zcomm.plan import WireFormat
from zcomm.tuning import Curve, Key, Plans, Tuning

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
CODECS = ("none", "int8", "int4")
SIZES = tuple(4096 * 4**power for power in range(8))
"""Bytes of the whole buffer, 4 KiB to 64 MiB."""

PIECE_SIZES = (64 * 1024, 512 * 1024)
PIECES_FROM = 1024 * 1024
"""Other sizes of pieces are tried from this size on."""

PAYS = 1.08
"""Another size of pieces is kept where it is so much faster somewhere."""

SLOW_SECONDS = 0.12
"""What takes longer is not measured at larger sizes: time grows with the size there."""

HOPELESS = 1.8
"""A plan that takes so much longer than the best, twice in a row, is not measured any more."""

MESSAGE_SHARE = 0.2
"""What a message costs, as a part of a piece, before the fit finds out."""

_NUMEL = 256 * 1024
_SMALL_NBYTES = 8 * 1024

Call = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """What was measured of one way to do one operation, and what the model says to it."""

    plans: Plans
    codec: str
    size: int
    how: str
    seconds: float
    predicted: float = 0.0

    @property
    def key(self) -> Key:
        """The key of its curve."""
        return Key.of(self.plans)

    @property
    def fits_model(self) -> bool:
        """Whether the model is fitted to it, and compared with it."""
        return self.size >= MODEL_FROM and self.key.piece_nbytes is None


@dataclass(frozen=True)
class Result:
    """A tuning, and the figures that it was made of."""

    tuning: Tuning
    figures: tuple[Measured, ...]
    facts: dict[str, Any]


def tune(comm: Communicator, codecs: Sequence[str] = CODECS, seconds: float = 25.0) -> Result:
    """Measure within about ``seconds``; all ranks return the same.

    1. The constants, a fifth of the time.
    2. Every operation with every codec, one size after the other as long as there is time: each
       algorithm, and other sizes of pieces.
    3. Move the constants to where the model predicts what was measured.
    4. Keep other sizes of pieces where they pay.
    """
    start = time.perf_counter()
    machine = measure_machine(comm, codecs, seconds / 5)
    names = _algorithms(comm)
    cases = [
        _Case(operation, codec, dict.fromkeys(names, 0))
        for operation in OPERATIONS
        for codec in codecs
    ]
    figures: list[Measured] = []
    for number, size in enumerate(SIZES):
        going = [case for case in cases if case.goes_on]
        left = seconds - _agreed(comm, time.perf_counter() - start)
        if left <= 0:
            break
        for case in going:
            share = left / len(going) / (len(SIZES) - number)
            figures += _measure_case(comm, case, size, share)
    machine = _fitted(comm, machine, figures)
    known = Tuning(comm.topology, comm.tuning.transport, machine, source="measured now")
    figures = [replace(one, predicted=known.model_seconds(one.plans)) for one in figures]
    curves = dict(_curves(figures))
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "took_seconds": round(_agreed(comm, time.perf_counter() - start), 1),
        "device": comm.device.partition(":")[0],
        "versions": _versions(),
    }
    return Result(replace(known, curves=curves), tuple(figures), facts)


def _fitted(comm: Communicator, machine: cost.Machine, figures: Sequence[Measured]) -> cost.Machine:
    """Return the constants that explain the figures best, those of rank 0 on all ranks."""
    found = np.ones(len(scales(machine)))
    if comm.rank == 0:
        fitting = [(one.plans, one.seconds) for one in figures if one.fits_model]
        found[:] = factors(machine, fitting, comm.tuning.transport)
    return scaled(machine, [float(value) for value in comm.all_gather_values(found)[0]])


def time_calls(
    comm: Communicator, calls: Sequence[Call], seconds: float, *, fewest: int = 3, most: int = 15
) -> list[float]:
    """Return the median seconds of each call on its slowest rank, within about ``seconds``."""
    settle = _settler(comm)
    for call in calls:  # plans, pages and connections
        call()
        settle()
    rows = [_round(comm, calls, settle, 0)]
    rounds = int(seconds / max(_agreed(comm, sum(rows[0])), 1e-9))
    rows += [
        _round(comm, calls, settle, number) for number in range(1, max(min(rounds, most), fewest))
    ]
    slowest = comm.all_gather_values(np.array(rows)).max(axis=0)
    return [float(value) for value in np.median(slowest, axis=0)]


def _round(comm: Communicator, calls: Sequence[Call], settle: Call, number: int) -> list[float]:
    """Call all once and return their seconds; every other round backwards, for fairness."""
    order = range(len(calls))
    taken = [0.0] * len(calls)
    for index in reversed(order) if number % 2 else order:
        comm.barrier()
        start = time.perf_counter()
        calls[index]()
        settle()
        taken[index] = time.perf_counter() - start
    return taken


def _settler(comm: Communicator) -> Call:
    """Return what waits for the device, where there is one."""
    if comm.device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def _agreed(comm: Communicator, value: float) -> float:
    """Return the largest of the ranks' values, which all of them then know."""
    return float(comm.all_gather_values(np.array([value])).max())


def operation_call(comm: Communicator, operation: str, numel: int, **how: Any) -> Call:
    """Return a call of an operation on one bfloat16 tensor of ``numel`` elements in all."""
    import torch

    where: dict[str, Any] = {"dtype": torch.bfloat16, "device": comm.device}
    if operation == "all_reduce":
        x = torch.ones(numel, **where)
        return partial(comm.all_reduce, x, op="avg", **how)
    part, whole = torch.ones(numel // comm.size, **where), torch.ones(numel, **where)
    if operation == "all_gather":
        return partial(comm.all_gather, part, whole, **how)
    return partial(comm.reduce_scatter, whole, part, **how)


def numel_of(num_ranks: int, nbytes: int) -> int:
    """Return the bfloat16 elements of a buffer of about so many bytes that all ranks divide."""
    return -(-nbytes // (2 * num_ranks)) * num_ranks


@dataclass
class _Case:
    """One operation with one codec: its algorithms, and how often in a row each was hopeless."""

    operation: str
    codec: str
    strikes: dict[str, int]
    goes_on: bool = True


def _measure_case(comm: Communicator, case: _Case, size: int, seconds: float) -> Iterator[Measured]:
    """Measure one size of one case, and decide what of it is worth measuring at the next."""
    usual = [name for name, strikes in case.strikes.items() if strikes < 2]
    names = [*usual, *_other_pieces(usual[0], size)]
    how = [{"codec": case.codec, "algorithm": name} for name in names]
    numel = numel_of(comm.size, size)
    calls = [operation_call(comm, case.operation, numel, **each) for each in how]
    taken = time_calls(comm, calls, seconds)
    for name, each, value in zip(names, how, taken, strict=True):
        plans = comm.plans(case.operation, numel, **each)
        yield Measured(plans, case.codec, numel * 2, name, value)
    best = min(taken)
    for name, value in zip(names, taken, strict=True):
        if name in case.strikes:
            case.strikes[name] = case.strikes[name] + 1 if value > HOPELESS * best else 0
    case.goes_on = best <= SLOW_SECONDS


def _algorithms(comm: Communicator) -> list[str]:
    from zcomm.hops import candidates

    return candidates("auto", comm.topology)


def _other_pieces(algorithm: str, size: int) -> list[str]:
    if size < PIECES_FROM:
        return []
    return [f"{algorithm}:piece={nbytes}" for nbytes in PIECE_SIZES]


def _curves(figures: Sequence[Measured]) -> Iterator[tuple[Key, Curve]]:
    """Make the curves of all plans that may be worth choosing."""
    seconds: dict[Key, dict[int, float]] = {}
    for figure in figures:
        seconds.setdefault(figure.key, {})[figure.size] = figure.seconds
    for key, points in seconds.items():
        usual = seconds[Key(key.operation, key.route)]
        if key.piece_nbytes and all(usual[size] < PAYS * points[size] for size in points):
            continue
        yield key, Curve(tuple(points), tuple(points.values()))


def measure_machine(comm: Communicator, codecs: Sequence[str], seconds: float) -> cost.Machine:
    """Measure the constants of the cost model within about ``seconds``."""
    formats = [Codec.parse(codec) for codec in codecs]
    each = seconds / (len(comm.topology.levels) + len(formats) + 2)
    speeds, crowd = {"none": _copy_speed(comm, each)}, 1.0
    for name, codec in [("sum", None), *((codec.format, codec) for codec in formats)]:
        if name not in speeds:
            speeds[name], crowd = _codec_speed(comm, codec, each)
    call = time_calls(comm, [operation_call(comm, "all_gather", comm.size)], each, most=200)[0]
    levels = range(len(comm.topology.levels))
    links = tuple(_link(comm, level, crowd, each) for level in levels)
    piece = _piece_seconds(comm, each)
    return cost.Machine(links, speeds, call, piece, message=piece * MESSAGE_SHARE)


def _copy_speed(comm: Communicator, seconds: float) -> cost.Speed:
    source, target = (_elements(comm) for _ in range(2))
    taken = _kernel_seconds(comm, lambda: copy(target.memory, source.memory), seconds)[0]
    return cost.Speed(_NUMEL / taken, _NUMEL / taken)


def _codec_speed(
    comm: Communicator, codec: Codec | None, seconds: float
) -> tuple[cost.Speed, float]:
    """Return a codec's speed while all ranks compute, and how many of them share a processor."""
    source, target = (_elements(comm) for _ in range(2))
    wire = WireFormat("bfloat16", codec)
    starts, lengths = np.array([0], np.int64), np.array([_NUMEL], np.int64)
    message = scratch(wire.wire_nbytes((_NUMEL,)), source.memory)
    packing = partial(pack, wire, Place(source, starts, lengths), message, 0)
    adding = partial(reduce, wire, [message] * 2, Place(target, starts, lengths), Reduction("sum"))
    encode, crowd = _kernel_seconds(comm, packing, seconds / 2)
    decode, _ = _kernel_seconds(comm, adding, seconds / 2)
    return cost.Speed(_NUMEL / encode, 2 * _NUMEL / decode), crowd


def _elements(comm: Communicator) -> Any:
    import torch

    return view(torch.ones(_NUMEL, dtype=torch.bfloat16, device=comm.device))


def _kernel_seconds(comm: Communicator, kernel: Call, seconds: float) -> tuple[float, float]:
    """Return the seconds of a kernel, and wall clock over processor time; the mean over ranks."""
    settle = _settler(comm)
    kernel()
    settle()
    comm.barrier()
    start, busy, calls = time.perf_counter(), time.process_time(), 0
    while calls < 5 or time.perf_counter() - start < seconds:
        kernel()
        calls += 1
    settle()
    taken = time.perf_counter() - start
    crowd = max(taken / max(time.process_time() - busy, 1e-9), 1.0) if comm.device == "cpu" else 1.0
    mean = comm.all_gather_values(np.array([taken / calls, crowd])).mean(axis=0)
    return float(mean[0]), float(mean[1])


def _link(comm: Communicator, level: int, crowd: float, seconds: float) -> cost.Link:
    """Measure one level: exact all_gathers among its peers, small and large, all at once.

    Each rank sends its shard to every peer, which is an all-to-all of the level. The difference of
    two sizes gives the bandwidth, and what is left of the small one, less a call, the latency.
    """
    uniform = comm.topology.uniform
    peers = comm.rail(level) if uniform else comm.level(level)
    others = int(_agreed(comm, peers.size - 1))
    if others == 0:
        return comm.tuning.machine.links[level]

    def timed(nbytes: int) -> tuple[float, float]:
        call = operation_call(peers, "all_gather", nbytes // 2 * peers.size)
        busy, start = time.process_time(), time.perf_counter()
        taken = time_calls(comm, [call], seconds / 6)[0]
        part = (time.process_time() - busy) / (time.perf_counter() - start)
        return taken, _agreed(comm, part)

    call = time_calls(comm, [operation_call(peers, "all_gather", peers.size)], seconds / 6)[0]
    small, _ = timed(_SMALL_NBYTES)
    large_nbytes, (large, part) = 256 * 1024, timed(256 * 1024)
    while large < 0.02 and large_nbytes < 2**26:
        large_nbytes *= 4
        large, part = timed(large_nbytes)
    bandwidth = others * (large_nbytes - _SMALL_NBYTES) / max(large - small, 1e-9)
    latency = max(small - call - others * _SMALL_NBYTES / bandwidth, 1e-6)
    processor = min(part * crowd, 1.0) / bandwidth
    return cost.Link(latency, bandwidth, processor)


def _piece_seconds(comm: Communicator, seconds: float) -> float:
    """Return what a piece costs: small pieces against large ones, on the innermost level."""
    from zcomm.hops import levels_with_peers

    inner = comm.rail(levels_with_peers(comm.topology)[0]) if comm.topology.uniform else comm
    numel = inner.size * 1024 * 1024
    how = ["flat:piece=32768", "flat:piece=262144"]
    calls = [operation_call(inner, "all_gather", numel, algorithm=name) for name in how]
    many, few = time_calls(comm, calls, seconds)
    counts = [len(inner.plans("all_gather", numel, algorithm=name)[0].pieces) for name in how]
    return _agreed(comm, min(max((many - few) / (counts[0] - counts[1]), 1e-5), 1e-3))


def _versions() -> dict[str, str]:
    import torch

    import zcomm

    found = {"zcomm": zcomm.__version__, "torch": torch.__version__}
    found |= {"python": platform.python_version(), "numpy": np.__version__}
    from mpi4py import MPI

    return found | {"mpi": MPI.Get_library_version().split("\n")[0].strip("\0 ")}
