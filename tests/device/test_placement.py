"""Where arrays may lie, which device and transport a job gets, and what is refused, in one line."""

import importlib.util
import sys
import threading
import types

import numpy as np
import pytest
import torch

import zcomm
from tests.collectives.dtypes import as_array, filled
from tests.collectives.worlds import on
from tests.device import fake, nccl
from zcomm import Codec, CodecError, ZcommError, cuda, placement
from zcomm.device import DeviceMemory, device_of
from zcomm.transports.local import Hub, LocalTransport
from zcomm.transports.nccl import NcclTransport
from zcomm.transports.staged import StagedTransport


def one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_host_and_device_arrays_in_one_call():
    def program(comm):
        with pytest.raises(TypeError, match=r"fake:\d+ and the host: possible are") as caught:
            comm.all_reduce([filled((3,), "float32", kind) for kind in ("fake", "numpy")])
        one_line(caught)
        with pytest.raises(TypeError, match="FakeArray"):
            comm.all_gather(filled((3,), "float32", "numpy"), filled((6,), "float32", "fake"))
        assert comm.all_reduce(filled((3,), "float32", "fake", 1)).numpy().tolist() == [2] * 3

    on("2", program)


def test_arrays_on_two_devices():
    def program(comm):
        other = fake.as_fake(np.ones(3, np.float32), "float32", fake.FakeDevice())
        with pytest.raises(TypeError, match=r"fake:\d+ and fake:\d+: possible are") as caught:
            comm.all_reduce([filled((3,), "float32", "fake"), other])
        one_line(caught)

    on("2", program)


def test_ranks_may_differ_where_bytes_go_through_the_host():
    def program(comm):
        x = filled((3,), "float32", "fake" if comm.rank else "torch", comm.rank + 1)
        return comm.all_reduce(x)

    host, device = on("2", program)
    assert host.tolist() == device.numpy().tolist() == [3] * 3


def test_memory_is_cut_without_copies_and_knows_its_owner():
    owner = object()
    memory = DeviceMemory(1000, 100, fake.mine(), owner)
    part = memory[10:40][5:]
    assert (part.pointer, part.size, len(part), part.owner) == (1015, 25, 25, owner)
    assert memory[90:200].size == 10
    assert memory[50:20].size == 0
    with pytest.raises(ValueError, match="steps of 1"):
        memory[::2]
    assert device_of(np.empty(0, np.uint8)) is None
    assert device_of(memory, part) is memory.device


@pytest.mark.parametrize("backend", ["numpy", "native"])
def test_host_kernels_are_refused_for_device_arrays(monkeypatch, backend):
    monkeypatch.setenv("ZCOMM_CODEC_BACKEND", backend)
    device = object.__new__(cuda.CudaDevice)
    device.name = "cuda:0"
    with pytest.raises(CodecError, match=f"{backend}.*cuda:0: possible for it is cuda") as caught:
        device.kernels()
    one_line(caught)


def test_device_kernels_are_refused_for_host_arrays(monkeypatch):
    monkeypatch.setenv("ZCOMM_CODEC_BACKEND", "cuda")
    with pytest.raises(CodecError, match=r"cuda.*host.*numpy.*native") as caught:
        Codec.parse("int8").encode(np.ones(3, np.float32))
    one_line(caught)


@pytest.fixture
def no_cupy(monkeypatch):
    cuda.load_cupy.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    yield
    cuda.load_cupy.cache_clear()


def test_without_cupy_a_device_array_is_an_error_that_names_the_extra(no_cupy):
    with pytest.raises(ZcommError, match=r"need CuPy .*zcomm\[cuda13\]") as caught:
        cuda.cuda_device(0)
    one_line(caught)


def test_without_a_driver_the_error_says_what_cupy_says(monkeypatch):
    class Runtime:
        def getDeviceCount(self):
            raise RuntimeError("cudaErrorInsufficientDriver:\n too old")

    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_available=lambda: False, runtime=Runtime())
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cuda.load_cupy.cache_clear()
    with pytest.raises(ZcommError, match=r"driver.*cudaErrorInsufficientDriver") as caught:
        cuda.cuda_device(0)
    one_line(caught)
    cuda.load_cupy.cache_clear()


