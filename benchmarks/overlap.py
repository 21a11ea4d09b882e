"""How much of an asynchronous all_gather hides behind computing of the same length.

    python -m benchmarks.cluster --nodes 2 --ranks-per-node 1 --rate 1gbit --cpu-bound -- \
        python -m benchmarks.overlap

Matrices are multiplied while an all_gather is under way. For every variant there are as many
multiplications as take as long as its communication alone; communication alone, computing alone and
both take turns, as do the variants. The ratio is the time of both over that of the longer of the
two, 1 where one is hidden whole. *Sockets* send and receive as many bytes with two threads and
nothing else: what this machine can do at all, since packets cost the cores that compute.

All ranks start at an agreed instant and the last one ends a call; those that are early sleep.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import launch
from benchmarks.collectives import record
from benchmarks.collectives.cases import DATA_TYPES, OPERATIONS, Case
from benchmarks.collectives.options import at_least, codec_names, size_nbytes
from benchmarks.wire import check, floor, instant, others, report
from benchmarks.wire.options import TYPES, Spec
from benchmarks.wire.variants import describe_codec
from zcomm import Communicator, launcher

SCHEMA = "zcomm.overlap/1"
KINDS = ("communication", "computing", "both")
# The ratio aimed at by nominal rate and codec, on two nodes of one rank.
TARGETS = {
    (10**9, None): 1.3,
    (10**9, "int8"): 1.4,
    (2 * 10**8, None): 1.2,
    (2 * 10**8, "int8"): 1.2,
}
_CALIBRATION_ROUNDS = 3
_FIRST_PRODUCTS = 64
_PATIENCE_SECONDS = 60


@dataclass(frozen=True)
class Options:
    """What to measure; see ``--help``."""

    nbytes: int
    dtype: str
    codecs: tuple[Spec, ...]
    rounds: int
    matrix: int
    sockets: bool
    topology: str
    json: Path | None


@dataclass(frozen=True)
class Variant:
    """A communication that is started, and what waits for its end. ``library``: zcomm, sockets."""

    name: str
    library: str
    codec: str | None
    start: Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class Result:
    """Seconds of every call by kind, and how many multiplications a call computed.

    ``cpu``: seconds of CPU time that communication alone takes on the busiest rank, the median:
    what takes the core cannot be hidden on it.
    """

    name: str
    library: str
    codec: str | None
    num_products: int
    cpu: float
    seconds: dict[str, tuple[float, ...]]

    def median(self, kind: str) -> float:
        """Return the median of a kind in seconds."""
        return median(self.seconds[kind])

    @property
    def ratio(self) -> float:
        """Time of both over the longer of the two."""
        return self.median("both") / max(self.median("communication"), self.median("computing"))

    @property
    def hidden(self) -> float:
        """The part of the shorter of the two that took no time of its own."""
        alone = self.median("communication"), self.median("computing")
        return (sum(alone) - self.median("both")) / min(alone)


def parse(arguments: list[str]) -> Options:
    """Read the command line."""
    parser = launch.Parser(prog="python -m benchmarks.overlap", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("-b", "--bytes", type=size_nbytes, default="16M", help="the result of the gather (16M)")
    add("-d", "--datatype", choices=TYPES, default="bfloat16")
    add("-n", "--rounds", type=at_least(1), default=9, help="calls of each kind (9)")
    add("--codec", nargs="+", type=codec_names, default=["none", "int8"], help="none int8")
    add("--matrix", type=at_least(16), default=256, help="rows of a square float32 matrix (256)")
    add("--no-sockets", action="store_true", help="leave out what the machine itself can do")
    add("--topology", default="auto")
    add("-J", "--json", type=Path, metavar="FILE", help="write JSON lines to a new file")
    given = parser.parse_args(arguments)
    codecs = tuple(None if codec == "none" else codec for codec in given.codec)
    if any(isinstance(codec, tuple) for codec in codecs):
        raise launch.UsageError("all_gather takes one codec")
    return Options(
        nbytes=given.bytes,
        dtype=given.datatype,
        codecs=codecs,
        rounds=given.rounds,
        matrix=given.matrix,
        sockets=not given.no_sockets,
        topology=given.topology,
        json=given.json,
    )


def run(options: Options, comm: Communicator) -> int:
    """Measure and print; return 1 where a result was wrong, else 0."""
    if comm.size < 2:
        raise launch.UsageError("one rank has nobody to communicate with: give two nodes")
    torch.set_num_threads(1)
    world = launcher.world()
    file = launch.on_root(comm, lambda: record.open_file(options.json))
    say = print if comm.rank == 0 else lambda *_, **__: None
    link = floor.measure(world, comm.topology)
    machines = comm.all_gather_values(np.array([instant.kernel()], np.int64))
    pace = instant.Pace(world, shared=len(np.unique(machines)) == 1)
    say(f"# {comm.topology.describe()}; {record.cpu_name()}; torch {torch.__version__}")
    say(f"# link: {'none' if link is None else link.describe()}")
    record.write(file, {"kind": "header", "schema": SCHEMA, **record.place(comm)})

    gather = _Gather(options, comm)
    variants, wrong = gather.variants()
    with Sockets(world) as sockets:
        if options.sockets and comm.size == 2:
            variants += sockets.variants(gather.sent_nbytes)
        watch = others.Watch(instant.kernel())
        results = _measure(options, pace, variants)
        quality = report.Quality(watch.part(world), 0)
    titles = ("alone ms", 10), ("its CPU", 9), ("computing", 11), ("both", 9), ("ratio", 8)
    say(f"# {'variant':<24}" + "".join(f"{title:>{n}}" for title, n in (*titles, ("hidden", 8))))
    for result in results:
        say(_line(result, link))
        rate = None if link is None else link.nominal
        record.write(file, _object(result, rate, quality))
    say(report.quality_line(quality))
    if wrong:
        say(f"# {wrong} elements are WRONG")
    if file is not None:
        file.close()
    return 1 if wrong else 0


class _Gather:
    """zcomm's all_gather of one buffer, with each codec."""

    def __init__(self, options: Options, comm: Communicator) -> None:
        dtype = DATA_TYPES[options.dtype]
        count = options.nbytes // dtype.itemsize // comm.size
        self._comm = comm
        self._codecs = options.codecs
        self._case = Case(OPERATIONS["all_gather"], dtype, count, comm.size)
        self._data = check.Data(dtype, comm.size)
        self._source = self._data.source(comm.rank, count)
        self._out = torch.empty(count * comm.size, dtype=dtype.torch)
        self.sent_nbytes: list[tuple[str, int]] = []
        """What each variant sends: its name and the wire bytes of this rank."""

    def variants(self) -> tuple[list[Variant], int]:
        """Return the variants, and how many elements of their first results are wrong."""
        variants, wrong = [], 0
        for codec in self._codecs:
            name = "exact" if codec is None else describe_codec(codec)
            self._out.fill_(torch.nan)
            self._comm.traffic.reset()
            self._start(codec)()
            sent = sum(
                counter.wire_nbytes
                for (operation, _), counter in self._comm.traffic.snapshot().items()
                if operation == "all_gather"
            )
            self.sent_nbytes.append((name, sent))
            case = replace(self._case, codec=codec)
            topology, rank = self._comm.topology, self._comm.rank
            own = check.num_wrong(case, topology, self._data, rank, self._out)
            wrong += int(self._comm.all_gather_values(np.array([own], np.int64)).sum())
            text = None if codec is None else name
            start = self._starter(codec)
            variants.append(Variant(f"zcomm {name}", "zcomm", text, start))
        return variants, wrong

    def _starter(self, codec: Spec) -> Callable[[], Callable[[], object]]:
        return lambda: self._start(codec)

    def _start(self, codec: Spec) -> Callable[[], object]:
        work = self._comm.all_gather(self._source, self._out, codec=codec, async_op=True)
        wait: Callable[[], object] = work.wait
        return wait


