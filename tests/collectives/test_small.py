"""Small messages travel with their header: right values, right bits, whatever way a rank takes."""

import threading

import numpy as np
import pytest
import torch

import zcomm
from tests.collectives import oracle
from tests.collectives.dtypes import ITEMSIZE, KINDS, as_array, drawn, stored_in
from tests.collectives.worlds import on, wire
from zcomm import ready, run_local
from zcomm.guard import PAYLOAD_NBYTES

WORLDS = ("2", "2x1", "3", "2x2")
SIZES = (1, 3, 64)


def number_of(world):
    return int(np.prod([int(extent) for extent in world.split("x")]))


def of_rank(rank, numel, dtype, turn=0):
    return drawn((numel,), dtype, turn, rank)


def everywhere(size, numel, dtype, turn=0):
    return [of_rank(rank, numel, dtype, turn) for rank in range(size)]


def at(world, function):
    return run_local(function, number_of(world), None if world in ("2", "3") else world)


def bits(x):
    return stored_in(x)[0].tobytes()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_calls_that_are_alike_have_the_bits_of_the_large_algorithm(world, kind, dtype):
    """The same elements inside an array that is too large to travel with its header."""
    op = oracle.possible_ops(dtype)[0]
    large = PAYLOAD_NBYTES // ITEMSIZE[dtype] + 1

    def program(comm):
        for numel in SIZES:
            for turn in range(3):  # made ready at the first
                whole = of_rank(comm.rank, large, dtype, turn)
                x = as_array(whole[:numel].copy(), dtype, kind)
                got = comm.all_reduce(x, op=op)
                assert got is x
                expected = bits(comm.all_reduce(as_array(whole, dtype, kind), op=op))
                assert bits(x) == expected[: numel * ITEMSIZE[dtype]]

    at(world, program)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_gathered_and_broadcast_again_and_again(world, kind, dtype):
    def program(comm):
        for numel in SIZES:
            out = as_array(np.concatenate(everywhere(comm.size, numel, dtype)), dtype, kind)
            for turn in range(1, 4):
                shards = everywhere(comm.size, numel, dtype, turn)
                x = as_array(shards[comm.rank].copy(), dtype, kind)
                expected = np.concatenate(shards).tobytes()
                assert bits(comm.all_gather(x)) == expected
                assert comm.all_gather(x, out) is out
                assert bits(out) == expected
                root = turn % comm.size
                assert comm.broadcast(x, root) is x
                assert bits(x) == shards[root].tobytes()

    at(world, program)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_scattered_again_and_again(world, kind, dtype):
    """Messages of more bytes than travel with a header have the same elements in front."""
    op = oracle.possible_ops(dtype)[0]
    more = PAYLOAD_NBYTES // ITEMSIZE[dtype] + 1

    def program(comm):
        for numel in SIZES:
            for turn in range(2):
                rows = of_rank(comm.rank, comm.size * more, dtype, turn).reshape(comm.size, more)
                small = np.ascontiguousarray(rows[:, :numel]).reshape(-1)
                got = comm.reduce_scatter(as_array(small, dtype, kind), op=op)
                large = comm.reduce_scatter(as_array(rows.reshape(-1), dtype, kind), op=op)
                assert bits(got) == bits(large)[: numel * ITEMSIZE[dtype]]
                swapped = comm.all_to_all(as_array(small, dtype, kind))
                parts = [of_rank(r, comm.size * more, dtype, turn) for r in range(comm.size)]
                runs = [part.reshape(comm.size, more)[comm.rank, :numel] for part in parts]
                assert bits(swapped) == np.concatenate(runs).tobytes()

    at(world, program)


@pytest.mark.parametrize("codec", ["int8", "int4:block=64", "bf16"])
def test_codes_travel_with_the_header_too(codec):
    """One hop of small messages, in several items: the bits and the bytes of a local encoder."""
    spec = zcomm.Codec.parse(codec)

    def program(comm):
        shards = [[drawn((n,), "float32", n, rank) for n in (5, 300)] for rank in range(3)]
        for turn in range(1, 3):
            got = comm.all_gather(shards[comm.rank], codec=codec)
            for place, result in enumerate(got):
                wires = [spec.encode(shard[place]) for shard in shards]
                numel = shards[0][place].size
                parts = [spec.decode(each, numel, "float32") for each in wires]
                assert result.tobytes() == np.concatenate(parts).tobytes()
            nbytes = 2 * turn * sum(spec.wire_nbytes(n) for n in (5, 300))
            assert comm.traffic.wire_nbytes(operation="all_gather") == nbytes

    run_local(program, 3, min_numel=0)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (1, 4, 1), (0,), (0, 3)])
@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_shapes(make, shape):
    def program(comm):
        for _ in range(2):
            x = make(shape)
            x += comm.rank
            gathered = comm.all_gather(x)
            assert tuple(gathered.shape) == ((2 * shape[0], *shape[1:]) if shape else (2,))
            half = gathered.reshape(2, -1)
            assert half.tolist() == [
                [rank] * (x.size if make is np.zeros else x.numel()) for rank in (0, 1)
            ]
            x += 1
            summed = comm.all_reduce(x)
            assert tuple(summed.shape) == shape
            assert bool((summed == 3).all())

    run_local(program, 2)


# What one rank passes where the others pass an ordinary array: the same call, by another way.
UNUSUAL = {
    "a list": lambda x: [x],
    "a tensor": torch.from_numpy,
    "strided": lambda x: np.repeat(x, 2)[::2],
    "with a gradient": lambda x: torch.from_numpy(x).requires_grad_(),
    "a parameter": lambda x: torch.nn.Parameter(torch.from_numpy(x)),
    "not aligned": lambda x: np.frombuffer(b"-" + x.tobytes(), np.uint8)[1:].copy().view(x.dtype),
}


