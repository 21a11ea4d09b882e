"""Counted bytes: equal to the plan's and to formulas written from the definitions, per level."""

import numpy as np
import pytest

from tests.collectives import oracle
from tests.collectives.dtypes import ITEMSIZE, filled
from tests.collectives.worlds import LAYERED, WORLDS, algorithms, on, used, wire
from tests.marks import one_in
from zcomm import hops
from zcomm.layout import Layout

DTYPES = ("float32", "bfloat16", "float16")
CODECS = (None, "int8", "int4", "int4:block=64", "bf16", "fp16")
MAIN = [
    ("float32", None),
    ("bfloat16", None),
    ("float16", None),
    ("bfloat16", "int8"),
    ("float32", "int4"),
]
CASES = one_in(3, [world for world in WORLDS if world != "2x3"], MAIN)
CASES += [("2x3", dtype, codec) for dtype in DTYPES for codec in CODECS]
EVERY_CASE = pytest.mark.parametrize(("world", "dtype", "codec"), CASES)


def planned(comm, operation, numel, dtype, codec, algorithm, cut="even"):
    layout = getattr(Layout, cut)(dtype, numel, comm.size)
    codecs = hops.parse_codecs(codec, len(comm.topology.levels))
    made = hops.make(operation, [layout], comm.topology, codecs=codecs, algorithm=algorithm)
    return {level: nbytes for level, nbytes in made.wire_nbytes(comm.rank).items() if nbytes}


def without_zeros(sent):
    return {level: nbytes for level, nbytes in sent.items() if nbytes}


@EVERY_CASE
def test_all_gather(world, dtype, codec):
    def program(comm):
        for numel in (0, 1, 300, 2305):
            for algorithm in algorithms(comm.topology):
                comm.traffic.reset()
                comm.all_gather(filled((numel,), dtype, "torch"), codec=codec, algorithm=algorithm)
                sent = wire(comm, "all_gather")
                chunk = oracle.chunk_nbytes(numel, dtype, codec)
                hops = used(comm.topology, algorithm)
                formula = oracle.gather_nbytes(comm.topology, comm.rank, chunk, hops)
                assert sent == without_zeros(formula)
                whole = numel * comm.size
                assert sent == planned(comm, "all_gather", whole, dtype, codec, algorithm)

    on(world, program, min_numel=0)


def reduction_chunks(topology, numel, dtype, codec):
    """Return the bytes of one destination's chunk per level: sums of float16 travel as float32."""
    first = next(iter(oracle.meetings(topology)), (0, None))[0]
    return [
        oracle.chunk_nbytes(numel, dtype if level <= first else oracle.partial_dtype(dtype), codec)
        for level in range(len(topology.levels))
    ]


@EVERY_CASE
def test_reduce_scatter(world, dtype, codec):
    def program(comm):
        for numel in (0, 1, 300, 2305):
            for algorithm in algorithms(comm.topology):
                comm.traffic.reset()
                full = filled((numel * comm.size,), dtype, "torch")
                comm.reduce_scatter(full, codec=codec, algorithm=algorithm)
                sent = wire(comm, "reduce_scatter")
                chunks = reduction_chunks(comm.topology, numel, dtype, codec)
                hops = used(comm.topology, algorithm)
                formula = oracle.reduce_nbytes(comm.topology, comm.rank, chunks, hops)
                assert sent == without_zeros(formula)
                whole = numel * comm.size
                assert sent == planned(comm, "reduce_scatter", whole, dtype, codec, algorithm)

    on(world, program, min_numel=0)


@EVERY_CASE
def test_all_reduce_is_a_reduce_scatter_and_an_all_gather(world, dtype, codec):
    def program(comm):
        numel = 4096 * comm.size + 77
        for algorithm in algorithms(comm.topology):
            comm.traffic.reset()
            comm.all_reduce(filled((numel,), dtype, "torch"), codec=codec, algorithm=algorithm)
            total = {}
            for operation in ("reduce_scatter", "all_gather"):
                part = planned(comm, operation, numel, dtype, codec, algorithm, "cut")
                for level, nbytes in part.items():
                    total[level] = total.get(level, 0) + nbytes
            assert wire(comm, "all_reduce") == total
            assert {operation for operation, _ in comm.traffic.snapshot()} <= {
                "all_reduce",
                "guard",
            }

    on(world, program, min_numel=0)


