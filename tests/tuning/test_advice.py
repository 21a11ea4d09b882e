"""What would be faster: on machines whose constants say it."""

import torch

from topology import from_shape
from topology.cost import Link, Machine, Speed
from zcomm.advice import about_codecs, about_cores
from zcomm.planner import Planner
from zcomm.tuning import Tuning, assume

WORLD = from_shape((2, 2))
FAST, SLOW = Speed(1e12, 1e12), Speed(1e7, 1e7)


def said(speed, bandwidth):
    speeds = {"none": FAST, "sum": FAST, "int8": speed, "int4": speed}
    links = (Link(1e-9, 1e12), Link(1e-9, bandwidth))
    known = Tuning(WORLD, "mpi", Machine(links, speeds, call=1e-9, piece=1e-9), source="here")
    return list(about_codecs(Planner("test", 0, known), WORLD))


def test_codecs_are_named_where_the_network_is_slow():
    gather, scatter = said(FAST, 1e8)
    assert (gather.about, scatter.about) == ("all_gather", "reduce_scatter")
    for one in (gather, scatter):
        # 16 MiB at 1e8 bytes/s; int8 sends 1 + 2/256 bytes for 2, int4 0.5 + 2/128.
        assert one.found == "64 MiB take 168 ms, most of it on the network"
        assert "int8 84.5 ms (2.0 times as fast), int4 43.3 ms (3.9 times as fast)" in one.better


def test_slow_codecs_are_not():
    for one in said(SLOW, 1e8):
        assert one.found.endswith("on the network; no codec is faster")
        assert one.better == ""


def test_assumed_constants_are_called_so_and_name_large_gains_only():
    planner = Planner("test", 0, assume(WORLD, "mpi"))
    for one in about_codecs(planner, WORLD):
        assert "64 MiB take 282 ms (assumed), most of it on the network" in one.found
        assert "int4 73" in one.better
    alone = from_shape((2, 1))
    for one in about_codecs(Planner("test", 0, assume(alone, "mpi")), alone):
        assert one.found.endswith("; measure, whether a codec is faster")
        assert one.better == ""


def test_more_ranks_or_threads_than_cores(monkeypatch):
    everywhere = {0, 1, 2, 3}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert list(about_cores([everywhere] * 2)) == []
    (crowded,) = about_cores([everywhere] * 8)
    assert crowded.found == "8 ranks of this host share 4"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    (threads,) = about_cores([everywhere] * 2)
    assert threads.found == "2 ranks of 4 threads share 4"
    assert threads.better == "OMP_NUM_THREADS=2"


def test_ranks_that_are_bound_to_cores(monkeypatch):
    """As Open MPI binds them: each has one core, and all of them have four."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert list(about_cores([{0}, {1}, {2}, {3}])) == []
    (crowded,) = about_cores([{0}, {1}, {0}, {1}])
    assert crowded.found == "4 ranks of this host share 2"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    (threads,) = about_cores([{0}, {1, 2, 3}])
    assert threads.better == "OMP_NUM_THREADS=1"
