"""The same on a real device: torch CUDA tensors and CuPy arrays, streams, NCCL.

Ranks that are threads share the one device; NCCL wants one each, so more than one rank of it runs
under mpirun where there are as many devices.
"""

import importlib.util
import time

import numpy as np
import pytest
import torch

import zcomm
from tests.collectives import checks
from tests.collectives.dtypes import as_array, assert_bits, drawn, stored_in
from tests.collectives.worlds import algorithms, on
from tests.device.test_collectives import CODECS, results
from zcomm import Codec

CUPY = importlib.util.find_spec("cupy") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
    pytest.mark.skipif(not CUPY, reason="CuPy is not installed"),
]
EVERY_KIND = pytest.mark.parametrize("kind", ["cuda", "cupy"])
SLEEP_CYCLES = 1_000_000_000  # about half a second


@pytest.fixture(autouse=True, scope="module")
def cupy():
    if not (CUPY and torch.cuda.is_available()):
        return
    torch.cuda.init()
    import cupy  # noqa: F401


def dtypes_of(kind):
    return ("float32", "float16") + (("bfloat16",) if kind == "cuda" else ())


@EVERY_KIND
@pytest.mark.parametrize("world", ["1x1", "2x2", "2x2x2", "3+5"])
def test_exact_collectives(kind, world):
    def program(comm):
        for dtype in dtypes_of(kind):
            for shape in ((), (5,), (0,), (2, 3, 5)):
                checks.every_algorithm(comm, checks.all_gather, kind, dtype, shape)
            for op in ("sum", "avg", "max"):
                checks.every_algorithm(comm, checks.all_reduce, kind, dtype, op, (4099,))
            checks.every_algorithm(comm, checks.reduce_scatter, kind, dtype, "avg", (37,))
            checks.all_to_all(comm, kind, dtype, (3, 2))
            checks.broadcast(comm, kind, dtype, (5,), comm.size - 1)
            checks.send_and_recv(comm, kind, dtype, (7,))
        for dtype in ("int32", "float64", "bool"):
            op = "or" if dtype == "bool" else "sum"
            checks.every_algorithm(comm, checks.all_reduce, kind, dtype, op, (13,))

    on(world, program)


@EVERY_KIND
@pytest.mark.parametrize("codec", CODECS)
def test_quantised_bits_are_those_of_the_host_path(kind, codec):
    for world in ("2x2", "2x2x2", "3+5"):
        for dtype in dtypes_of(kind):
            host = "torch" if dtype == "bfloat16" else "numpy"

            def program(comm, of, async_op, dtype=dtype):
                return [
                    results(comm, of, dtype, codec, algorithm, async_op)
                    for algorithm in algorithms(comm.topology)
                ]

            expected = on(world, lambda c, p=program, h=host: p(c, h, False), min_numel=0)
            assert on(world, lambda c, p=program: p(c, kind, True), min_numel=0) == expected


def test_strides_and_outputs():
    def program(comm):
        shards = [drawn((4, 3), "bfloat16", 62, rank) for rank in range(comm.size)]
        mine = as_array(shards[comm.rank].T, "bfloat16", "cuda").T
        assert_bits(comm.all_gather(mine), np.concatenate(shards), "bfloat16", "cuda")
        out = torch.zeros(3, 4 * comm.size, dtype=torch.bfloat16, device="cuda").T
        assert comm.all_gather(mine, out, async_op=True).wait() is out
        assert_bits(out, np.concatenate(shards), "bfloat16")

    on("2x2", program)


