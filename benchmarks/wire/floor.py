"""The floor: how fast the link is, measured, and how many bytes must cross it.

An emulated cluster tells its programs what its links are (``benchmarks.cluster.start.LINK``); the
rate that counts is measured between the first two nodes, by plain sockets, before anything else.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.cluster import link as sockets
from benchmarks.cluster.network import INTERFACE
from benchmarks.cluster.start import LINK
from benchmarks.collectives.cases import Case
from topology import Topology
from zcomm.hops import choose, make, make_all_reduce, parse_codecs
from zcomm.layout import Layout
from zcomm.plan import Plan

_MEASURE_SECONDS = 0.4
_NAP_SECONDS = 0.01
_NAME_NBYTES = 64


@dataclass(frozen=True)
class Link:
    """The links of the nodes. Bits and bytes per second are TCP's payload, one way.

    ``nominal`` and ``credit_nbytes`` are None and 0 where no emulated cluster has said them. A
    credit is what passes at once after a pause; it is taken off what a floor counts.
    """

    rate: float
    nominal: int | None
    credit_nbytes: int

    def seconds(self, nbytes: int) -> float:
        """Return the least time in which so many bytes leave a node."""
        return max(0, nbytes - self.credit_nbytes) * 8 / self.rate

    def describe(self) -> str:
        """Return one line for a report."""
        said = "" if self.nominal is None else f", set to {self.nominal / 1e9:g}"
        credit = f", credit {self.credit_nbytes} bytes" if self.credit_nbytes else ""
        return f"{self.rate / 1e9:.4g} Gbit/s measured{said}{credit}"


def measure(world: Any, topology: Topology) -> Link | None:
    """Measure the link between the first ranks of two nodes. Collective; the same on all ranks.

    Returns None where there is one node, or nodes that are only played on one host.
    """
    first = leaders(topology)
    hosts = host_names(world)
    if len(first) < 2 or hosts[first[0]] == hosts[first[1]]:
        return None
    rate = np.zeros(1)
    if world.rank in first[:2]:
        side = "listen" if world.rank == first[1] else "connect"
        does = "receive" if side == "listen" else "send"
        address = socket.gethostbyname(hosts[first[1]])
        # The better of two: what disturbs a measurement makes a link look slower than it is.
        rate[0] = max(sockets.run_end(side, address, does, _MEASURE_SECONDS) for _ in range(2))
    waiting = world.Ibarrier()
    while not waiting.Test():
        time.sleep(_NAP_SECONDS)
    world.Bcast(rate, first[1])
    told = json.loads(os.environ.get(LINK, "{}"))
    return Link(float(rate[0]), told.get("rate"), int(told.get("credit_nbytes", 0)))


def nodes(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every node; a topology of one level is one node."""
    return topology.levels[max(0, len(topology.levels) - 2)].groups


def leaders(topology: Topology) -> list[int]:
    """Return the first rank of every node."""
    return [group[0] for group in nodes(topology)]


def least_nbytes(case: Case, topology: Topology) -> int:
    """Return what must leave the busiest node for one call with the codec of a case.

    That is what the plan of the better algorithm says, whichever algorithm the case has.
    """
    algorithms = ["flat"]
    if choose("auto", topology) == "hierarchical":
        algorithms.append("hierarchical")
    return min(_leaving(_plans(case, topology, name), topology) for name in algorithms)


def _plans(case: Case, topology: Topology, algorithm: str) -> tuple[Plan, ...]:
    dtype = str(case.dtype.torch).removeprefix("torch.")
    codecs = parse_codecs(case.codec, len(topology.levels))
    if case.operation.name == "all_reduce":
        tensors = [(dtype, case.numel)]
        made = make_all_reduce(tensors, topology, codecs=codecs, algorithm=algorithm)
        return made.scatter, made.gather
    layout = Layout.even(dtype, case.numel, case.num_ranks)
    return (make(case.operation.name, [layout], topology, codecs=codecs, algorithm=algorithm),)


def _leaving(plans: Sequence[Plan], topology: Topology) -> int:
    """Return the bytes of the node that sends most over the outermost level, 0 for one node."""
    groups = nodes(topology)
    last = len(topology.levels) - 1
    if len(groups) < 2:
        return 0
    return max(
        sum(plan.wire_nbytes(rank).get(last, 0) for plan in plans for rank in group)
        for group in groups
    )


def interface_nbytes() -> int | None:
    """Return what has left this node of an emulated cluster, headers included; None elsewhere."""
    if LINK not in os.environ:
        return None
    with open(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes", encoding="ascii") as file:
        return int(file.read())


def host_names(world: Any) -> list[str]:
    """Return the host name of every rank. Collective."""
    own = np.zeros(_NAME_NBYTES, np.uint8)
    name = socket.gethostname().encode()[:_NAME_NBYTES]
    own[: len(name)] = np.frombuffer(name, np.uint8)
    names = np.zeros((world.size, _NAME_NBYTES), np.uint8)
    world.Allgather(own, names)
    return [bytes(row).rstrip(b"\0").decode() for row in names]
