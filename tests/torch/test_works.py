"""Handles, futures, groups, single messages and errors of backend zcomm under MPI."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zcomm.torch
from zcomm.errors import CollectiveMismatch, CollectiveTimeout, ZcommError
from zcomm.torch import launch
from zcomm.torch import saved as saved_bytes

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("world")]


def test_asynchronous_operations_end_in_order():
    size = dist.get_world_size()
    tensors = [torch.full((50000,), float(k)) for k in range(5)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for k, (x, work) in enumerate(zip(tensors, works, strict=True)):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.result()[0] is x
        assert torch.equal(x, torch.full_like(x, k * size))


def test_futures_hold_the_tensors_and_chain():
    size = dist.get_world_size()
    x = torch.ones(1000)
    future = dist.all_reduce(x, async_op=True).get_future()
    halves = future.then(lambda done: done.value()[0] / 2)
    assert torch.equal(halves.wait(), torch.full((1000,), size / 2))
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert torch.equal(work.get_future().wait()[0], torch.full((1000,), float(size * size)))


def test_a_callback_may_communicate():
    size = dist.get_world_size()
    gate = torch.ones(200000)
    first = dist.all_reduce(gate, async_op=True)

    def again(done):
        x = done.value()[0]
        dist.all_reduce(x)
        return x

    assert first.get_future().then(again).wait()[0] == size * size


def test_an_error_is_raised_by_wait_and_by_the_future():
    # Every rank finds the same error in its own arguments: nothing was sent.
    out = torch.zeros(3)
    with pytest.raises(ValueError, match=r"output of 3 elements, expected \d+ \(\d+ ranks"):
        dist.all_gather_single(out, torch.zeros(2))
    work = dist.all_gather_single(out, torch.zeros(2), async_op=True)
    with pytest.raises(ValueError, match="output of 3 elements"):
        work.wait()
    assert not work.is_success()
    assert isinstance(work.exception(), ValueError)
    with pytest.raises(ValueError, match="output of 3 elements"):
        dist.all_gather_single(out, torch.zeros(2), async_op=True).get_future().wait()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: dist.all_reduce(x.int(), dist.ReduceOp.AVG), ValueError, "avg of int32"),
        (lambda x: dist.all_reduce(x, dist.ReduceOp.BAND), ValueError, "works on bits"),
        (lambda x: dist.reduce_scatter_single(x, x[1:]), ValueError, "input of"),
        (lambda x: dist.all_to_all_single(x, x, [9], [9]), ValueError, "input splits .9., expec"),
        (lambda x: dist.broadcast(x.to_sparse(), 0), TypeError, "sparse"),
    ],
)
def test_wrong_arguments(call, error, words):
    if dist.get_world_size() == 1:
        pytest.skip("one rank has fewer ways to be wrong")
    with pytest.raises(error, match=words):
        call(torch.ones(4))


def test_ranks_that_differ_are_told_so():
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        pytest.skip("nobody to differ from")
    group = dist.new_group()  # of its own: after a mismatch its calls are at different numbers
    with pytest.raises(CollectiveMismatch, match=r"all_reduce float32\[[23]\]"):
        dist.all_reduce(torch.ones(2 if rank else 3), group=group)
    splits = [2] * size
    out = torch.zeros(2 * size + (rank == 1))
    receives = [2 + (rank == 1), *splits[1:]]
    with pytest.raises(CollectiveMismatch, match=r"rank 0 sends .* to rank 1, which expects 12"):
        dist.all_to_all_single(out, torch.zeros(2 * size), receives, splits, group=group)
    dist.destroy_process_group(group)


def test_waiting_has_a_limit():
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        pytest.skip("nobody to wait for")
    group = dist.new_group()
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=2))  # not before: others may be late for the barrier
    if rank == 0:
        x = torch.ones(4)
        work = dist.all_reduce(x, group=group, async_op=True)
        with pytest.raises(CollectiveTimeout, match=r"all_reduce sum has not ended within 0.05 s"):
            work.wait(timedelta(seconds=0.05))
        with pytest.raises(CollectiveTimeout, match=r"rank 0 waited 2 s in all_reduce .*rank"):
            work.wait()
    dist.barrier()
    dist.destroy_process_group(group)


def test_monitored_barrier_names_who_is_late():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    group.monitored_barrier()
    if rank == 0 and size > 1:
        with pytest.raises(CollectiveTimeout, match=r"monitored_barrier: .* for rank"):
            group.monitored_barrier(timedelta(seconds=0.1))
    dist.barrier()
    dist.destroy_process_group(group)


def test_messages_cross_and_pass_collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for numel in (1, 300000):
        sent, got = torch.full((numel,), float(rank)), torch.zeros(numel)
        receiving = dist.irecv(got, before, tag=7)
        dist.barrier()  # a collective between: the message waits for nothing
        sending = dist.isend(sent, after, tag=7)
        receiving.wait()
        sending.wait()
        assert torch.equal(got, torch.full((numel,), float(before)))


def test_messages_of_any_dtype_and_strides():
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float64):
        sent = (torch.arange(6) + rank).reshape(2, 3).to(dtype)
        got = torch.zeros(3, 2, dtype=dtype)
        work = dist.isend(sent, after)
        dist.irecv(got.t(), before).wait()
        work.wait()
        assert torch.equal(got.t(), (torch.arange(6) + before).reshape(2, 3).to(dtype))


def test_messages_from_any_rank():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.full((3,), float(rank)), 0, tag=3)
    else:
        seen = set()
        for _ in range(size - 1):
            got = torch.zeros(3)
            source = dist.recv(got, tag=3)
            assert torch.equal(got, torch.full((3,), float(source)))
            seen.add(source)
        assert seen == set(range(1, size))


def test_messages_have_tags():
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    works = [dist.isend(torch.tensor([tag]), after, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        got = torch.zeros(1, dtype=torch.int64)
        dist.irecv(got, before, tag=tag).wait()
        assert got.item() == tag
    for work in works:
        work.wait()


def test_a_batch_of_messages():
    rank, size = dist.get_rank(), dist.get_world_size()
    got = torch.zeros(5)
    batch = [
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
        dist.P2POp(dist.isend, torch.full((5,), float(rank)), (rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert torch.equal(got, torch.full((5,), float((rank - 1) % size)))


def test_a_message_that_does_not_fit_and_one_that_does_not_come():
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1 or not launch.by_mpi():
        pytest.skip("needs a peer, and MPI: gloo ends the process")
    group = dist.new_group()
    if rank == 0:
        dist.isend(torch.ones(4), 1, group=group)
    elif rank == 1:
        with pytest.raises(
            RuntimeError, match=r"recv of float32\[2\] from rank 0, tag 0: .*runcat"
        ):
            dist.recv(torch.zeros(2), 0, group=group)
        work = dist.irecv(torch.zeros(2), 0, group=group, tag=5)
        with pytest.raises(CollectiveTimeout, match=r"recv of .* tag 5 has not ended within 0.1 s"):
            work.wait(timedelta(seconds=0.1))
    dist.barrier()
    dist.destroy_process_group(group)


def test_groups_of_some_ranks():
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([peer, size - 1 - peer] if 2 * peer != size - 1 else [peer])
              for peer in range((size + 1) // 2)]  # fmt: skip
    for peer, group in enumerate(groups):
        members = {peer, size - 1 - peer}
        if rank in members:
            x = torch.tensor([1.0 + rank])
            dist.all_reduce(x, group=group)
            assert x.item() == len(members) + sum(members)
            y = torch.tensor([rank])
            dist.broadcast(y, size - 1 - peer, group=group)
            assert y.item() == size - 1 - peer
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_groups_communicate_beside_each_other():
    # Two threads issue operations of two groups in an order that differs between ranks.
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(), dist.new_group()]
    sums = [torch.zeros(1), torch.zeros(1)]

    def add(which: int, delay: float) -> None:
        time.sleep(delay)
        for _ in range(10):
            x = torch.ones(1)
            dist.all_reduce(x, group=groups[which])
            sums[which] += x

    threads = [threading.Thread(target=add, args=(k, 0.05 * ((k + rank) % 2))) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [x.item() for x in sums] == [10 * size] * 2
    for group in groups:
        dist.destroy_process_group(group)


def test_a_destroyed_group_says_so():
    group = dist.new_group()
    dist.barrier(group)
    dist.destroy_process_group(group)
    with pytest.raises(ZcommError, match="was destroyed"):
        group.barrier()


def test_meshes():
    rank, size = dist.get_rank(), dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    assert line.get_local_rank() == rank
    outer = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (outer, size // outer), mesh_dim_names=("outer", "inner"))
    x = torch.tensor([1.0])
    dist.all_reduce(x, group=mesh.get_group("inner"))
    dist.all_reduce(x, group=mesh.get_group("outer"))
    assert x.item() == size
    assert dist.get_backend(mesh.get_group("inner")) == "zcomm"


def test_split_group_is_refused_by_torch_itself():
    with pytest.raises(RuntimeError, match="No device associated with the default pg"):
        dist.split_group(split_ranks=[[0]])
    with pytest.raises(ValueError, match="monitored_barrier is only implemented for GLOO"):
        dist.monitored_barrier()


def test_what_a_group_says_of_itself():
    group = dist.group.WORLD
    assert dist.get_backend() == "zcomm"
    assert group.name() == "zcomm"
    assert torch.device("cpu") in group._device_types
    assert group.communicator.size == dist.get_world_size()
    assert dist.get_process_group_ranks(group) == list(range(group.size()))


def test_options_quantise_one_group_and_say_what_was_saved(monkeypatch):
    rank, size = dist.get_rank(), dist.get_world_size()
    said = []
    monkeypatch.setattr(
        saved_bytes.logger, "info", lambda *words: said.append(words[0] % words[1:])
    )
    options = zcomm.torch.Options(all_gather="int8", reduce_scatter="int8", min_numel=4096)
    group = dist.new_group(backend="zcomm", pg_options=options)
    shard = torch.randn(4096, generator=torch.Generator().manual_seed(rank))
    everybody = [torch.randn(4096, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    whole, exact = torch.zeros(2, size * 4096)
    for _ in range(2):
        dist.all_gather_single(whole, shard, group=group)
    dist.all_gather_single(exact, shard)
    assert torch.equal(exact, torch.cat(everybody))
    codec = zcomm.Codec.parse("int8")
    if size > 1:
        error = torch.from_numpy(codec.error_bound(exact.numpy(), "float32"))
        assert ((whole - exact).abs() <= error).all()
        assert not torch.equal(whole, exact)
    # Integers, maxima and small tensors stay exact in the same group.
    numbers = torch.zeros(size * 4096, dtype=torch.int64)
    dist.all_gather_single(numbers, torch.arange(4096) + rank, group=group)
    assert torch.equal(numbers, torch.cat([torch.arange(4096) + r for r in range(size)]))
    top = torch.zeros(4096)
    dist.reduce_scatter_single(top, exact * (rank + 1), dist.ReduceOp.MAX, group=group)
    parts = torch.stack([exact * (r + 1) for r in range(size)]).amax(0)
    assert torch.equal(top, parts[rank * 4096 : rank * 4096 + 4096])
    dist.all_reduce(x := shard.clone(), group=group)
    dist.all_reduce(y := shard.clone())
    assert torch.equal(x, y)
    saved = zcomm.torch.savings(group)
    if size == 1:
        assert saved == {}
    else:
        sent = (size - 1) * 4096
        assert set(saved) == {"all_gather"}
        assert saved["all_gather"].calls == 2
        assert saved["all_gather"].exact_nbytes >= 2 * 4 * sent
        assert saved["all_gather"].wire_nbytes < 0.3 * saved["all_gather"].exact_nbytes
    assert zcomm.torch.savings() == {}
    quantised = [line for line in said if "is quantised" in line]
    assert len(quantised) == (rank == 0 and size > 1)  # said once
    dist.destroy_process_group(group)


def test_options_of_another_backend_are_refused():
    with pytest.raises(TypeError, match=r"takes zcomm\.torch\.Options"):
        dist.new_group(backend="zcomm", pg_options=object())
