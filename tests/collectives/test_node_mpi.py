"""Arrays of other processes, read where they lie or through windows: same bits, and clear ends."""

import os
import time

import numpy as np
import pytest

import zcomm
from tests.collectives import oracle
from tests.collectives.dtypes import as_array, assert_bits, drawn
from tests.collectives.nodes import use_small
from zcomm.collectives import node

NUMEL = 4096 * 19 + 77
PROGRAMS = "tests/collectives/programs"


@pytest.fixture(scope="module", params=["always", "never"])
def comm(request):
    from mpi4py import MPI

    os.environ["ZCOMM_CMA"] = request.param
    try:
        made = zcomm.init(topology=f"1x{MPI.COMM_WORLD.size}", abort=False)
    finally:
        del os.environ["ZCOMM_CMA"]
    with made:
        yield made


@pytest.fixture
def uses(comm, monkeypatch):
    return use_small(monkeypatch, node)


def reads(comm):
    """Whether ranks may read each other's arrays: where the system permits it, as asked for."""
    windows = comm._channel.transport.windows
    return windows is not None and windows.remote is not None


def check(comm, ranks, kind, dtype, call):
    """Run every operation and compare with the definition; ``ranks`` are those of the world."""
    me = comm.rank
    fulls = [drawn((len(ranks) * NUMEL,), dtype, call, rank) for rank in ranks]
    total = oracle.reduced(fulls, dtype, comm.topology)
    mine = as_array(fulls[me], dtype, kind)
    gathered = comm.all_gather(mine[:NUMEL])
    part = comm.reduce_scatter(mine)
    assert comm.all_reduce(mine) is mine
    assert_bits(gathered, np.concatenate([full[:NUMEL] for full in fulls]), dtype)
    assert_bits(part, total[me * NUMEL : (me + 1) * NUMEL], dtype)
    assert_bits(mine, total, dtype)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("kind", "dtype"), [("numpy", "float32"), ("torch", "bfloat16"), ("numpy", "int64")]
)
def test_operations(comm, uses, kind, dtype):
    for call in range(3):
        check(comm, range(comm.size), kind, dtype, call)
    assert {used for _, used in uses.take()} == {reads(comm)}


@pytest.mark.mpi
def test_parts_of_a_node(comm, uses):
    half = comm.split(comm.rank % 2, -comm.rank)
    ranks = [rank for rank in reversed(range(comm.size)) if rank % 2 == comm.rank % 2]
    for call in range(3):
        check(half, ranks, "numpy", "float32", call)
        check(comm, range(comm.size), "numpy", "float32", call)


@pytest.mark.mpi
def test_arrays_are_overwritten_at_once(comm, uses):
    for call in range(20):
        x = np.full(comm.size * NUMEL, call + comm.rank, np.float32)
        work = comm.all_gather(x[:NUMEL], async_op=True)
        gathered = work.wait()
        x[:] = -1
        assert (gathered.reshape(comm.size, -1)[:, 0] == call + np.arange(comm.size)).all()
        assert (gathered.reshape(comm.size, -1) == gathered[::NUMEL][:, None]).all()


@pytest.mark.mpi(min_size=2)
def test_after_a_mismatch_the_ranks_go_on(comm, uses):
    for _ in range(3):
        last = comm.rank == comm.size - 1
        numel, call = (comm.size, comm.reduce_scatter) if last else (1, comm.all_gather)
        with pytest.raises(zcomm.CollectiveMismatch):
            call(np.ones(numel * NUMEL, np.float32))
        assert (comm.reduce_scatter(np.ones(comm.size * NUMEL, np.float32)) == comm.size).all()


@pytest.mark.parametrize("way", ["raise", "kill"])
def test_a_rank_that_dies_while_it_reads_ends_the_job(launch, way):
    start = time.monotonic()
    ended = launch(f"{PROGRAMS}/reader_dies.py", way, num_ranks=4)
    assert ended.returncode != 0
    assert "finished" not in ended.stdout
    assert time.monotonic() - start < 60
    if way == "raise":
        assert "in the middle" in ended.stdout + ended.stderr


def test_a_rank_that_stops_while_it_reads_is_named(launch):
    env = {"ZCOMM_TIMEOUT": "1"}
    ended = launch(f"{PROGRAMS}/reader_dies.py", "stop", num_ranks=4, env=env)
    assert ended.returncode != 0
    assert "waited 1 s in reduce_scatter for rank 1" in ended.stdout + ended.stderr


def test_without_permission_windows_are_used(launch):
    ended = launch(f"{PROGRAMS}/not_dumpable.py", num_ranks=3, env={"ZCOMM_LOG": "debug"})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("does not read") == 3
    assert ended.stderr.count("cannot read rank 1: Operation not permitted") == 1