class Sockets:
    """One TCP connection between two ranks, a thread that sends and one that receives.

    ``world``: MPI's. Collective; with another number of ranks there is nothing to connect.
    """

    def __init__(self, world: Any) -> None:
        self._peer: socket.socket | None = None
        if world.size != 2:
            return
        hosts = floor.host_names(world)
        port = np.zeros(1, np.int64)
        if world.rank == 0:
            with socket.create_server((socket.gethostbyname(hosts[0]), 0)) as server:
                server.settimeout(_PATIENCE_SECONDS)
                port[0] = server.getsockname()[1]
                world.Bcast(port)
                self._peer, _ = server.accept()
        else:
            world.Bcast(port)
            self._peer = socket.create_connection((hosts[0], int(port[0])), _PATIENCE_SECONDS)
        self._peer.settimeout(_PATIENCE_SECONDS)
        self._pool = ThreadPoolExecutor(2)

    def __enter__(self) -> Sockets:
        return self

    def __exit__(self, *_: object) -> None:
        if self._peer is not None:
            self._pool.shutdown()
            self._peer.close()

    def variants(self, sent_nbytes: Sequence[tuple[str, int]]) -> list[Variant]:
        """Return a variant for each number of bytes."""
        return [
            Variant(f"sockets, bytes of {name}", "sockets", None, self._starter(nbytes))
            for name, nbytes in sent_nbytes
        ]

    def _starter(self, nbytes: int) -> Callable[[], Callable[[], object]]:
        source, target = bytes(nbytes), bytearray(nbytes)

        def start() -> Callable[[], object]:
            assert self._peer is not None
            threads = [
                self._pool.submit(self._peer.sendall, source),
                self._pool.submit(_receive, self._peer, memoryview(target)),
            ]
            return lambda: [thread.result() for thread in threads]

        return start