@pytest.mark.parametrize("world", WORLDS)
def test_plain_operations(world):
    def program(comm):
        comm.traffic.reset()
        comm.all_to_all(np.zeros((comm.size, 5), np.int16))
        direct = oracle.direct_nbytes(comm.topology, comm.rank, 10)
        assert wire(comm, "all_to_all") == direct
        comm.broadcast(np.zeros(100, np.float32))
        # Every other rank receives the array once.
        sent = comm.traffic.wire_nbytes(operation="broadcast")
        assert comm.all_gather_values(np.array([sent])).sum() == 400 * (comm.size - 1)
        if comm.size > 1 and comm.rank == 0:
            comm.send(np.zeros(3), comm.size - 1)
            level = oracle.between(comm.topology, 0, comm.size - 1)
            assert wire(comm, "send") == {level: 24}
        elif comm.size > 1 and comm.rank == comm.size - 1:
            comm.recv(np.zeros(3), 0)
            assert wire(comm, "send") == {}

    on(world, program)


@pytest.mark.parametrize("world", LAYERED)
@pytest.mark.parametrize("codec", [None, "int8", "int4"])
def test_what_crosses_the_network(world, codec):
    """Hierarchical: each shard enters each node once; a node's sums leave it once, compressed."""
    topology = WORLDS[world]
    outermost = len(topology.levels) - 1
    num_nodes = topology.shape[-1]
    inside = topology.size // num_nodes
    numel = 1024

    def program(comm):
        sent = {}
        for algorithm in ("flat", "hierarchical"):
            comm.traffic.reset()
            comm.all_gather(np.zeros(numel, np.float32), codec=codec, algorithm=algorithm)
            comm.reduce_scatter(
                np.zeros(numel * comm.size, np.float32), codec=codec, algorithm=algorithm
            )
            for operation in ("all_gather", "reduce_scatter"):
                nbytes = comm.traffic.wire_nbytes(outermost, operation)
                sent[operation, algorithm] = comm.all_gather_values(np.array([nbytes])).sum()
        return sent

    chunk = oracle.chunk_nbytes(numel, "float32", codec)
    for sent in on(topology, program, min_numel=0):
        once = topology.size * (num_nodes - 1) * chunk
        for operation in ("all_gather", "reduce_scatter"):
            assert sent[operation, "hierarchical"] == once
            assert sent[operation, "flat"] == inside * once


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("world", ["2x2", "2x2x2", "3+5"])
def test_a_list_is_one_call_and_its_bytes_add_up(world, kind):
    shapes = [("float32", 3), ("int64", 2), ("float16", 700), ("float32", 0)]

    def program(comm):
        for codec in (None, "int8"):
            comm.traffic.reset()
            comm.all_gather([filled((n,), dtype, kind) for dtype, n in shapes], codec=codec)
            chunk = sum(
                oracle.chunk_nbytes(n, dtype, codec if dtype.startswith("float") else None)
                for dtype, n in shapes
            )
            hops = used(comm.topology, "auto")
            formula = oracle.gather_nbytes(comm.topology, comm.rank, chunk, hops)
            snapshot = comm.traffic.snapshot()
            counters = {level: c for (op, level), c in snapshot.items() if op == "all_gather"}
            assert {level: c.wire_nbytes for level, c in counters.items()} == formula
            assert {c.calls for c in counters.values()} == {1}
            logical = sum(ITEMSIZE[dtype] * n for dtype, n in shapes)
            plain = oracle.gather_nbytes(comm.topology, comm.rank, logical, hops)
            assert {level: c.logical_nbytes for level, c in counters.items()} == plain

    on(world, program, min_numel=0)