@EVERY_KIND
@pytest.mark.parametrize("codec", CODECS)
def test_codecs(kind, codec):
    chosen = Codec.parse(codec)
    for dtype in dtypes_of(kind):
        stored = drawn((100_001,), dtype, 64, 0)
        host = as_array(stored, dtype, "torch" if dtype == "bfloat16" else "numpy")
        expected = chosen.encode(host, seed=5, segments=[100_000, 1])
        wire = chosen.encode(as_array(stored, dtype, kind), seed=5, segments=[100_000, 1])
        assert_bits(wire, expected, "uint8", kind)
        out = getattr(torch, dtype)
        decoded = chosen.decode(expected, 100_001, out, segments=[100_000, 1])
        found = chosen.decode(wire, 100_001, out, segments=[100_000, 1])
        assert_bits(found, stored_in(decoded)[0], dtype, kind)


@pytest.mark.parametrize("async_op", [False, True])
def test_an_input_that_a_busy_stream_is_yet_to_write(async_op):
    """On a stream of the caller's own: the input comes late, the result is read at once."""

    def program(comm):
        with torch.cuda.stream(torch.cuda.Stream()):
            for codec in (None, "int8"):
                x = torch.zeros(100_000, device="cuda")
                torch.cuda._sleep(SLEEP_CYCLES // 10)
                x.fill_(comm.rank + 1)
                result = comm.all_reduce(x, codec=codec, async_op=async_op)
                result = result.wait() if async_op else result
                assert result.clone().eq(sum(range(1, comm.size + 1))).all().item()

    on("2x2", program, min_numel=0)


def test_memory_that_is_freed_and_reused_after_an_asynchronous_call():
    def program(comm):
        works = []
        for turn in range(20):
            x = torch.full((1 << 20,), float(turn), device="cuda")
            works.append(comm.all_gather(x, codec="int8", async_op=True))
            del x
            torch.full((1 << 20,), 1e9, device="cuda")
        for turn, work in enumerate(works):
            assert work.wait().eq(turn).all().item()

    on("2", program, min_numel=0)


def nccl(**options):
    if torch.cuda.device_count() < MPI_SIZE():
        pytest.skip(f"{torch.cuda.device_count()} devices for {MPI_SIZE()} ranks of NCCL")
    return zcomm.init(transport="nccl", abort=False, min_numel=0, **options)


def MPI_SIZE():
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


@pytest.mark.mpi
@EVERY_KIND
def test_nccl(kind):
    with nccl() as comm:
        assert comm.device.startswith("cuda:")
        for dtype in dtypes_of(kind):
            for shape in ((5,), (0,), (70_001,)):
                checks.every_algorithm(comm, checks.all_gather, kind, dtype, shape)
                checks.every_algorithm(comm, checks.reduce_scatter, kind, dtype, "avg", shape)
            checks.every_algorithm(comm, checks.all_reduce, kind, dtype, "sum", (70_001,))
            checks.all_to_all(comm, kind, dtype, (3, 2))
            checks.broadcast(comm, kind, dtype, (5,), comm.size - 1)
            checks.send_and_recv(comm, kind, dtype, (7,))
        comm.barrier()


@pytest.mark.mpi
@pytest.mark.parametrize("codec", CODECS)
def test_nccl_bits_are_those_of_mpi(codec):
    bits = []
    for kind, options in (("cuda", {"transport": "nccl"}), ("torch", {"transport": "mpi"})):
        if kind == "cuda" and torch.cuda.device_count() < MPI_SIZE():
            pytest.skip("not a device for each rank")
        with zcomm.init(abort=False, min_numel=0, **options) as comm:
            bits.append(results(comm, kind, "bfloat16", codec, "auto", True))
    assert bits[0] == bits[1]


@pytest.mark.mpi
def test_nccl_calls_return_while_the_device_is_busy():
    with nccl() as comm:
        x = torch.ones(1 << 20, device="cuda")
        for codec in (None, "int8"):
            comm.all_reduce(x, codec=codec, op="avg")  # kernels are compiled once
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        busy = torch.cuda.Event()
        busy.record()
        start = time.perf_counter()
        for codec in (None, "int8"):
            comm.all_reduce(x, codec=codec, op="avg")
        assert not busy.query(), f"the host waited {time.perf_counter() - start:.3f} s"
        assert x.eq(1).all().item()
