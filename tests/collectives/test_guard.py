"""The guard: ranks that do different things, or do not come, end in one clear error everywhere."""

import threading

import numpy as np
import pytest
import torch

import zcomm
from tests.collectives import checks
from tests.collectives.worlds import Never, on
from zcomm import CollectiveMismatch, CollectiveTimeout, OffloadError
from zcomm.layout import Layout

X = np.zeros(8, np.float32)
LARGE = np.zeros(70_001, np.float32)
UNIT = Layout.even("float32", 32, 4)


def ordinary(comm):
    comm.all_reduce(X.copy())


DIFFERENT = {
    "operation": (ordinary, lambda c: c.barrier(), ["all_reduce", "barrier"]),
    "numel": (ordinary, lambda c: c.all_reduce(np.zeros(9, np.float32)), ["8", "9"]),
    "dtype": (ordinary, lambda c: c.all_reduce(np.zeros(8)), ["float32", "float64"]),
    "op": (ordinary, lambda c: c.all_reduce(X.copy(), op="max"), ["sum", "max"]),
    "codec": (ordinary, lambda c: c.all_reduce(X.copy(), codec="int8"), ["int8"]),
    "block": (
        lambda c: c.all_gather(X, codec="int8"),
        lambda c: c.all_gather(X, codec="int8:block=64"),
        ["int8", "int8:block=64"],
    ),
    "codec of one level": (
        lambda c: c.reduce_scatter(X, codec=("int8", "int4")),
        lambda c: c.reduce_scatter(X, codec=("int4", "int8")),
        ["int8", "int4"],
    ),
    "root": (
        lambda c: c.broadcast(X.copy(), 0),
        lambda c: c.broadcast(X.copy(), 1),
        ["root=0", "root=1"],
    ),
    "algorithm": (
        lambda c: c.reduce_scatter(X, algorithm="hierarchical"),
        lambda c: c.reduce_scatter(X, algorithm="ordered"),
        ["hierarchical", "ordered"],
    ),
    "shards of unequal length": (
        lambda c: c.all_gather(X),
        lambda c: c.all_gather(X[:7]),
        ["all_gather", "32", "28"],
    ),
    "length of a list": (
        lambda c: c.all_gather([X]),
        lambda c: c.all_gather([X, X]),
        ["all_gather"],
    ),
    "order in a list": (
        lambda c: c.all_gather([X, np.zeros(4)]),
        lambda c: c.all_gather([np.zeros(4), X]),
        ["float32", "float64"],
    ),
    "reduce_dtype": (
        lambda c: c.all_reduce(torch.zeros(8, dtype=torch.bfloat16)),
        lambda c: c.all_reduce(torch.zeros(8, dtype=torch.bfloat16), reduce_dtype="float32"),
        ["float32"],
    ),
    "control values": (
        lambda c: c.all_gather_values(np.zeros(2)),
        lambda c: c.all_gather_values(np.zeros(3)),
        ["2", "3"],
    ),
    "units of one shape": (
        lambda c: c.gather_layout([X], [np.zeros(32, np.float32)], [UNIT], label="unit a"),
        lambda c: c.gather_layout([X], [np.zeros(32, np.float32)], [UNIT], label="unit b"),
        ["unit a", "unit b"],
    ),
    "small and large": (
        ordinary,
        lambda c: c.all_reduce(LARGE.copy()),
        ["float32[8]", "float32[70001]"],
    ),
    "a small shard and a large one": (
        lambda c: c.all_gather(X),
        lambda c: c.all_gather(LARGE),
        ["float32[32]", "float32[280004]"],
    ),
    "a small array of the root and a large one": (
        lambda c: c.broadcast(X.copy()),
        lambda c: c.broadcast(LARGE.copy()),
        ["float32[8]", "float32[70001]"],
    ),
    "small, and large with a codec": (
        ordinary,
        lambda c: c.all_reduce(LARGE.copy(), codec="int8"),
        ["codec=none", "codec=int8"],
    ),
    "large, with a codec and without": (
        lambda c: c.all_gather(LARGE, codec="int8"),
        lambda c: c.all_gather(LARGE),
        ["codec=none", "codec=int8"],
    ),
    "large, codes of two sizes": (
        lambda c: c.reduce_scatter(LARGE[:70000], codec="int8"),
        lambda c: c.reduce_scatter(LARGE[:70000], codec="int4"),
        ["codec=int8", "codec=int4"],
    ),
    "a small message and none": (
        lambda c: c.all_gather_values(np.zeros(512)),
        lambda c: c.barrier(),
        ["values float64[512]", "barrier"],
    ),
    "order": (
        lambda c: (ordinary(c), c.broadcast(X.copy())),
        lambda c: (c.broadcast(X.copy()), ordinary(c)),
        ["all_reduce", "broadcast"],
    ),
    "all_to_all": (lambda c: c.all_to_all(X), lambda c: c.all_to_all(X[:4]), ["8", "4"]),
}


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("odd", [0, 2])
def test_every_rank_learns_what_differs(case, odd):
    usual, other, words = DIFFERENT[case]

    def program(comm):
        with pytest.raises(CollectiveMismatch) as caught:
            (other if comm.rank == odd else usual)(comm)
        return str(caught.value)

    texts = on("2x2", program, min_numel=0)
    for text in texts:
        for word in words:
            assert word in text, text
        assert str(odd) in text
    assert len(set(texts)) == 1, "ranks were told different things"


