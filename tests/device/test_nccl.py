"""The NCCL transport, on a stand-in for ``cupy.cuda.nccl``: arguments, order, streams, and bits."""

import threading

import numpy as np
import pytest

from tests.collectives import checks
from tests.collectives.dtypes import as_array, drawn, filled, stored_in
from tests.collectives.worlds import WORLDS, on
from tests.device import fake, nccl
from zcomm import CollectiveMismatch, PeerLost, bootstrap
from zcomm.communicator import Communicator
from zcomm.transports.local import Hub, LocalTransport
from zcomm.transports.nccl import NcclTransport
from zcomm.transports.staged import StagedTransport
from zcomm.work import Stream


def on_nccl(world, function, seed=0, min_numel=0):
    """Run ``function(comm, module)`` on all ranks, which have a fake device and NCCL each."""
    topology = WORLDS[world]
    hub, job = Hub(topology.size), nccl.Job()
    results, errors = [None] * topology.size, []

    def run(rank):
        stream = Stream()
        try:
            module = job.module()
            control = StagedTransport(LocalTransport(hub, rank))
            moves = NcclTransport(control, fake.mine(), module)
            channel = bootstrap._channel(moves, topology, seed)
            comm = Communicator(channel, stream, min_numel=min_numel, owner=moves)
            results[rank] = function(comm, module)
            comm.close()
        except BaseException as error:
            errors.append(error)
            hub.fail(f"rank {rank}: {error}")
        finally:
            stream.stop()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(topology.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, PeerLost):
            raise error
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("world", ["1x1", "2", "2x2", "3x2", "2x2x2", "3+5"])
def test_collectives(world):
    def program(comm, module):
        for dtype in ("float32", "bfloat16"):
            for shape in ((5,), (0,), (2, 3, 5)):
                checks.every_algorithm(comm, checks.all_gather, "fake", dtype, shape)
                checks.every_algorithm(comm, checks.reduce_scatter, "fake", dtype, "avg", shape)
            checks.every_algorithm(
                comm, checks.all_reduce, "fake", dtype, "sum", (4099,), async_op=True
            )
            checks.all_to_all(comm, "fake", dtype, (3, 2))
            checks.broadcast(comm, "fake", dtype, (5,), comm.size - 1)
            checks.send_and_recv(comm, "fake", dtype, (7,))
        checks.all_reduce(comm, "fake", "int64", "max", (13,))
        checks.all_gather(comm, "numpy", "float32", (5,))
        comm.barrier()

    on_nccl(world, program)


@pytest.mark.parametrize("codec", ["int8", "int4:rounding=stochastic"])
def test_quantised_bits_are_those_of_the_host_path(codec):
    def program(comm, kind):
        stored = drawn((comm.size * 700,), "float32", 80, comm.rank)
        bits = []
        for algorithm in ("flat", "hierarchical"):  # auto may differ between transports
            options = {"codec": codec, "algorithm": algorithm}
            results = (
                comm.all_gather(as_array(stored, "float32", kind), **options),
                comm.reduce_scatter(as_array(stored, "float32", kind), **options),
                comm.all_reduce(as_array(stored, "float32", kind), **options),
            )
            bits += [stored_in(result)[0].tobytes() for result in results]
        return bits

    found = on_nccl("2x2", lambda comm, module: program(comm, "fake"))
    assert found == on("2x2", lambda comm: program(comm, "numpy"), min_numel=0)


def test_calls_of_an_exchange():
    """A group of one send and one recv per peer: address, bytes, type, peer, the lane's stream."""

    def program(comm, module):
        mine = fake.mine()
        x = as_array(np.ones(4 * 6, np.float32), "float32", "fake")
        out = fake.new(mine, (4 * 6,), "float32")
        lane = comm._stream.lane(mine).stream.pointer
        assert module.calls == [("NcclCommunicator", 4, comm.rank)]
        module.calls.clear()
        comm.all_to_all(x, out)
        others = [rank for rank in range(4) if rank != comm.rank]
        at = {name: a.block.memory.pointer for name, a in (("send", x), ("recv", out))}
        assert module.calls == [
            ("groupStart",),
            *[("send", at["send"] + 24 * peer, 24, 1, peer, lane) for peer in others],
            *[("recv", at["recv"] + 24 * peer, 24, 1, peer, lane) for peer in others],
            ("groupEnd",),
            ("check_async_error",),
        ]
        assert mine.here().pointer != lane
        module.calls.clear()
        # Peers of a group are ranks of the job, whatever their number in the group.
        group = comm.split(comm.rank % 2, -comm.rank)
        group.all_gather(as_array(np.ones(3, np.float32), "float32", "fake"))
        assert {call[4] for call in module.calls if len(call) == 6} == {(comm.rank + 2) % 4}
        return module

    for module in on_nccl("2x2", program):
        assert module.calls[-1] == ("destroy",)


def test_the_host_never_waits_for_the_device():
    def program(comm, module):
        x = as_array(np.ones(4 * 3000, np.float32), "float32", "fake")
        results = []
        for codec in (None, "int8", "int4"):
            results.append(comm.all_gather(x, codec=codec))
            results.append(comm.reduce_scatter(x, codec=codec, op="avg"))
            results.append(comm.all_reduce(x, codec=codec, async_op=True).wait())
            results.append(comm.all_to_all(x))
        assert fake.mine().synchronized == 0
        for result in results:
            assert np.isfinite(result.numpy()).all()

    on_nccl("2x2", program)


def test_host_arrays_go_by_the_other_way_and_do_not_mix_with_device_arrays():
    def program(comm, module):
        module.calls.clear()
        comm.all_gather(np.ones(3))
        assert module.calls == []
        with pytest.raises(CollectiveMismatch, match="over nccl"):
            comm.all_gather(filled((3,), "float32", "fake" if comm.rank else "numpy"))

    on_nccl("2", program)


def test_an_error_of_nccl_is_a_lost_peer():
    def program(comm, module):
        module.failing = True
        with pytest.raises(PeerLost, match=r"NCCL failed on rank \d of 2: .*unplugged"):
            comm.all_gather(filled((3,), "float32", "fake", 1))
        module.failing = False

    on_nccl("2", program)


def test_arrays_of_another_device_are_refused():
    def program(comm, module):
        own = fake.mine()
        other = fake.FakeDevice()
        with pytest.raises(TypeError, match=f"{other.name}.*nccl from {own.name}.*possible"):
            comm.all_gather(fake.as_fake(np.ones(3, np.float32), "float32", other))

    on_nccl("2", program)


def test_names_and_argument_orders_are_those_of_cupy():
    """Where CuPy is installed (it needs no device for this), the stand-in is compared with it."""
    cupy_nccl = pytest.importorskip("cupy.cuda.nccl", reason="CuPy is not installed")
    if not cupy_nccl.available:
        pytest.skip("CuPy finds no NCCL")
    assert cupy_nccl.NCCL_UINT8 == nccl.NCCL_UINT8
    for name in ("send", "recv"):
        words = getattr(cupy_nccl.NcclCommunicator, name).__doc__.partition("(")[2]
        order = [word.split()[-1] for word in words.partition(")")[0].split(",")[1:]]
        assert order == [f"{name}buf", "count", "datatype", "peer", "stream"]
    for name in ("check_async_error", "abort", "destroy"):
        assert hasattr(cupy_nccl.NcclCommunicator, name)
    for name in ("groupStart", "groupEnd", "get_unique_id", "NcclError"):
        assert hasattr(cupy_nccl, name)
