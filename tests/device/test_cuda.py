"""``CudaDevice`` and CuPy arrays: on a stand-in for CuPy, and its names in the real one."""

import ast
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.collectives.dtypes import drawn
from tests.device.cupy_double import (
    ON_DEVICE,
    TO_DEVICE,
    TO_HOST,
    CupyArray,
    Double,
    TorchDouble,
)
from tests.device.fake import FakeDevice, FakeKind
from zcomm import Codec, bootstrap, cuda, kinds
from zcomm.codecs import compile as compiler
from zcomm.device import Lane

NUMEL = 300


@pytest.fixture
def cupy(monkeypatch, emulator):
    """Install the stand-in as CuPy, with the emulator behind its functions."""
    double = Double(FakeDevice(records=False))
    monkeypatch.setitem(sys.modules, "cupy", double)
    monkeypatch.setattr(kinds, "KINDS", [k for k in kinds.KINDS if not isinstance(k, FakeKind)])
    monkeypatch.setattr(cuda, "_DEVICES", {})
    cuda.load_cupy.cache_clear()

    def load(module, arch, kernel):
        assert (module, arch) == (double, "sm_90")

        def function(grid, block, arguments, shared, stream):
            double.check()
            assert grid[1:] == block[1:] == (1, 1)
            assert shared == 0
            given = tuple(argument.copy() for argument in arguments)
            run = emulator.launch
            stream.stream.tasks.append(lambda: run(kernel, grid[0], block[0], given))

        return {kernel: function}

    monkeypatch.setattr(compiler, "load", load)
    yield double
    cuda.load_cupy.cache_clear()


def program(comm, array, read):
    """Return the bits of some operations on arrays that ``array`` makes."""
    shard = drawn((NUMEL,), "float32", 99, comm.rank)
    full = np.tile(shard, comm.size)
    results = [
        comm.all_gather(array(shard)),
        comm.all_gather(array(shard), codec="int8", async_op=True).wait(),
        comm.reduce_scatter(array(full), codec="int4:rounding=stochastic", op="avg"),
        comm.all_reduce(array(full), codec="int8"),
        comm.all_reduce(array(full.astype(np.float16))),
        comm.all_reduce(array(full.astype(np.float64)), codec="int4"),
        comm.all_reduce(array(np.arange(5) + comm.rank), op="max"),
        comm.broadcast(array(shard), 1),
        comm.all_to_all(array(full)),
    ]
    return [read(result) for result in results]


def test_cupy_arrays_through_the_communicator(cupy):
    def on_device(comm):
        found = program(comm, cupy.array, lambda x: (type(x), x.numpy().tobytes()))
        assert not comm.closed
        assert cupy.selected() == []
        return found

    expected = bootstrap.run_local(
        lambda comm: program(comm, np.copy, lambda x: x.tobytes()), 4, "2x2", min_numel=0
    )
    found = bootstrap.run_local(on_device, 4, "2x2", min_numel=0)
    assert all(issubclass(kind, CupyArray) for rows in found for kind, _ in rows)
    assert [[bits for _, bits in rows] for rows in found] == expected
    assert {TO_DEVICE, TO_HOST, ON_DEVICE} == set(cupy.copies)


def test_strides_and_zero_elements(cupy):
    def on_device(comm):
        x = cupy.array(np.arange(6, dtype=np.float32).reshape(2, 3)).transposed()
        assert comm.all_reduce(x) is x
        empty = comm.all_gather(cupy.array(np.zeros((0, 2), np.float32)))
        return x.numpy().tolist(), empty.shape

    assert (
        bootstrap.run_local(on_device, 2, min_numel=0) == [([[0, 6], [2, 8], [4, 10]], (0, 2))] * 2
    )


def test_a_codec_works_on_the_stream_of_its_caller(cupy):
    codec = Codec.parse("int4")
    x = drawn((NUMEL,), "float32", 98, 0)
    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
        wire = codec.encode(cupy.array(x))
        back = codec.decode(wire, NUMEL, "float32")
        assert (wire.numpy() == codec.encode(x)).all()
        assert (back.numpy() == codec.decode(codec.encode(x), NUMEL, "float32")).all()


def test_a_device_is_made_once_and_says_what_it_is(cupy):
    with ThreadPoolExecutor(8) as threads:
        made = set(threads.map(cuda.cuda_device, [0] * 50))
    (device,) = made
    assert (device.name, device.title, device.num_multiprocessors) == ("cuda:0", "a double", 4)
    device.make_current()
    assert cupy.selected() == [0]
    cupy.selected().clear()


def test_copies_of_different_sizes_are_refused(cupy):
    device = cuda.cuda_device(0)
    with pytest.raises(ValueError, match="8 bytes to 4"):
        device.copy(device.empty(4), device.empty(8))


@pytest.fixture
def torch_double(cupy, monkeypatch):
    torch = TorchDouble(cupy)
    monkeypatch.setattr(cuda, "_torch_with_cuda", lambda: torch)
    return torch


def test_an_operation_on_tensors_makes_its_lane_the_stream_of_torch_and_cupy(cupy, torch_double):
    device = cuda.cuda_device(0)
    side = torch_double.cuda.Stream(0)
    with torch_double.cuda.stream(side):
        tensor = torch_double.Tensor(64)
        lane = Lane(device)
        assert [stream.pointer for stream in device.current({torch_double.Tensor})] == [
            side.cuda_stream
        ]
        operation = lane.begin([tensor])
        with operation.running():
            at = lane.stream.pointer
            assert torch_double.current().cuda_stream == at == device.here().pointer
            assert cupy.cuda.get_current_stream().ptr == at
            scratch = device.empty(64)
            assert scratch.owner.made_on.cuda_stream == at
            device.copy(scratch, device.empty(64))
        assert tensor.recorded == [at]
        assert torch_double.current() is side
        assert not lane._held
        issued = len(side.stream.tasks)
        operation.join()
        assert len(side.stream.tasks) == issued + 1  # the wait for the end
    assert cupy.selected() == []


def test_arrays_of_cupy_beside_torch_keep_their_own_stream(cupy, torch_double):
    device = cuda.cuda_device(0)
    array = cupy.array(np.zeros(4, np.float32))
    with torch_double.cuda.stream(torch_double.cuda.Stream(0)):
        assert [stream.pointer for stream in device.current({type(array)})] == [0]
        with device.using(device.current({type(array)})[0]):
            assert torch_double.current() is torch_double.default
    lane = Lane(device)
    with lane.begin([array]).running():
        pass
    assert len(lane._held) == 1


def names_of_cupy(path):
    """Return the dotted names under ``cupy`` in a source file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            for prefix in ("self.cupy.", "self.device.cupy.", "cupy."):
                if name.startswith(prefix) and "(" not in name:
                    found.add(name.removeprefix(prefix))
    return found


def test_names_exist_in_cupy():
    """Where CuPy is installed: no device is needed to look."""
    real = pytest.importorskip("cupy", reason="CuPy is not installed")
    names = names_of_cupy(Path(cuda.__file__))
    assert {"cuda.runtime.memcpyAsync", "cuda.Event", "cuda.Stream.from_external"} <= names
    for name in names:
        value = real
        for part in name.split("."):
            value = getattr(value, part)