@pytest.mark.parametrize("case", ["numel", "op", "small and large", "root", "order"])
@pytest.mark.parametrize("size", [2, 3])
def test_calls_that_were_made_before_are_compared_too(case, size):
    """And after the error, calls go on."""
    usual, other, words = DIFFERENT[case]

    def program(comm):
        for _ in range(2):
            usual(comm)
            other(comm)
            with pytest.raises(CollectiveMismatch) as caught:
                (other if comm.rank == 1 else usual)(comm)
            assert all(word in str(caught.value) for word in words)
        x = np.full(8, comm.rank + 1, np.float32)
        return comm.all_reduce(x).tolist()

    assert zcomm.run_local(program, size, min_numel=0) == [[sum(range(size + 1))] * 8] * size


def test_the_same_call_in_another_group_is_another_call():
    texts = []

    def program(comm):
        group = comm if comm.rank == 1 else comm.level(1)
        with pytest.raises(CollectiveMismatch) as caught:
            ordinary(group)
        texts.append(str(caught.value))

    with pytest.raises(CollectiveMismatch, match="leaving"):  # groups count their calls apart
        on("2x2", program)
    assert len(texts) == 4
    assert all("in world/level1.0 (call 1)" in text for text in texts)


def test_the_difference_is_found_before_anything_is_written():
    def program(comm):
        small, large = np.ones(8, np.float32), np.ones(70_001, np.float32)
        x = large if comm.rank else small
        with pytest.raises(CollectiveMismatch):
            comm.all_reduce(x)
        assert (x == 1).all()

    zcomm.run_local(program, 3)


def test_an_encoder_that_fails_leaves_the_handshake_to_the_next_call(monkeypatch):
    """Its header was sent, and is compared before that of the next call."""

    def program(comm):
        with pytest.raises(ArithmeticError):
            comm.all_gather(LARGE, codec="int8")
        return comm.all_reduce(np.ones(2)).tolist()

    def fails(*_):
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr("zcomm.communicator.all_gather", fails)
        assert zcomm.run_local(program, 2) == [[2, 2]] * 2


def test_the_difference_is_said_for_async_operations_too():
    def program(comm):
        work = comm.all_reduce(np.zeros(8 + (comm.rank == 1)), async_op=True)
        with pytest.raises(CollectiveMismatch, match=r"8.*9|9.*8"):
            work.wait()
        assert work.done()

    on("2x2", program)


def test_three_different_calls_are_all_named():
    calls = [lambda c: c.barrier(), ordinary, lambda c: c.all_gather(X)]

    def program(comm):
        with pytest.raises(CollectiveMismatch, match="barrier") as caught:
            calls[comm.rank](comm)
        for word in ("barrier", "all_reduce", "all_gather"):
            assert word in str(caught.value)

    zcomm.run_local(program, 3)


def test_a_rank_that_leaves_while_others_call():
    def program(comm):
        if comm.rank == 3:
            return
        with pytest.raises(CollectiveMismatch, match="all_reduce"):
            ordinary(comm)

    with pytest.raises(CollectiveMismatch, match=r"\b3\b"):  # the rank that left is told as well
        on("2x2", program)


@pytest.mark.parametrize("absent", [0, 2])
def test_an_absent_rank_is_named(absent, monkeypatch):
    monkeypatch.setenv("ZCOMM_TIMEOUT", "1")
    never = Never()
    waiting = threading.Barrier(3, action=never.over)

    def program(comm):
        if comm.rank == absent:
            never.wait()
            return
        try:
            ordinary(comm)
        except CollectiveTimeout as error:
            waiting.wait(30)
            raise error from None
        return

    with pytest.raises(
        CollectiveTimeout, match=rf"all_reduce.*\b{absent}\b|\b{absent}\b.*all_reduce"
    ):
        on("2x2", program)


