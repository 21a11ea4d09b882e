"""After an operation that ended in its middle: every later call says so, and none gives values."""

import threading
import time

import numpy as np
import pytest

from tests.collectives.nodes import cut_small, own_process, share_memory, use_small
from tests.collectives.worlds import WORLDS, on
from zcomm import CollectiveMismatch, CollectiveTimeout, ZcommError
from zcomm.collectives import node
from zcomm.collectives.courier import Posted
from zcomm.transports.remote import RemoteMemory

NUMEL = 4096 * 8
MIDDLE = "no communicator of this job can be used: an operation ended in its middle"
ENDS = {"error": ArithmeticError, "interrupt": KeyboardInterrupt}


def fail_once(monkeypatch, kind, name, end):
    """Let rank 1 fail once, at its third message or read."""
    real, calls = getattr(kind, name), []

    def failing(self, *arguments):
        if getattr(self, "_channel", self).rank == 1:
            calls.append(arguments)
            if len(calls) == 3:
                raise end("in the middle")
        return real(self, *arguments)

    monkeypatch.setattr(kind, name, failing)


@pytest.fixture(params=["messages", "windows", "in place"])
def world(request, monkeypatch):
    """A world in which rank 1 fails once in the middle of an operation."""
    monkeypatch.setenv("ZCOMM_TIMEOUT", "1")
    cut_small(monkeypatch)
    if request.param != "messages":
        read = request.param == "in place"
        share_memory(monkeypatch, WORLDS["1x4"], remote=reading_as if read else None)
        if read:
            use_small(monkeypatch, node)
    return request.param


def reading_as(group, rank):
    memory = own_process(group, rank)
    memory.rank = rank
    return memory


@pytest.mark.parametrize("end", ENDS)
def test_later_calls_of_all_communicators_say_so(world, end, monkeypatch):
    in_place = world == "in place"
    kind, name = (RemoteMemory, "read") if in_place else (Posted, "send")
    fail_once(monkeypatch, kind, name, ENDS[end])
    said = {}
    given_up = threading.Barrier(4)

    def program(comm):
        half = comm.split(comm.rank % 2, 0)
        x = np.ones(comm.size * NUMEL, np.float32)
        with pytest.raises((ENDS[end], CollectiveTimeout)) as first:
            comm.reduce_scatter(x)
        given_up.wait(30)
        calls = (
            lambda: comm.reduce_scatter(x),
            lambda: half.all_reduce(x),
            lambda: comm.all_reduce(np.ones(2), async_op=True).wait(),
            comm.barrier,
            lambda: comm.broadcast(np.ones(2)),
            lambda: comm.recv(np.ones(2), (comm.rank + 1) % comm.size),
        )
        for call in calls:
            with pytest.raises(ZcommError, match=MIDDLE) as later:
                call()
            assert type(first.value).__name__ in str(later.value)
        assert comm.enqueue(lambda: None).wait() is None
        said[comm.rank] = str(first.value)

    on("2x2" if world == "messages" else "1x4", program)
    assert len(said) == 4
    assert said[1] == "in the middle"


def test_what_is_queued_behind_it_does_not_run(monkeypatch):
    monkeypatch.setenv("ZCOMM_TIMEOUT", "1")
    cut_small(monkeypatch)
    fail_once(monkeypatch, Posted, "send", ArithmeticError)

    def program(comm):
        x = np.full(2 * NUMEL, comm.rank, np.float32)
        works = [comm.reduce_scatter(x, async_op=True) for _ in range(3)]
        with pytest.raises((ArithmeticError, CollectiveTimeout)):
            works[0].wait()
        for work in works[1:]:
            with pytest.raises(ZcommError, match=MIDDLE):
                work.wait()

    on("2", program)


def test_a_handshake_that_ran_out_of_time_before_data(monkeypatch):
    """The late rank passes the handshake, and would wait for data that is never sent."""
    monkeypatch.setenv("ZCOMM_TIMEOUT", "1")
    x = np.ones(2 * NUMEL, np.float32)
    given_up = threading.Barrier(2)

    def program(comm):
        if comm.rank == 1:
            time.sleep(2)
        with pytest.raises(CollectiveTimeout) as late:
            comm.reduce_scatter(x)
        given_up.wait(30)
        assert not late.value.resumable
        with pytest.raises(ZcommError, match=MIDDLE):
            comm.barrier()

    on("2", program)


def test_small_calls_and_mismatches_end_as_a_whole(monkeypatch):
    monkeypatch.setenv("ZCOMM_TIMEOUT", "1")

    def program(comm):
        comm.barrier()
        if comm.rank == 1:
            time.sleep(2)
            assert comm.all_reduce(np.ones(2))[0] == 2
        else:
            with pytest.raises(CollectiveTimeout) as late:
                comm.all_reduce(np.ones(2))
            assert late.value.resumable
        comm.barrier()
        with pytest.raises(CollectiveMismatch):
            comm.reduce_scatter(np.ones(NUMEL * (2 + 2 * comm.rank), np.float32))
        assert (comm.reduce_scatter(np.ones(2 * NUMEL, np.float32)) == 2).all()

    on("2", program)