@pytest.mark.parametrize("way", UNUSUAL)
@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_may_take_different_ways(way, odd):
    def program(comm):
        for turn in range(3):
            plain = np.arange(6, dtype=np.float32) + comm.rank + turn
            x = UNUSUAL[way](plain) if comm.rank == odd else plain
            total = comm.all_reduce(x)
            total = total[0] if isinstance(total, list) else total
            values = total.detach().numpy() if isinstance(total, torch.Tensor) else total
            assert values.tolist() == [3 * (i + turn) + 3 for i in range(6)]

    run_local(program, 3)


def test_read_only_arrays_are_gathered_and_not_reduced():
    def program(comm):
        x = np.full(3, comm.rank, np.float32)
        comm.all_gather(x)
        x.flags.writeable = False
        assert comm.all_gather(x).tolist() == [0, 0, 0, 1, 1, 1]

    run_local(program, 2)


@pytest.mark.parametrize("numel", [1, 1024, 1025])
def test_bytes_are_those_of_the_message_and_of_its_header(numel):
    def program(comm):
        for turn in range(1, 4):
            comm.all_gather(np.zeros(numel, np.float32))
            assert wire(comm, "all_gather") == {1: turn * 4 * numel}
            assert wire(comm, "guard") == {1: turn * 16}
            assert comm.traffic.snapshot()["all_gather", 1].calls == turn
            assert comm.traffic.snapshot()["all_gather", 1].logical_nbytes == turn * 4 * numel
        comm.traffic.reset()
        assert comm.traffic.snapshot() == {}
        comm.all_gather(np.zeros(numel, np.float32))
        assert wire(comm, "all_gather") == {1: 4 * numel}

    run_local(program, 2, "2x1")


def test_waiting_is_on_the_clock():
    def program(comm):
        comm.clock.reset()
        for _ in range(3):
            comm.all_reduce(np.zeros(2))
        assert comm.clock.snapshot()["comm"] > 0

    on("2", program)


def test_the_number_of_calls_stays_what_stochastic_rounding_counts():
    """A call that is ready counts as any other: what is drawn later does not depend on it."""

    def program(comm):
        drawn_after = []
        for _ in range(2):
            for _ in range(3):
                comm.all_reduce(np.zeros(2, np.float32))
            x = np.linspace(0.0, 1.0, 300, dtype=np.float32)
            drawn_after.append(comm.all_gather(x, codec="int8:rounding=stochastic").tobytes())
        return drawn_after

    without = ready.Shelf.find
    first = run_local(program, 2, min_numel=0)
    try:
        ready.Shelf.find = lambda *_: None
        assert run_local(program, 2, min_numel=0) == first
    finally:
        ready.Shelf.find = without


def test_asynchronous_and_in_order_with_synchronous_calls():
    def program(comm):
        xs = [np.full(2, i + comm.rank, np.float32) for i in range(20)]
        comm.all_reduce(np.zeros(2, np.float32))
        works = [comm.all_reduce(x, async_op=True) for x in xs[:10]]
        for x in xs[10:]:
            comm.all_reduce(x)
        assert [x.tolist() for x in xs] == [[2 * i + 1] * 2 for i in range(20)]
        assert works[3].wait() is xs[3]

    on("2", program)


def test_a_synchronous_call_runs_in_its_own_thread_where_nothing_is_queued():
    def program(comm):
        threads = []
        begin = comm._guard.begin

        def seen(*arguments):
            threads.append(threading.get_ident())
            begin(*arguments)

        comm._guard.begin = seen
        for _ in range(50):
            comm.all_reduce(np.zeros(2), async_op=True).wait()
            comm.all_reduce(np.zeros(2))
            comm.all_gather(np.zeros(2000))
        here = threading.get_ident()
        assert [thread == here for thread in threads] == [False, True, True] * 50

    on("2", program)


def test_more_signatures_than_are_kept(monkeypatch):
    monkeypatch.setattr(ready, "MOST", 3)

    def program(comm):
        for numel in (*range(1, 9), *range(1, 9)):
            assert comm.all_reduce(np.ones(numel)).tolist() == [2] * numel

    on("2", program)


def test_a_closed_communicator_runs_no_call_that_was_ready():
    def program(comm):
        part = comm.level(0)
        for one in (part, comm):
            one.all_reduce(np.zeros(2))
        comm.close()
        for one in (part, comm):
            with pytest.raises(Exception, match="closed"):
                one.all_reduce(np.zeros(2))

    on("2", program)


@pytest.mark.parametrize("op", ["sum", "avg", "min", "product"])
def test_special_values(op):
    values = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, 3e38, 1.0]
    pairs = np.array(np.meshgrid(values, values), np.float32).reshape(2, -1)

    def program(comm):
        results = []
        for _ in range(2):
            x = pairs[comm.rank].copy()
            comm.all_reduce(x, op=op)
            results.append(x.view(np.uint32).tolist())
        padded = np.concatenate([pairs[comm.rank], np.zeros(2000, np.float32)])
        comm.all_reduce(padded, op=op)
        assert results == [padded[: pairs.shape[1]].view(np.uint32).tolist()] * 2

    on("2", program)


def test_a_list_of_one_array_into_a_list_of_one():
    def program(comm):
        outs = [np.zeros(6, np.float32)]
        for _ in range(2):
            comm.all_gather([np.full(3, comm.rank, np.float32)], outs)
        return outs[0]

    for out in run_local(program, 2):
        assert np.array_equal(out, [0, 0, 0, 1, 1, 1])
