"""Arrays that the ranks of a node read where they lie: same bits and counts as with messages."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.collectives import oracle
from tests.collectives.dtypes import EVERY, as_array, assert_bits, drawn, store, stored_in, widen
from tests.collectives.nodes import own_process, share_memory, use_small
from tests.collectives.worlds import WORLDS, caught, on
from zcomm import CollectiveTimeout, PeerLost, ZcommError
from zcomm.collectives import inside, node
from zcomm.layout import Layout, Segment
from zcomm.transports.remote import RemoteMemory

NUMEL = 4096 * 3 + 77
SPECS = ("2", "1x4", "2x2", "3+5", "uneven 3 levels")


@pytest.fixture
def reads(monkeypatch):
    return use_small(monkeypatch, node)


def on_one_machine(monkeypatch, world, program, remote=own_process):
    """Run a program on ranks that all share memory, whatever the topology says."""
    topology = WORLDS[world]
    share_memory(monkeypatch, topology, len(topology.levels) - 1, remote)
    return on(world, program)


def kind_of(dtype):
    return "torch" if dtype == "bfloat16" else "numpy"


@pytest.mark.parametrize("dtype", EVERY)
def test_every_dtype_and_reduction(monkeypatch, reads, dtype):
    def program(comm):
        fulls = [drawn((4 * NUMEL,), dtype, 1, rank) for rank in range(4)]
        mine = as_array(fulls[comm.rank], dtype, kind_of(dtype))
        part = slice(comm.rank * NUMEL, (comm.rank + 1) * NUMEL)
        gathered = np.concatenate([full[:NUMEL] for full in fulls])
        assert_bits(comm.all_gather(mine[:NUMEL]), gathered, dtype)
        for op in oracle.possible_ops(dtype):
            total = oracle.reduced(fulls, dtype, comm.topology, op)
            assert_bits(comm.reduce_scatter(mine, op=op), total[part], dtype)
            x = as_array(fulls[comm.rank], dtype, kind_of(dtype))
            assert comm.all_reduce(x, op=op) is x
            assert_bits(x, total, dtype)

    on_one_machine(monkeypatch, "1x4", program)
    done = reads.take()
    assert all(read for _, read in done)
    assert len(done) == 4 * (1 + 2 * len(oracle.possible_ops(dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("world", SPECS)
def test_sums_nest_as_the_levels_do(monkeypatch, reads, world, dtype):
    size = WORLDS[world].size

    def program(comm):
        fulls = [drawn((size * NUMEL,), dtype, 2, rank) for rank in range(size)]
        mine = as_array(fulls[comm.rank], dtype, kind_of(dtype))
        part = slice(comm.rank * NUMEL, (comm.rank + 1) * NUMEL)
        for algorithm in ("flat", "ordered"):
            nesting = oracle.nesting(comm.topology, algorithm)
            total = oracle.reduced(fulls, dtype, nesting, "avg")
            found = comm.reduce_scatter(mine, op="avg", algorithm=algorithm)
            assert_bits(found, total[part], dtype)
            x = as_array(fulls[comm.rank], dtype, kind_of(dtype))
            assert_bits(comm.all_reduce(x, op="avg", algorithm=algorithm), total, dtype)

    on_one_machine(monkeypatch, world, program)
    done = reads.take()
    assert len(done) == 4 * size
    assert all(read for _, read in done)


def test_hops_of_several_levels_use_messages(monkeypatch, reads):
    def program(comm):
        x = np.full(NUMEL, comm.rank + 1, np.float32)
        assert (comm.all_reduce(x, algorithm="hierarchical") == 10).all()

    on_one_machine(monkeypatch, "2x2", program)
    assert reads.take() == 4 * [("all_reduce", False)]


def test_codecs_use_messages(monkeypatch, reads):
    share_memory(monkeypatch, WORLDS["1x4"], 1, own_process)
    on("1x4", lambda c: c.all_gather(np.ones(NUMEL, np.float32), codec="int8"), min_numel=0)
    assert reads.take() == 4 * [("all_gather", False)]


@pytest.mark.parametrize("numel", [0, 1, 3, 4095, 4097, 5001, 100_003])
def test_sizes(monkeypatch, numel):
    uses = use_small(monkeypatch, node, nbytes=0)

    def program(comm):
        fulls = [drawn((3 * numel,), "float32", 3, rank) for rank in range(3)]
        mine = fulls[comm.rank].copy()
        total = oracle.reduced(fulls, "float32", comm.topology)
        gathered = np.concatenate([full[:numel] for full in fulls])
        assert_bits(comm.all_gather(mine[:numel]), gathered, "float32")
        part = slice(comm.rank * numel, (comm.rank + 1) * numel)
        assert_bits(comm.reduce_scatter(mine), total[part], "float32")
        assert_bits(comm.all_reduce(mine), total, "float32")

    on_one_machine(monkeypatch, "1+2 round-robin", program)
    done = uses.take()
    assert numel < 3000 or done.count(("all_reduce", True)) == 3  # smaller ones are gathered whole
    assert ("reduce_scatter", False) not in done


@pytest.mark.parametrize("wide", [False, True])
def test_inputs_and_outputs_of_any_form(monkeypatch, reads, wide):
    """Strided inputs and outputs, a list of several dtypes, and outputs wider than what travels."""
    out_dtype = "float32" if wide else "bfloat16"

    def program(comm):
        stored = [drawn((4, 2 * NUMEL), "bfloat16", 4, rank) for rank in range(4)]
        fulls = [np.ascontiguousarray(one[:, ::2]) for one in stored]
        mine = as_array(stored[comm.rank], "bfloat16", "torch")[:, ::2]
        total = oracle.reduced(fulls, "bfloat16", comm.topology, out_dtype=out_dtype)
        out = torch.empty((2, NUMEL), dtype=getattr(torch, out_dtype))[::2]
        comm.reduce_scatter(mine, out)
        assert_bits(out, total[comm.rank : comm.rank + 1], out_dtype)
        gathered = store(widen(np.concatenate(fulls), "bfloat16"), out_dtype)
        place = torch.empty((16, 2 * NUMEL), dtype=getattr(torch, out_dtype))[:, ::2]
        comm.all_gather(mine, place)
        assert_bits(place, gathered, out_dtype)
        number = np.array([comm.rank + 0.5])
        several = comm.all_gather([mine, number, mine[:0]])
        assert_bits(several[0], np.concatenate(fulls), "bfloat16")
        assert several[1].tolist() == [0.5, 1.5, 2.5, 3.5]
        assert several[2].shape == (0, NUMEL)
        comm.all_reduce(mine)
        assert_bits(mine, oracle.reduced(fulls, "bfloat16", comm.topology), "bfloat16")

    on_one_machine(monkeypatch, "1x4", program)
    done = reads.take()
    assert len(done) == 4 * 4
    assert all(read for _, read in done)


def uneven_layout(dtype, seed, size, extent=60_000):
    """Return a layout whose segments are of any length and belong to anybody; one rank has none."""
    rng = np.random.default_rng(seed)
    bounds = np.sort(rng.choice(extent, 40, replace=False))
    owners = rng.integers(0, size - 1, len(bounds) - 1)
    shards = [[] for _ in range(size)]
    for owner, start, stop in zip(owners, bounds[:-1], bounds[1:], strict=True):
        shards[owner].append(Segment(int(start), int(stop - start)))
    for shard in shards:
        rng.shuffle(shard)
    return Layout(dtype, tuple(map(tuple, shards)))


@pytest.mark.parametrize("wide", [False, True])
def test_uneven_layouts(monkeypatch, reads, wide):
    """Shards of scattered segments, empty ones, several dtypes; arrays wider than what travels."""
    size = 4
    dtypes = ("bfloat16", "float32", "int32")
    layouts = [uneven_layout(dtype, seed, size) for seed, dtype in enumerate(dtypes)]

    def program(comm):
        held = ["float32" if wide and dtype == "bfloat16" else dtype for dtype in dtypes]
        drawn_fulls = [
            [drawn((layout.extent + 5,), layout.dtype, 9, rank) for rank in range(size)]
            for layout in layouts
        ]
        totals = [
            oracle.reduced(fulls, layout.dtype, comm.topology, out_dtype=out)
            for fulls, layout, out in zip(drawn_fulls, layouts, held, strict=True)
        ]
        mine = [
            as_array(store(widen(fulls[comm.rank], dtype), out), out, "torch")
            for fulls, dtype, out in zip(drawn_fulls, dtypes, held, strict=True)
        ]
        shards = [
            torch.zeros(layout.shard_numel(comm.rank) + 3, dtype=array.dtype)
            for layout, array in zip(layouts, mine, strict=True)
        ]
        comm.reduce_layout(mine, shards, layouts, op="sum")
        for shard, layout, total, out in zip(shards, layouts, totals, held, strict=True):
            segments = layout.shards[comm.rank]
            parts = [total[s.start : s.start + s.numel] for s in segments]
            expected = np.concatenate([total[:0], *parts, np.zeros(3, total.dtype)])
            assert_bits(shard, expected, out)
        rounded = [
            as_array(store(widen(*stored_in(shard)), layout.dtype), layout.dtype, "torch")
            for shard, layout in zip(shards, layouts, strict=True)
        ]
        places = [torch.zeros_like(array) for array in mine]
        comm.gather_layout(rounded, places, layouts)
        for place, layout, total, dtype, out in zip(
            places, layouts, totals, dtypes, held, strict=True
        ):
            expected = np.zeros_like(total)
            for shard in layout.shards:
                for s in shard:
                    values = widen(total[s.start : s.start + s.numel], out)
                    expected[s.start : s.start + s.numel] = store(
                        widen(store(values, dtype), dtype), out
                    )
            assert_bits(place, expected, out)

    on_one_machine(monkeypatch, "1x4", program)
    assert sorted(reads.take()) == 4 * [("all_gather", True)] + 4 * [("reduce_scatter", True)]


def test_one_rank_whose_arrays_are_not_worth_it(monkeypatch, reads):
    """Then all gather through windows, and the next operation finds these free."""

    class Picky(RemoteMemory):
        def worthwhile(self, *memories):
            return len(memories) > 1

    def remote(group, rank):
        pids = dict.fromkeys(group, os.getpid())
        return Picky(pids) if rank == 2 else RemoteMemory(pids, always=True)

    def program(comm):
        for _ in range(3):
            x = np.full(NUMEL, comm.rank, np.float32)
            assert comm.all_gather(x).reshape(4, -1)[:, -1].tolist() == [0, 1, 2, 3]
            assert (comm.all_reduce(x) == 6).all()
            assert (comm.all_gather([x, x])[1] == 6).all()

    on_one_machine(monkeypatch, "1x4", program, remote=remote)
    done = reads.take()
    assert done.count(("all_gather", False)) == done.count(("all_gather", True)) == 12
    assert done.count(("all_reduce", True)) == 12


def test_bytes_count_like_messages(monkeypatch):
    def program(comm):
        x = np.ones((4, NUMEL), np.float32)
        comm.all_reduce(x)
        comm.reduce_scatter(x)
        comm.all_gather(x[0])
        return comm.traffic.snapshot()

    expected = on("1x4", program)
    uses = use_small(monkeypatch, node)
    assert on_one_machine(monkeypatch, "1x4", program) == expected
    assert all(read for _, read in uses.take())


@pytest.mark.parametrize("reader", [0, 3])
def test_nobody_leaves_before_all_have_read(monkeypatch, reads, reader):
    """Every rank overwrites its arrays as soon as a call returns; one reads slowly."""

    class Slow(RemoteMemory):
        def read(self, *arguments):
            time.sleep(0.005)
            super().read(*arguments)

    def remote(group, rank):
        pids = dict.fromkeys(group, os.getpid())
        return (Slow if rank == reader else RemoteMemory)(pids, always=True)

    def program(comm):
        for call in range(3):
            x = np.full(4 * NUMEL, call + comm.rank, np.float32)
            gathered = comm.all_gather(x)
            x[:] = -1
            expected = [call, call + 1, call + 2, call + 3]
            assert (gathered.reshape(4, -1) == np.array(expected)[:, None]).all()
            x[:] = call + comm.rank
            part = comm.reduce_scatter(x)
            x[:] = -1
            assert (part == sum(expected)).all()
            x[:] = call + comm.rank
            total = comm.all_reduce(x).copy()
            x[:] = -1
            assert (total == sum(expected)).all()

    on_one_machine(monkeypatch, "1x4", program, remote=remote)
    assert all(read for _, read in reads.take())


def test_asynchronous_and_in_parts(monkeypatch, reads):
    def program(comm):
        half = comm.split(comm.rank % 2, comm.rank)
        works = []
        for call in range(4):
            works.append(comm.all_gather(np.full(NUMEL, comm.rank + call), async_op=True))
            works.append(half.all_reduce(np.full(NUMEL, comm.rank + call), async_op=True))
        for call in range(4):
            gathered, reduced = works[2 * call].wait(), works[2 * call + 1].wait()
            assert gathered.reshape(4, -1)[:, 0].tolist() == [call, call + 1, call + 2, call + 3]
            assert (reduced == 2 * (comm.rank % 2 + call) + 2).all()

    on_one_machine(monkeypatch, "1x4", program)
    assert all(read for _, read in reads.take())


@pytest.mark.slow
def test_a_late_rank_is_named(monkeypatch, reads):
    monkeypatch.setenv("ZCOMM_TIMEOUT", "1")

    class Stuck(RemoteMemory):
        def read(self, *arguments):
            time.sleep(3)
            super().read(*arguments)

    def remote(group, rank):
        pids = dict.fromkeys(group, os.getpid())
        return (Stuck if rank == 2 else RemoteMemory)(pids, always=True)

    program = caught(lambda comm: comm.all_gather(np.ones(NUMEL, np.float32)))
    errors = on_one_machine(monkeypatch, "1x4", program, remote=remote)
    assert isinstance(errors[0], CollectiveTimeout)
    assert "rank 0 waited 1 s in all_gather for rank 2" in str(errors[0])


def runs(*pairs):
    starts, lengths = zip(*pairs, strict=True)
    return np.array(starts, np.int64), np.array(lengths, np.int64)


def test_runs_of_another_process():
    """A child's memory, in runs that fit no other: as many as several calls of the system take."""
    program = (
        "import numpy as np, sys; x = np.arange(1 << 20, dtype=np.uint32);"
        "print(x.ctypes.data, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    address = int(child.stdout.readline())
    source = runs(*((address + 4 * k, 4 * (k % 5)) for k in range(3000)))
    numel = int(source[1].sum())
    place = runs(*((numel - k - 1, 1) for k in range(numel)))
    found = np.zeros(numel, np.uint8)
    remote = RemoteMemory({7: child.pid})
    remote.read(7, source, found, place)
    words = [np.arange(k, k + k % 5, dtype=np.uint32) for k in range(3000)]
    assert (found[::-1] == np.concatenate(words).view(np.uint8)).all()
    with pytest.raises(ZcommError, match=r"rank 7 \(process \d+\): Bad address"):
        remote.read(7, runs((4096, 64)), found, runs((0, 64)))
    child.communicate("")
    with pytest.raises(PeerLost, match=r"rank 7 \(process \d+\) has ended"):
        remote.read(7, runs((address, 64)), found, runs((0, 64)))


@pytest.mark.parametrize(
    ("lengths", "place"),
    [((10,), ((0, 9),)), ((-1,), ((0, -1),)), ((10,), ((55, 10),)), ((10,), ((-1, 10),))],
)
def test_runs_that_do_not_fit_are_refused(lengths, place):
    out = np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        RemoteMemory({0: os.getpid()}).read(
            0, (np.array([out.ctypes.data]), np.array(lengths)), out, runs(*place)
        )


def test_blocks_cover_a_shard_once():
    layout = uneven_layout("float32", 3, 4)
    for rank in range(4):
        found = inside.blocks(layout, rank, 4000)
        assert all(block.numel == 1000 for block in found[:-1])
        full = [np.arange(s.start, s.start + s.numel) for s in layout.shards[rank]]
        cut = [np.arange(a, a + n) for b in found for a, n in zip(*b.table, strict=True)]
        assert np.concatenate([[], *cut]).tolist() == np.concatenate([[], *full]).tolist()
        firsts = [int(block.run[0][0]) for block in found]
        assert firsts == list(range(0, 1000 * len(found), 1000))
