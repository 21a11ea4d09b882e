"""The clusters that the tests play, and how a test runs on all ranks of one."""

import functools
import threading

import numpy as np

import zcomm
from topology import Level, Topology, parse

SPECS = ("1x1", "2", "4x1", "1x4", "2x2", "3x2", "2x3", "2x2x2")


def two_levels(*nodes):
    everyone = tuple(sorted(rank for node in nodes for rank in node))
    return Topology((Level("node", nodes), Level("network", (everyone,))))


WORLDS = {spec: parse(spec, int(np.prod([int(n) for n in spec.split("x")]))) for spec in SPECS}
WORLDS["round-robin"] = two_levels((0, 2, 4), (1, 3, 5))
WORLDS["permuted"] = two_levels((3, 0), (2, 1))
WORLDS["3+5"] = two_levels((0, 1, 2), (3, 4, 5, 6, 7))
WORLDS["1+2 round-robin"] = two_levels((0, 2), (1,))
WORLDS["uneven 3 levels"] = Topology(
    (
        Level("switch", ((0, 3), (1,), (2, 5, 6), (4,))),
        Level("node", ((0, 1, 3), (2, 4, 5, 6))),
        Level("network", (tuple(range(7)),)),
    )
)
UNIFORM = tuple(name for name, world in WORLDS.items() if world.uniform)
SEVERAL = tuple(name for name in WORLDS if name != "1x1")
# Where flat and hierarchical differ.
LAYERED = tuple(name for name in UNIFORM if sum(extent > 1 for extent in WORLDS[name].shape) > 1)


def on(world, function, **options):
    """Run ``function(comm)`` on all ranks of a world (a name or a topology); results by rank."""
    topology = WORLDS[world] if isinstance(world, str) else world
    return zcomm.run_local(function, topology.size, topology, **options)


def algorithms(topology):
    """Return the algorithms that a topology allows."""
    return ("auto", "flat", "hierarchical") if topology.uniform else ("auto", "flat")


def used(topology, algorithm):
    """Tell whether an algorithm runs hop by hop here ("auto" does where it matters)."""
    layered = topology.uniform and sum(extent > 1 for extent in topology.shape) > 1
    return algorithm == "hierarchical" or (algorithm == "auto" and layered)


def wire(comm, operation):
    """Return {level: wire bytes sent by this rank} of an operation; no level without bytes."""
    snapshot = comm.traffic.snapshot()
    return {
        level: counter.wire_nbytes
        for (name, level), counter in snapshot.items()
        if name == operation and counter.wire_nbytes
    }


def caught(function):
    """Make ``function(comm)`` return its exception instead of raising it."""

    @functools.wraps(function)
    def call(comm):
        try:
            function(comm)
        except Exception as error:
            return error
        return None

    return call


class Never:
    """Something that a rank waits for until the test lets it go."""

    def __init__(self):
        self._event = threading.Event()

    def wait(self):
        assert self._event.wait(60), "the test never let this rank go"

    def over(self):
        self._event.set()