def test_totals_and_reset():
    def program(comm):
        comm.traffic.reset()
        assert comm.traffic.snapshot() == {}
        for _ in range(3):
            comm.all_gather(np.zeros(10, np.float32))
        comm.all_to_all(np.zeros(4, np.float32))
        sent = comm.traffic
        assert sent.wire_nbytes(operation="all_gather") == 3 * (40 + 2 * 40)
        assert sent.wire_nbytes(level=1, operation="all_gather") == 3 * 40
        assert sent.wire_nbytes(level=0, operation="all_to_all") == 4
        assert sent.wire_nbytes(level=1, operation="all_to_all") == 8
        assert sent.snapshot()["all_gather", 1].calls == 3
        everything = sum(counter.wire_nbytes for counter in sent.snapshot().values())
        assert sent.wire_nbytes() == everything
        sent.reset()
        assert sent.wire_nbytes() == 0

    on("2x2", program)


def test_a_codec_per_level_shows_in_the_bytes_of_that_level():
    def program(comm):
        full = np.zeros(4 * 1000, np.float32)
        for codecs in ((None, "int4"), ("int8", None), ("int8", "int4"), ("bf16", "int8")):
            comm.traffic.reset()
            comm.reduce_scatter(full, codec=codecs)
            inner, outer = (oracle.chunk_nbytes(1000, "float32", one) for one in codecs)
            assert wire(comm, "reduce_scatter") == {0: 2 * inner, 1: outer}
        comm.traffic.reset()
        comm.all_gather(np.zeros(1000, np.float32), codec=(None, "int4"))
        assert wire(comm, "all_gather") == {
            0: 8000,
            1: oracle.chunk_nbytes(1000, "float32", "int4"),
        }

    on("2x2", program, min_numel=0)


@pytest.mark.parametrize(("world", "level"), [("1x4", 0), ("4x1", 1)])
def test_where_one_level_has_peers_its_own_codec_is_used(world, level):
    """A level whose groups have one rank is skipped, and its codec with it."""

    def program(comm):
        codecs = ["int4", "int4"]
        codecs[level] = "int8"
        for algorithm in algorithms(comm.topology):
            comm.traffic.reset()
            comm.reduce_scatter(
                np.zeros(4 * 1000, np.float32), codec=tuple(codecs), algorithm=algorithm
            )
            chunk = oracle.chunk_nbytes(1000, "float32", "int8")
            assert wire(comm, "reduce_scatter") == {level: 3 * chunk}

    on(world, program, min_numel=0)


def test_min_numel_is_compared_with_the_whole_logical_tensor(caplog):
    caplog.set_level("INFO", logger="zcomm")
    compressed = oracle.chunk_nbytes(250, "float32", "int8")

    def program(comm):
        shard, full = np.zeros(250, np.float32), np.zeros(1000, np.float32)
        below, below_full = shard[:249], full[:996]
        comm.traffic.reset()
        comm.all_gather(shard, codec="int8", algorithm="flat")
        comm.reduce_scatter(full, codec="int8", algorithm="flat")
        assert wire(comm, "all_gather") == {0: compressed, 1: 2 * compressed}
        assert wire(comm, "reduce_scatter") == {0: compressed, 1: 2 * compressed}
        comm.traffic.reset()
        for _ in range(2):
            comm.all_gather(below, codec="int8", algorithm="flat")
            comm.reduce_scatter(below_full, codec="int8", algorithm="flat")
            comm.all_reduce(below_full, codec="int8")
        assert wire(comm, "all_gather") == {0: 2 * 996, 1: 4 * 996}
        assert wire(comm, "reduce_scatter") == {0: 2 * 996, 1: 4 * 996}

    on("2x2", program, min_numel=1000)
    said = [one.getMessage() for one in caplog.records if "1000" in one.getMessage()]
    assert len([one for one in said if "all_gather" in one]) == 1
    assert len([one for one in said if "reduce_scatter" in one]) == 1


def test_the_default_of_min_numel_is_65536():
    def program(comm):
        for numel, codec in ((32767, None), (32768, "int8")):
            comm.traffic.reset()
            comm.all_gather(np.zeros(numel, np.float32), codec="int8")
            assert wire(comm, "all_gather") == {0: oracle.chunk_nbytes(numel, "float32", codec)}

    on("2", program)


def test_handshakes_are_counted_apart():
    def program(comm):
        comm.traffic.reset()
        comm.barrier()
        operations = {operation for operation, _ in comm.traffic.snapshot()}
        assert operations <= {"guard", "barrier"}

    on("2x2", program)
