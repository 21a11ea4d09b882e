"""A communicator over torch.distributed's gloo: the exact oracle, and the bits of other transports.

Ranks are threads with a gloo group each, but where a test says that it starts torchrun.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import zcomm
from tests.collectives import checks
from tests.torch import groups
from zcomm import CollectiveMismatch, CollectiveTimeout
from zcomm.transports import shared
from zcomm.transports.local import Hub, LocalTransport
from zcomm.transports.staged import StagedTransport

WORLDS = [(1, None, None), (2, "2x1", None), (3, None, [0, 1, 0]), (4, "2x2", [0, 0, 1, 1])]


@pytest.mark.parametrize(("size", "topology", "hosts"), WORLDS)
def test_exact_collectives(size, topology, hosts):
    def program(comm):
        for kind, dtype in (("torch", "bfloat16"), ("numpy", "float32")):
            for shape in ((5,), (0,), (20_001,)):
                checks.every_algorithm(comm, checks.all_gather, kind, dtype, shape)
                checks.every_algorithm(comm, checks.reduce_scatter, kind, dtype, "avg", shape)
                checks.every_algorithm(comm, checks.all_reduce, kind, dtype, "sum", shape)
                checks.all_to_all(comm, kind, dtype, shape)
                checks.broadcast(comm, kind, dtype, shape, comm.size - 1)
                checks.send_and_recv(comm, kind, dtype, shape)
        checks.every_algorithm(comm, checks.lists, "torch")
        checks.all_gather(comm, "torch", "bfloat16", (20_001,), async_op=True)
        comm.barrier()

    groups.run(program, size, topology, hosts)


def everything(comm):
    """Return what quantised and exact operations give, in bytes."""
    shard = torch.randn(30_000, generator=torch.Generator().manual_seed(comm.rank))
    found = []
    for algorithm in ("flat", "hierarchical"):
        for codec in (None, "int8", "int4:block=64,rounding=stochastic"):
            options = {"codec": codec, "algorithm": algorithm}
            found.append(comm.all_gather(shard, **options))
            found.append(comm.reduce_scatter(shard, op="avg", **options))
            found.append(comm.all_reduce(shard.clone(), **options))
    found.append(comm.reduce_scatter(shard, codec=("int8", "int4"), algorithm="hierarchical"))
    return [one.numpy().tobytes() for one in found]


@pytest.mark.parametrize("check", ["1", "0"], ids=["handshake", "none"])
@pytest.mark.parametrize("hosts", [None, [0, 0, 0, 0], [0, 0, 1, 1]])
def test_bits_are_those_of_threads(check, hosts, monkeypatch):
    monkeypatch.setenv("ZCOMM_CHECK", check)
    expected = zcomm.run_local(everything, 4, "2x2", min_numel=0)
    assert groups.run(everything, 4, "2x2", hosts) == expected


def test_without_room_for_windows_there_are_messages(monkeypatch):
    """Also where that is so on one rank only, and no file is left."""
    before = set(shared.FOLDER.glob("zcomm-*"))
    made = iter([True, False])
    monkeypatch.setattr(shared, "available", lambda: next(made))
    hub = Hub(2)
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(
            lambda rank: shared.open_windows(StagedTransport(LocalTransport(hub, rank)), [0, 0]),
            range(2),
        )
    assert list(found) == [None, None]
    assert set(shared.FOLDER.glob("zcomm-*")) <= before


def test_messages_above_the_limit_are_sent_in_parts(monkeypatch):
    monkeypatch.setenv("ZCOMM_MESSAGE_LIMIT", "1000")
    groups.run(lambda comm: checks.all_gather(comm, "numpy", "float32", (5001,)), 2)


def test_a_difference_is_said_on_all_ranks_and_the_job_goes_on():
    def program(comm):
        with pytest.raises(CollectiveMismatch, match="all_gather"):
            comm.all_gather(np.zeros(8 + (comm.rank == 0)))
        checks.all_gather(comm, "numpy", "float32", (3,))

    groups.run(program, 3)


def test_an_absent_rank_is_named_and_may_come_late(monkeypatch):
    # Not before all are there, who may be late on a busy machine.
    ready = threading.Barrier(3, lambda: monkeypatch.setenv("ZCOMM_TIMEOUT", "1"))
    named = threading.Barrier(3)

    def program(comm):
        comm.barrier()
        ready.wait(60)
        if comm.rank == 1:
            named.wait(60)
            time.sleep(0.3)  # the others are in their next call before this one receives
            comm.all_reduce(np.ones(3, np.float32))
        else:
            # Another one may be late as well, on a busy machine.
            with pytest.raises(CollectiveTimeout, match=r"for ranks? (0, )?1"):
                comm.all_reduce(np.ones(3, np.float32))
            monkeypatch.setenv("ZCOMM_TIMEOUT", "60")
            named.wait(60)
        checks.all_reduce(comm, "numpy", "float32", "sum", (5,))

    groups.run(program, 3)


def torchrun(launch, *arguments, ranks=2, **options):
    command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks
    return launch(*command, "tests/torch/programs/join.py", *arguments, **options)


def test_torchrun_without_mpi(launch):
    run = torchrun(launch, "join")
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.split()) == ["0:1x2:3.0", "1:1x2:3.0"]
    assert run.stderr.count("started by torchrun, without MPI: ranks communicate over gloo") == 1


@pytest.mark.slow
def test_groups_of_a_group(launch):
    run = torchrun(launch, "halves", ranks=4)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.split()) == ["0:1x2:4.0", "1:1x2:6.0", "2:1x2:4.0", "3:1x2:6.0"]


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_all(launch):
    run = torchrun(launch, "fail", ranks=3)
    assert run.returncode == 1
    assert "RuntimeError: of rank 1" in run.stderr
    assert "zcomm[1]: RuntimeError on this rank: ending all 3 ranks" in run.stderr