def _receive(peer: socket.socket, target: memoryview) -> None:
    while target:
        nbytes = peer.recv_into(target)
        if not nbytes:
            raise ConnectionError(f"the peer left {len(target)} bytes before the end")
        target = target[nbytes:]


class _Products:
    """Multiplies square matrices, without allocating."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._a = torch.randn(rows, rows, generator=generator)
        self._b = torch.randn(rows, rows, generator=generator)
        self._out = torch.empty(rows, rows)

    def __call__(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._a, self._b, out=self._out)


def _measure(options: Options, pace: instant.Pace, variants: Sequence[Variant]) -> list[Result]:
    """Time all kinds of all variants in turns; the same on all ranks."""
    products = _Products(options.matrix)
    counts = _calibrate(pace, variants, products)
    instants: list[list[float]] = [[] for _ in range(len(variants) * len(KINDS))]
    ends: list[list[float]] = [[] for _ in instants]
    used: list[list[float]] = [[] for _ in instants]
    calls = [
        _call(variant, kind, products, count)
        for variant, count in zip(variants, counts, strict=True)
        for kind in KINDS
    ]
    for number in range(options.rounds):
        for place in range(len(calls)):
            which = (place + number) % len(calls)
            before = time.process_time()
            start, end = pace.time(calls[which])
            used[which].append(time.process_time() - before)
            instants[which].append(start)
            ends[which].append(end)
    seconds = instant.durations(pace.world, np.array(instants), np.array(ends))
    busiest = instant.durations(pace.world, np.zeros(len(calls)), np.median(used, axis=1))
    table = seconds.reshape(len(variants), len(KINDS), -1)
    return [
        Result(
            variant.name,
            variant.library,
            variant.codec,
            count,
            float(cpu),
            {kind: tuple(map(float, times)) for kind, times in zip(KINDS, rows, strict=True)},
        )
        for variant, count, cpu, rows in zip(
            variants, counts, busiest[:: len(KINDS)], table, strict=True
        )
    ]


def _call(variant: Variant, kind: str, products: _Products, count: int) -> Callable[[], object]:
    def both() -> None:
        wait = variant.start()
        products(count)
        wait()

    match kind:
        case "communication":
            return lambda: variant.start()()
        case "computing":
            return lambda: products(count)
        case _:
            return both


def _calibrate(pace: instant.Pace, variants: Sequence[Variant], products: _Products) -> list[int]:
    """Return how many products take as long as each variant alone.

    A second look corrects the first: cores that have just begun to compute are not at their speed.
    """
    counts = [_FIRST_PRODUCTS] * len(variants)
    for _ in range(2):
        for place, variant in enumerate(variants):
            alone = _median(pace, _call(variant, "communication", products, 0))
            computing = _median(pace, _call(variant, "computing", products, counts[place]))
            counts[place] = max(1, round(counts[place] * alone / computing))
    return counts


def _median(pace: instant.Pace, call: Callable[[], object]) -> float:
    call()
    pairs = [pace.time(call) for _ in range(_CALIBRATION_ROUNDS)]
    seconds = instant.durations(pace.world, *map(np.array, zip(*pairs, strict=True)))
    return float(np.median(seconds))


def _line(result: Result, link: floor.Link | None) -> str:
    times = [result.median(kind) * 1e3 for kind in KINDS]
    text = (
        f"  {result.name:<24}{times[0]:10.2f}{result.cpu * 1e3:9.2f}{times[1]:11.2f}{times[2]:9.2f}"
    )
    text += f"{result.ratio:8.3f}{result.hidden:8.2f}"
    aimed = _target(result, None if link is None else link.nominal)
    if aimed is not None:
        text += f"   target {aimed:g}, {'reached' if result.ratio <= aimed else 'missed'}"
    return text


def _target(result: Result, rate: int | None) -> float | None:
    if result.library != "zcomm" or rate is None:
        return None
    return TARGETS.get((rate, result.codec))


def _object(result: Result, rate: int | None, quality: report.Quality) -> dict[str, Any]:
    return {
        "kind": "row",
        **asdict(result),
        "ratio": result.ratio,
        "hidden": result.hidden,
        "target": _target(result, rate),
        "nominal_rate": rate,
        "others": quality.others,
        "noisy": quality.noisy,
    }


if __name__ == "__main__":
    sys.exit(launch.main("benchmarks.overlap", parse, run))