def test_a_tensor_of_another_kind_of_device():
    with pytest.raises(TypeError, match=r"'meta'.*possible are host arrays .* and CUDA arrays"):
        on("2", lambda comm: comm.all_gather(torch.empty(3, device="meta")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "gpu"}, "device 'gpu'.*auto, cpu, cuda"),
        ({"transport": "gloo"}, "transport 'gloo'.*auto, mpi, nccl"),
        ({"device": "cpu", "transport": "nccl"}, "'nccl'.*'cpu'.*possible are"),
    ],
)
def test_unknown_choices(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        zcomm.init(abort=False, **options)
    one_line(caught)


class Gpu(fake.FakeDevice):
    """A fake device with what ``placement`` asks of a CUDA device."""

    title = "a fake"

    def __init__(self, bus):
        super().__init__()
        self.bus = bus
        self.made_current = False

    def make_current(self):
        self.made_current = True


def choose(monkeypatch, owns, device="auto", transport="auto"):
    """Let ranks with these devices (None: none) choose; return (device, transport) or errors."""
    hub, job, results = Hub(len(owns)), nccl.Job(), [None] * len(owns)
    mine = threading.local()
    monkeypatch.setattr(placement, "_look", lambda number: mine.own)

    def run(rank):
        bus, has_nccl = owns[rank] or (None, False)
        gpu = None if bus is None else Gpu(bus)
        module = job.module() if has_nccl else None
        mine.own = placement.Own(gpu, "it has none" if gpu is None else "", module)
        if gpu is not None:
            fake.use(gpu)
        try:
            control = StagedTransport(LocalTransport(hub, rank))
            place, moves, words = placement.choose(device, transport, control)
            assert ("cpu" in words) == (place is None)
            assert place is None or (place is gpu and gpu.made_current)
            results[rank] = (place is not None, type(moves))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(owns))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


TWO = [("0", True), ("1", True)]
SHARED = [("0", True), ("0", True)]
NO_NCCL = [("0", True), ("1", False)]
ONE_WITHOUT = [("0", True), None]


@pytest.mark.parametrize(
    ("owns", "options", "expected"),
    [
        (TWO, {}, (True, NcclTransport)),
        (TWO, {"transport": "mpi"}, (True, StagedTransport)),
        (TWO, {"device": "cpu"}, (False, StagedTransport)),
        (SHARED, {}, (True, StagedTransport)),
        (NO_NCCL, {}, (True, StagedTransport)),
        (ONE_WITHOUT, {}, (False, StagedTransport)),
        ([None, None], {}, (False, StagedTransport)),
        (TWO[:1], {}, (True, StagedTransport)),
        (TWO[:1], {"transport": "nccl"}, (True, NcclTransport)),
    ],
)
def test_all_ranks_choose_alike(monkeypatch, owns, options, expected):
    assert choose(monkeypatch, owns, **options) == [expected] * len(owns)


@pytest.mark.parametrize(
    ("owns", "options", "words"),
    [
        (ONE_WITHOUT, {"device": "cuda"}, ["rank 1 has no CUDA device", "it has none"]),
        (ONE_WITHOUT, {"transport": "nccl"}, ["rank 1 has no CUDA device", "it has none"]),
        (SHARED, {"transport": "nccl"}, ["ranks 0, 1 share a device"] * 2),
        (NO_NCCL, {"transport": "nccl"}, ["rank 1 cannot load libnccl"] * 2),
    ],
)
def test_what_was_asked_for_and_cannot_be_had_is_an_error_on_all_ranks(
    monkeypatch, owns, options, words
):
    for error, expected in zip(choose(monkeypatch, owns, **options), words, strict=True):
        assert isinstance(error, ZcommError)
        assert expected in str(error)
        assert "\n" not in str(error)


