"""Every collective on device arrays, on the fake device, against the oracle of the host tests.

What is tested is the path through the communicator, the executors and the staging of a real
program; the device, its streams and its kernels are stand-ins (see ``fake``).
"""

import numpy as np
import pytest
import torch

from tests.collectives import checks, oracle
from tests.collectives.dtypes import as_array, assert_bits, drawn, filled, store, stored_in
from tests.collectives.worlds import algorithms, on, wire
from tests.device import fake
from tests.marks import one_in
from zcomm import Codec
from zcomm.layout import Layout, Segment

WORLDS = ("1x1", "2", "2x2", "3x2", "2x2x2", "3+5")
EVERY_WORLD = pytest.mark.parametrize("world", WORLDS)
MAIN = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
# By NumPy, on the host: other dtypes and other operations.
STAGED = pytest.mark.parametrize("dtype", ["float64", "int32", "bool", "complex64", "uint8"])
SHAPES = ((), (5,), (0,), (2, 3, 5))
DTYPES = ("float32", "bfloat16", "float16", "float64")
CODECS = ("int8", "int4:rounding=stochastic", "int8:block=32,transform=hadamard", "fp8_e4m3")
CODECS += ("int4:block=64", "bf16", "fp16")


@EVERY_WORLD
@MAIN
def test_exact_collectives(world, dtype):
    def program(comm):
        for shape in SHAPES:
            checks.every_algorithm(comm, checks.all_gather, "fake", dtype, shape)
        for op in ("sum", "avg"):
            for shape in SHAPES[1:]:
                checks.every_algorithm(comm, checks.reduce_scatter, "fake", dtype, op, shape)
            checks.every_algorithm(comm, checks.all_reduce, "fake", dtype, op, (13,))
            checks.reduce_scatter(comm, "fake", dtype, op, (9,), algorithm="ordered")
        checks.every_algorithm(comm, checks.all_reduce, "fake", dtype, "max", (13,))
        checks.every_algorithm(comm, checks.all_reduce, "fake", dtype, "sum", (4099,))

    on(world, program)


@pytest.mark.parametrize("world", ["2x2", "3+5"])
@STAGED
def test_collectives_that_numpy_reduces(world, dtype):
    def program(comm):
        checks.every_algorithm(comm, checks.all_gather, "fake", dtype, (5,))
        for op in oracle.possible_ops(dtype):
            checks.every_algorithm(comm, checks.all_reduce, "fake", dtype, op, (13,))
            if op in ("sum", "avg"):
                checks.every_algorithm(comm, checks.reduce_scatter, "fake", dtype, op, (5,))

    on(world, program)


@EVERY_WORLD
def test_what_only_moves_bytes(world):
    def program(comm):
        for dtype in ("bfloat16", "int64"):
            for shape in SHAPES[1:]:
                checks.all_to_all(comm, "fake", dtype, shape)
                checks.send_and_recv(comm, "fake", dtype, shape)
            for root in range(comm.size):
                checks.broadcast(comm, "fake", dtype, (5,), root)
        comm.barrier()

    on(world, program)


@pytest.mark.parametrize("world", ["2x2", "3+5"])
def test_lists_and_wide_outputs(world):
    def program(comm):
        checks.every_algorithm(comm, checks.lists, "fake")
        for dtype in ("float16", "bfloat16"):
            checks.every_algorithm(comm, checks.wide_outputs, dtype, "fake")

    on(world, program)


def results(comm, kind, dtype, codec, algorithm, async_op):
    """Return the bits of every quantised operation, on arrays of a kind."""
    numel = 700
    stored = drawn((numel * comm.size,), dtype, 60, comm.rank)

    def finished(result):
        return stored_in(result.wait() if async_op else result)[0]

    options = {"codec": codec, "algorithm": algorithm, "async_op": async_op}
    gathered = comm.all_gather(as_array(stored[:numel], dtype, kind), **options)
    reduced = comm.reduce_scatter(as_array(stored, dtype, kind), op="avg", **options)
    everywhere = comm.all_reduce(as_array(stored, dtype, kind), **options)
    return b"".join(finished(one).tobytes() for one in (gathered, reduced, everywhere))


