"""How long a rank sleeps where nothing moves, its caller waiting or computing meanwhile."""

import threading
import time
from types import SimpleNamespace

import pytest

from tests.collectives.worlds import WORLDS
from zcomm import hops
from zcomm.collectives import idle
from zcomm.layout import Layout
from zcomm.traffic import Clock
from zcomm.work import Stream

PLAN = hops.make("all_gather", [Layout.even("float32", 16, 4)], WORLDS["2x2"])
PATIENCE = 30


class Never:
    """A message that does not come; notes how long it was waited for."""

    def __init__(self):
        self.pauses = []

    def done(self):
        return False

    def late(self):
        return [1]

    def wait(self, seconds):
        self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch):
    """The clock that sleeps are reckoned by: it stands still until it is set."""
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(idle, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def made():
    return idle.Idle(SimpleNamespace(clock=Clock()), PLAN)


def test_sleeps_of_a_caller_that_waits_grow_until_something_moves(clock):
    one, never = made(), Never()
    for _ in range(20):
        one.rest(never)
    one.reset()
    one.rest(never)
    assert never.pauses[0] == never.pauses[-1] == idle.FIRST_SLEEP
    assert never.pauses[:-1] == sorted(never.pauses[:-1])
    assert never.pauses[-2] == idle.LONGEST_SLEEP


def test_sleeps_beside_computing_are_half_of_what_a_piece_takes(clock, monkeypatch):
    monkeypatch.setattr(idle.beside, "computing", lambda: True)
    one, never = made(), Never()
    one.rest(never)  # nothing is known yet
    clock.now += 0.004
    one.rest(never, num_ended=7)  # half a millisecond a piece
    one.rest(never, num_ended=0)
    assert never.pauses == pytest.approx(
        [idle.FIRST_SLEEP_BESIDE, 0.00025, idle.LONGEST_SLEEP_BESIDE]
    )


def test_the_worker_sleeps_longer_until_somebody_waits_for_it(clock):
    stream, never, computed = Stream(), Never(), threading.Event()

    def operation():
        one = made()
        clock.now += 1
        one.rest(never)
        computed.set()
        deadline = time.monotonic() + PATIENCE
        while idle.beside.computing() and time.monotonic() < deadline:
            time.sleep(0.001)
        one.rest(never)

    try:
        first, second = stream.submit(operation), stream.submit(lambda: None)
        assert computed.wait(PATIENCE)
        second.wait()  # a later one: what runs before it is waited for, too
        first.wait()
    finally:
        stream.stop()
    assert never.pauses == [idle.LONGEST_SLEEP_BESIDE, idle.FIRST_SLEEP]


def test_outside_a_worker_nothing_computes_beside():
    found = []
    thread = threading.Thread(target=lambda: found.append(idle.beside.computing()))
    thread.start()
    thread.join()
    assert found == [False]
    assert not idle.beside.computing()