def test_ranks_are_counted_on_each_host(monkeypatch):
    names = ["a", "b", "a", "a", "b"]
    mine, results, hub = threading.local(), [None] * 5, Hub(5)
    monkeypatch.setattr(placement.socket, "gethostname", lambda: mine.name)

    def run(rank):
        mine.name = names[rank]
        results[rank] = placement.local_rank(StagedTransport(LocalTransport(hub, rank)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0, 0, 1, 2, 1]


@pytest.mark.parametrize("texts", [["a", "", "bcdé"], ["", ""], ["x"]])
def test_texts_of_all_ranks(texts):
    results, hub = [None] * len(texts), Hub(len(texts))

    def tell(rank):
        control = StagedTransport(LocalTransport(hub, rank))
        results[rank] = placement.gather_text(control, texts[rank])

    threads = [threading.Thread(target=tell, args=(rank,)) for rank in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == [texts] * len(texts)


@pytest.mark.mpi
def test_this_job_says_once_what_it_runs_on(caplog):
    with caplog.at_level("INFO"), zcomm.init(abort=False, transport="mpi") as comm:
        assert comm.device == "cpu" or comm.device.startswith("cuda:")
        said = [one.getMessage() for one in caplog.records if "transport" in one.getMessage()]
        assert len(said) == (comm.rank == 0)
        assert all(one.startswith(f"device {comm.device} (") for one in said)


@pytest.mark.mpi
@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"transport": "nccl"}])
def test_a_device_that_is_asked_for_and_is_not_there(options):
    with pytest.raises(
        ZcommError, match=r"'(cuda|nccl)': CuPy .* pip install 'zcomm\[cuda13\]', or"
    ):
        zcomm.init(abort=False, **options)


@pytest.mark.mpi(min_size=2)
def test_ranks_agree_on_what_they_ask_for():
    from mpi4py import MPI

    with pytest.raises(zcomm.CollectiveMismatch, match=r"device=auto.*device=cpu"):
        zcomm.init(abort=False, device=("auto", "cpu")[MPI.COMM_WORLD.rank % 2])


@pytest.mark.mpi
@pytest.mark.parametrize("spec", ["auto", "nodes"])
def test_device_arrays_over_mpi(spec, monkeypatch):
    """Real MPI, pinned buffers of the fake device; also messages in parts."""
    from mpi4py import MPI

    from tests.collectives import checks

    size = MPI.COMM_WORLD.size
    topology = "auto" if spec == "auto" else "2x2" if size == 4 else f"{size}x1"
    monkeypatch.setenv("ZCOMM_MESSAGE_LIMIT", "4000")
    with zcomm.init(topology=topology, abort=False, min_numel=0) as comm:
        for dtype in ("float32", "bfloat16"):
            for numel in (3, 1001):
                checks.every_algorithm(comm, checks.all_gather, "fake", dtype, (numel,))
                checks.every_algorithm(comm, checks.all_reduce, "fake", dtype, "avg", (numel,))
                checks.every_algorithm(
                    comm, checks.reduce_scatter, "fake", dtype, "sum", (numel,), async_op=True
                )
            checks.all_to_all(comm, "fake", dtype, (5,))
            checks.broadcast(comm, "fake", dtype, (1001,), comm.size - 1)
            checks.send_and_recv(comm, "fake", dtype, (1001,))
        for codec in ("int8", "int4:rounding=stochastic"):
            both = []
            for kind in ("fake", "torch"):
                with zcomm.init(topology=topology, abort=False, min_numel=0) as again:
                    x = as_array(np.arange(3000, dtype=np.float32) * again.rank, "float32", kind)
                    result = again.all_reduce(x, codec=codec)
                    both.append(result.numpy() if kind == "fake" else np.asarray(result))
            assert (both[0] == both[1]).all()


@pytest.mark.mpi
def test_mpi_is_given_device_memory_where_it_is_said_to_know_it(monkeypatch):
    """The fake device's memory is the host's, so any MPI can take its addresses."""
    from tests.collectives import checks

    monkeypatch.setenv("ZCOMM_CUDA_AWARE_MPI", "1")
    with zcomm.init(abort=False, min_numel=0) as comm:
        checks.every_algorithm(comm, checks.all_gather, "fake", "bfloat16", (1001,))
        checks.every_algorithm(comm, checks.all_reduce, "fake", "float32", "sum", (5000,))
        checks.send_and_recv(comm, "fake", "float32", (7,))