# Two clusters meet every codec and dtype, the others one of each.
QUANTISED = one_in(2, ["2x2", "3+5"], [(codec, DTYPES) for codec in CODECS])
QUANTISED += [
    (world, codec, (dtype,))
    for world in ("1x1", "2", "3x2", "2x2x2")
    for codec, dtype in zip(CODECS[:4], DTYPES, strict=True)
]


@pytest.mark.parametrize(("world", "codec", "dtypes"), QUANTISED)
def test_quantised_bits_are_those_of_the_host_path(world, codec, dtypes):
    def program(comm, kind, dtype, async_op=False):
        return [
            results(comm, kind, dtype, codec, algorithm, async_op)
            for algorithm in algorithms(comm.topology)
        ]

    for dtype in dtypes:
        host = "torch" if dtype == "bfloat16" else "numpy"
        expected = on(world, lambda c, d=dtype, h=host: program(c, h, d), min_numel=0)
        found = on(world, lambda c, d=dtype: program(c, "fake", d, True), min_numel=0)
        assert found == expected


@pytest.mark.parametrize("codec", CODECS)
def test_the_cuda_kernels_give_those_bits_too(emulator, monkeypatch, codec):
    """Kernels from their source, enqueued and run late; launches are what ``zcomm.codecs.cuda``
    makes of a call."""
    monkeypatch.setitem(fake.EMULATOR, "of all", emulator)
    for dtype in ("float32", "bfloat16", "float16"):
        host = "torch" if dtype == "bfloat16" else "numpy"
        expected = on(
            "2x2",
            lambda c, d=dtype, h=host: results(c, h, d, codec, "hierarchical", False),
            min_numel=0,
        )
        found = on(
            "2x2",
            lambda c, d=dtype: results(c, "fake", d, codec, "hierarchical", True),
            min_numel=0,
        )
        assert found == expected


@pytest.mark.parametrize("world", ["2x2", "2x2x2"])
@pytest.mark.parametrize("codecs", [("int8", "int4"), (None, "int4"), ("int8", None)])
def test_codecs_of_single_levels(world, codecs):
    def program(comm):
        per_level = (*codecs[:1] * (len(comm.topology.levels) - 1), codecs[1])
        stored = [drawn((comm.size * 300,), "float32", 61, rank) for rank in range(comm.size)]
        bits = []
        for kind in ("fake", "torch"):
            full = as_array(stored[comm.rank], "float32", kind)
            part = comm.reduce_scatter(full, codec=per_level)
            bits.append([stored_in(part)[0]])
            if None not in codecs or codecs[0] is None:
                gather = (None, "int4") if codecs[0] is None else ("int8", "int8")
                gather = (*gather[:1] * (len(comm.topology.levels) - 1), gather[1])
                bits[-1].append(stored_in(comm.all_gather(full, codec=gather))[0])
        for one, other in zip(*bits, strict=True):
            assert (one == other).all()

    on(world, program, min_numel=0)


def test_the_encodes_of_a_hop_are_one_launch():
    """reduce_scatter of one array: the order of the chunks is where each is written."""

    def program(comm):
        full = filled((comm.size * 300,), "float32", "fake", 1)
        launched = fake.mine().launched
        comm.reduce_scatter(full, codec="int8")
        assert launched == ["encode_batch", "decode_reduce_encode_batch", "decode_reduce"]
        launched.clear()
        comm.all_gather(full, codec="int8")
        assert launched == ["encode", "decode_batch"]

    on("2x2", program, min_numel=0)


