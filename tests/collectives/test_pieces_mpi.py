"""Pieces over MPI, and in memory that its ranks share: same bits, whoever is slow."""

import time

import numpy as np
import pytest

import zcomm
from tests.collectives import oracle
from tests.collectives.dtypes import as_array, assert_bits, drawn
from tests.collectives.nodes import cut_small, slow, uncut
from tests.collectives.test_pieces import NUMEL, assert_same, operations

SPECS = ["auto", "flat", "nodes"]


def spec_of(name, size):
    return {"auto": "auto", "flat": f"1x{size}", "nodes": "2x2" if size == 4 else f"{size}x1"}[name]


@pytest.fixture(scope="module", params=SPECS)
def comm(request):
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    with zcomm.init(topology=spec_of(request.param, size), min_numel=0, abort=False) as made:
        yield made


def whole(comm, monkeypatch, codec):
    """Return the results of fresh plans of one piece, on the level of all ranks."""
    with monkeypatch.context() as patch:
        uncut(patch)
        return operations(fresh(comm), codec)


def fresh(comm):
    """Return a communicator of all ranks that has no plans yet."""
    return comm.split(0, comm.rank)


@pytest.mark.mpi
@pytest.mark.parametrize("codec", [None, "int8", "int4"])
def test_q15_pieces_change_no_bit(comm, monkeypatch, codec):
    expected = whole(comm, monkeypatch, codec)
    cut_small(monkeypatch)
    pieced = fresh(comm)
    for _ in range(3):
        assert_same([operations(pieced, codec)], [expected])


@pytest.mark.mpi
def test_exact_results_are_those_of_the_oracle(comm, monkeypatch):
    cut_small(monkeypatch)
    pieced, size, me = fresh(comm), comm.size, comm.rank
    fulls = [drawn((size * NUMEL,), "float32", 8, rank) for rank in range(size)]
    total = oracle.reduced(fulls, "float32", comm.topology)
    mine = as_array(fulls[me], "float32", "numpy")
    part = slice(me * NUMEL, (me + 1) * NUMEL)
    assert_bits(pieced.reduce_scatter(mine), total[part], "float32")
    gathered = pieced.all_gather(mine[:NUMEL])
    assert_bits(gathered, np.concatenate([full[:NUMEL] for full in fulls]), "float32")
    assert_bits(pieced.all_reduce(mine.copy()), total, "float32")


@pytest.mark.mpi
def test_s3_a_slow_rank(comm, monkeypatch):
    expected = whole(comm, monkeypatch, "int4")
    cut_small(monkeypatch)
    for rank in {0, comm.size - 1}:
        with slow(monkeypatch, rank, 0.001):
            assert_same([operations(fresh(comm), "int4")], [expected])


@pytest.mark.mpi
def test_s3_asynchronous_back_to_back(comm, monkeypatch):
    cut_small(monkeypatch)
    pieced, works = fresh(comm), []
    for call in range(8):
        shard = as_array(drawn((NUMEL,), "float32", call, comm.rank), "float32", "numpy")
        works.append(pieced.all_gather(shard, async_op=True))
        del shard
    for call, work in enumerate(works):
        shards = [drawn((NUMEL,), "float32", call, rank) for rank in range(comm.size)]
        assert_bits(work.wait(), np.concatenate(shards), "float32")


@pytest.mark.mpi
def test_many_communicators_use_the_same_windows(comm, monkeypatch):
    """Their operations are cut into different numbers of slots."""
    cut_small(monkeypatch)
    groups = [fresh(comm), comm.level(0), comm.split(comm.rank % 2, -comm.rank)]
    for call in range(4):
        for group in groups:
            ranks = group.all_gather_values(np.array([comm.rank])).ravel()
            shard = as_array(drawn((NUMEL,), "float32", call, comm.rank), "float32", "numpy")
            shards = [drawn((NUMEL,), "float32", call, int(rank)) for rank in ranks]
            assert_bits(group.all_gather(shard), np.concatenate(shards), "float32")


@pytest.mark.mpi
@pytest.mark.parametrize("name", SPECS)
def test_t1_messages_above_the_limit(monkeypatch, name):
    from mpi4py import MPI

    monkeypatch.setenv("ZCOMM_MESSAGE_LIMIT", "1000")
    cut_small(monkeypatch)
    spec = spec_of(name, MPI.COMM_WORLD.size)
    with zcomm.init(topology=spec, min_numel=0, abort=False) as made:
        shard = as_array(drawn((NUMEL,), "float32", 3, made.rank), "float32", "numpy")
        shards = [drawn((NUMEL,), "float32", 3, rank) for rank in range(made.size)]
        assert_bits(made.all_gather(shard), np.concatenate(shards), "float32")


@pytest.mark.parametrize("way", ["raise", "kill"])
def test_a_rank_that_dies_in_the_middle_ends_the_job(launch, way):
    start = time.monotonic()
    ended = launch("tests/collectives/programs/dies.py", way, num_ranks=4)
    assert ended.returncode != 0
    assert "finished" not in ended.stdout
    assert time.monotonic() - start < 60
    if way == "raise":
        assert "in the middle" in ended.stdout + ended.stderr


def test_an_absent_rank_is_named(launch):
    ended = launch(
        "tests/collectives/programs/dies.py",
        "stop",
        num_ranks=4,
        env={"ZCOMM_TIMEOUT": "1"},
    )
    assert ended.returncode != 0
    assert "waited 1 s in reduce_scatter for rank 1" in ended.stdout + ended.stderr


@pytest.mark.mpi(min_size=2)
def test_after_a_mismatch_the_ranks_go_on(comm, monkeypatch):
    """Receives that were posted for the operation that did not happen take nothing of the next."""
    cut_small(monkeypatch)
    pieced = fresh(comm)
    for _ in range(3):
        last = comm.rank == comm.size - 1
        numel, call = (comm.size, pieced.reduce_scatter) if last else (1, pieced.all_gather)
        with pytest.raises(zcomm.CollectiveMismatch):
            call(np.ones(numel * NUMEL, np.float32))
        gathered = pieced.all_gather(np.full(NUMEL, comm.rank, np.float32))
        assert (gathered.reshape(comm.size, -1) == np.arange(comm.size)[:, None]).all()
        assert (pieced.reduce_scatter(np.ones(comm.size * NUMEL, np.float32)) == comm.size).all()