def test_without_checks_everything_still_works(monkeypatch):
    monkeypatch.setenv("ZCOMM_CHECK", "0")

    def program(comm):
        for turn in range(3):
            x = np.full(4, comm.rank + turn, np.float32)
            assert comm.all_gather(x)[::4].tolist() == [turn, turn + 1, turn + 2, turn + 3]
            assert comm.all_reduce(x)[0] == 6 + 4 * turn
            assert comm.broadcast(np.full(4, comm.rank), 3).tolist() == [3] * 4
            assert comm.all_gather_values(np.array([comm.rank]))[:, 0].tolist() == [0, 1, 2, 3]
        checks.every_algorithm(comm, checks.all_gather, "torch", "bfloat16", (37,))
        checks.every_algorithm(comm, checks.all_reduce, "numpy", "float32", "avg", (37,))
        checks.all_to_all(comm, "numpy", "int32", (5,))
        checks.broadcast(comm, "torch", "float32", (5,), 1)
        comm.barrier()
        assert all(operation != "guard" for operation, _ in comm.traffic.snapshot())

    on("2x2", program)


def test_without_checks_a_barrier_still_holds(monkeypatch):
    monkeypatch.setenv("ZCOMM_CHECK", "0")
    arrived = []

    def program(comm):
        arrived.append(comm.rank)
        comm.barrier()
        assert len(arrived) == comm.size

    on("2x2", program)


def test_an_exception_of_one_rank_ends_the_run_with_it():
    class OwnError(Exception):
        pass

    def program(comm):
        if comm.rank == 2:
            raise OwnError("of rank 2")
        comm.barrier()

    with pytest.raises(OwnError, match="of rank 2"):
        on("2x2", program)


def test_an_exception_ends_ranks_that_wait_for_a_message():
    def program(comm):
        if comm.rank == 0:
            raise KeyError("gone")
        comm.recv(np.zeros(1), 0)

    with pytest.raises(KeyError, match="gone"):
        on("2", program)


def test_a_failure_before_the_first_operation_leaves_no_thread():
    before = threading.active_count()

    def program(comm):
        comm.all_reduce(np.zeros(3), async_op=True)
        raise RuntimeError("all of them")

    with pytest.raises(RuntimeError, match="all of them"):
        on("2x2", program)
    for thread in threading.enumerate():
        if thread.name.startswith("rank-"):
            thread.join(10)
    assert threading.active_count() <= before + 4  # workers of the streams may end later


FORKED = """
import os, sys
import numpy as np
import zcomm

def program(comm):
    comm.barrier()
    if comm.rank:
        comm.barrier()
        return
    child = os.fork()
    if child == 0:
        try:
            comm.barrier()
        except zcomm.ZcommError as error:
            print("child:", error, flush=True)
            os._exit(7)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    comm.barrier()
    print("status", os.waitstatus_to_exitcode(status), flush=True)

zcomm.run_local(program, 2)
"""


def test_a_forked_child_may_not_use_the_communicator(launch):
    ended = launch("-c", FORKED, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "status 7" in ended.stdout
    assert "fork" in ended.stdout


@pytest.mark.parametrize("use", [lambda c: c.all_reduce(X.copy()), lambda c: c.barrier()])
def test_a_rank_that_refuses(use):
    """All ranks raise its error where the others are, and may go on; a path may be of any kind."""
    path = "/scheibe/größe \n" + 900 * "盘"

    def program(comm):
        if comm.rank == 1:
            error = OffloadError("no disk", path=path, offset=4096)
            comm.refuse(error)
        else:
            with pytest.raises(OffloadError, match=r"^rank 1: no disk$") as caught:
                use(comm)
            error = caught.value
        assert (error.path, error.offset, error.resumable) == (path, 4096, True)
        assert comm.all_reduce(np.ones(1, np.float32))[0] == 3

    zcomm.run_local(program, 3)


def test_a_rank_that_is_not_ready():
    def program(comm):
        def ready():
            if comm.rank == 1:
                raise OffloadError("no disk")

        full = np.zeros(32, np.float32)
        work = comm.gather_layout([X], [full], [UNIT], ready=ready, async_op=True)
        after = comm.all_reduce(np.ones(1, np.float32), async_op=True)
        with pytest.raises(OffloadError, match="no disk"):
            work.wait()
        assert after.wait()[0] == 4
        assert not full.any()

    zcomm.run_local(program, 4)