def test_arrays_that_are_not_contiguous():
    def program(comm):
        shards = [drawn((4, 3), "bfloat16", 62, rank) for rank in range(comm.size)]
        total = oracle.reduced(shards, "bfloat16", comm.topology)
        mine = as_array(shards[comm.rank].T, "bfloat16", "fake").T
        assert_bits(comm.all_gather(mine), np.concatenate(shards), "bfloat16", "fake")
        out = filled((3, 4 * comm.size), "bfloat16", "fake").T
        assert comm.all_gather(mine, out, async_op=True).wait() is out
        assert_bits(out, np.concatenate(shards), "bfloat16")
        assert comm.all_reduce(mine) is mine
        assert_bits(mine, total, "bfloat16")
        comm.broadcast(mine, 1)

    on("2x2", program)


def test_layouts_and_groups():
    segments = ((Segment(300, 70), Segment(0, 257)), (Segment(257, 43),), (), (Segment(370, 1),))

    def program(comm):
        layout = Layout("bfloat16", segments)
        shards = [drawn((layout.shard_numel(r),), "bfloat16", 63, r) for r in range(comm.size)]
        bits = []
        for kind in ("fake", "torch"):
            full = filled((layout.extent,), "bfloat16", kind)
            shard = as_array(shards[comm.rank], "bfloat16", kind)
            comm.gather_layout([shard], [full], [layout], codec="int8")
            out = filled((layout.shard_numel(comm.rank),), "float32", kind)
            comm.reduce_layout([full], [out], [layout], codec="int4")
            bits.append([stored_in(full)[0], stored_in(out)[0]])
        for one, other in zip(*bits, strict=True):
            assert (one == other).all()
        for group in (comm.level(0), comm.rail(1), comm.split(comm.rank % 2, -comm.rank)):
            checks.every_algorithm(group, checks.all_reduce, "fake", "bfloat16", "sum", (37,))

    on("2x2", program, min_numel=0)


def test_bytes_are_counted_as_on_the_host():
    def program(comm):
        counted = []
        for kind in ("fake", "numpy"):
            comm.traffic.reset()
            comm.all_gather(filled((500,), "float32", kind, 1), codec="int4")
            comm.reduce_scatter(filled((2000,), "float32", kind, 1), codec="int8")
            counted.append([wire(comm, "all_gather"), wire(comm, "reduce_scatter")])
        assert counted[0] == counted[1]

    on("2x2", program, min_numel=0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("codec", ["int8", "int4:rounding=stochastic", "fp8_e5m2", "none"])
def test_a_codec_encodes_and_decodes_where_the_array_is(dtype, codec):
    chosen = Codec.parse(codec)
    if codec == "none" and dtype == "float64":
        dtype = "float32"
    stored = drawn((1001,), dtype, 64, 0)
    kind = "torch" if dtype == "bfloat16" else "numpy"
    expected = chosen.encode(as_array(stored, dtype, kind), seed=5, segments=[1000, 1])
    wire = chosen.encode(as_array(stored, dtype, "fake"), seed=5, segments=[1000, 1])
    assert_bits(wire, expected, "uint8", "fake")
    out = "float32" if dtype == "float64" else dtype
    torch_dtype = getattr(torch, out)
    decoded = chosen.decode(expected, 1001, torch_dtype, segments=[1000, 1])
    found = chosen.decode(wire, 1001, torch_dtype, segments=[1000, 1])
    assert_bits(found, stored_in(decoded)[0], out, "fake")
    bound = chosen.error_bound(as_array(stored, dtype, "fake"))
    assert (bound == chosen.error_bound(as_array(stored, dtype, kind))).all()


def test_float64_through_a_codec_leaves_what_is_not_a_segment():
    stored = store(np.arange(6), "float64")

    def program(comm):
        layout = Layout("float64", ((Segment(0, 2),), (Segment(4, 2),)))
        full = as_array(stored, "float64", "fake")
        shard = as_array(stored[:2], "float64", "fake")
        comm.gather_layout([shard], [full], [layout])
        assert full.numpy().tolist() == [0, 1, 2, 3, 0, 1]

    on("2", program)
