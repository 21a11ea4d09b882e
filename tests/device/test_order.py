"""What orders device work: events alone. Each rule is broken once, to see that it is needed."""

import time

import numpy as np
import pytest

from tests.collectives.dtypes import as_array, drawn
from tests.collectives.worlds import on
from tests.device import fake
from tests.device.fake import FakeArray, FakeDevice, FakeStream
from zcomm import device as devices
from zcomm.transports import staged

RECORDS = pytest.mark.parametrize("records", [True, False], ids=["as torch", "as CuPy"])
NUMEL = 300
LARGE = 1025  # elements of float32: too many to travel with a header


def gathered(comm):
    return np.concatenate([drawn((NUMEL,), "float32", 70, rank) for rank in range(comm.size)])


def finished(work):
    """Wait until the host has enqueued an operation, without any order on the device."""
    while not work.done():
        time.sleep(0.001)


def gather(comm, **options):
    """All-gather arrays that the caller's stream is yet to fill; return whether it was right."""
    shard = as_array(drawn((NUMEL,), "float32", 70, comm.rank), "float32", "fake")
    result = comm.all_gather(shard, **options)
    result = result.wait() if options.get("async_op") else result
    return bool((result.numpy() == gathered(comm)).all())


def both(comm):
    return gather(comm), gather(comm, async_op=True)


def test_events_order_an_operation_against_its_caller():
    assert on("2x2", both) == [(True, True)] * 4


def test_without_waiting_for_the_caller_the_input_is_not_there_yet(monkeypatch):
    """The lane starts at once: it sends what was in the memory before."""
    original = devices.Operation.__init__

    def without(self, lane, arrays):
        original(self, lane, arrays)
        self._issued = []

    monkeypatch.setattr(devices.Operation, "__init__", without)
    assert not any(any(pair) for pair in on("2x2", both))


def test_without_joining_the_result_is_not_there_yet(monkeypatch):
    monkeypatch.setattr(devices.Operation, "join", lambda self: None)
    assert not any(any(pair) for pair in on("2x2", both))


def test_the_stream_of_the_thread_that_calls_is_what_counts():
    def program(comm):
        mine = fake.mine()
        with mine.calling_on(FakeStream(mine)):
            return both(comm)

    assert on("2x2", program) == [(True, True)] * 4


def added(comm, *, arrays=True):
    """Add one to what an operation under way brings; return whether that came in its turn."""
    shard = as_array(drawn((NUMEL,), "float32", 70, comm.rank), "float32", "fake")
    out = fake.new(fake.mine(), (NUMEL * comm.size,), "float32")
    comm.all_gather(shard, out, async_op=True)
    work = comm.enqueue(
        lambda: out.task(lambda values: np.add(values, 1, out=values)), [out] if arrays else []
    )
    work.wait()
    return bool((out.numpy() == gathered(comm) + 1).all())


def test_what_is_enqueued_with_arrays_comes_in_turn_on_their_device():
    assert on("2x2", added) == [True] * 4


def test_without_the_arrays_it_is_enqueued_on_the_stream_of_its_thread():
    assert not any(on("2x2", lambda comm: added(comm, arrays=False)))


def reuse(comm, records):
    """Drop the output of an asynchronous call, and write something else to its memory."""
    mine = FakeDevice(records=records)
    fake.use(mine)
    shard = as_array(drawn((NUMEL,), "float32", 70, comm.rank), "float32", "fake")
    out = fake.new(mine, (NUMEL * comm.size,), "float32")
    at = out.block.start
    work = comm.all_gather(shard, out, codec="int8", async_op=True)
    finished(work)
    del out, work
    other = as_array(np.full(NUMEL * comm.size, 1e6, np.float32), "float32", "fake")
    reused = other.block.start == at
    other.numpy()  # the caller's stream runs ahead of the lane
    comm.all_gather(shard).numpy()
    return reused, bool((other.numpy() == 1e6).all())


@RECORDS
def test_memory_that_is_freed_after_an_asynchronous_call(records):
    assert on("2", lambda comm: reuse(comm, records), min_numel=0) == [(False, True)] * 2


@RECORDS
def test_without_record_or_reference_it_is_written_over(monkeypatch, records):
    monkeypatch.setattr(FakeDevice, "lend", lambda self, arrays, stream: [])
    assert on("2", lambda comm: reuse(comm, records), min_numel=0) == [(True, False)] * 2


def test_what_cannot_be_recorded_is_let_go_once_the_lane_is_done():
    def program(comm):
        fake.use(FakeDevice(records=False))
        start = as_array(np.ones(NUMEL, np.float32), "float32", "fake")
        at = start.block.start
        comm.all_gather(start).numpy()
        del start
        comm.barrier()
        again = [as_array(np.ones(NUMEL, np.float32), "float32", "fake")]
        comm.all_gather(again[0])  # the next operation looks which of the earlier have ended
        again.append(as_array(np.ones(NUMEL, np.float32), "float32", "fake"))
        return at in [one.block.start for one in again]

    assert on("2", program) == [True, True]


def receive_twice(comm):
    """Receive two messages before the first has been copied to the device."""
    places = [as_array(np.zeros(LARGE, np.float32), "float32", "fake") for _ in range(2)]
    if comm.rank == 0:
        places = [as_array(np.full(LARGE, i, np.float32), "float32", "fake") for i in (1, 2)]
    for place in places:
        comm.broadcast(place)
    return [place.numpy().tolist() for place in places]


def test_pinned_buffers_wait_for_the_copies_out_of_them(monkeypatch):
    right = [[1.0] * LARGE, [2.0] * LARGE]
    assert on("2", receive_twice) == [right, right]
    give = staged._Buffers.give
    monkeypatch.setattr(staged._Buffers, "give", lambda self, all_, after: give(self, all_, None))
    assert on("2", receive_twice)[1] != right


def test_the_host_waits_for_the_device_once_an_exchange():
    def program(comm):
        shard = as_array(np.ones(NUMEL, np.float32), "float32", "fake")
        shard.numpy()
        before = fake.mine().synchronized
        comm.all_gather(shard, codec="int8", algorithm="hierarchical")
        return fake.mine().synchronized - before

    assert on("2x2", program, min_numel=0) == [2] * 4


def test_many_asynchronous_operations_of_several_arrays():
    def program(comm):
        inputs = [[drawn((50 + i,), "float32", i, r) for r in range(comm.size)] for i in range(20)]
        works = []
        for one in inputs:
            x = as_array(one[comm.rank], "float32", "fake")
            works.append(comm.all_gather(x, async_op=True))
            del x
        for work, one in zip(reversed(works), reversed(inputs), strict=True):
            assert (work.wait().numpy() == np.concatenate(one)).all()

    on("2x2", program)


def test_an_operation_that_fails_leaves_the_lane_usable():
    def program(comm):
        x = as_array(np.ones(8, np.float32), "float32", "fake")
        with pytest.raises(Exception, match="different things"):
            comm.all_reduce(FakeArray(x.device, x.block, (7 + comm.rank,), "float32"))
        assert (comm.all_reduce(x).numpy() == 2).all()

    on("2", program)
