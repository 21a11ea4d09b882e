"""The topology of a running MPI job, asked from MPI, and from NVML where there are GPUs.

A **node** is a set of ranks that can share memory, as MPI sees it (``MPI_COMM_TYPE_SHARED``); host
names are a cross-check only. There are always two levels, node and network, also where all ranks
are on one node and where each is alone. Where NVLink joins other sets of GPUs than nodes, and
evenly, there is a third, the domain: inside a node (bridged pairs, a cube mesh) or across nodes.

A reader must not assume block placement: which ranks form a node is what MPI said, never
``rank // n``.
"""

import logging
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from topology import live, nvml
from topology.model import Level, Topology
from topology.system import System

if TYPE_CHECKING:
    from mpi4py import MPI

Share = Callable[[str], list[str]]
_logger = logging.getLogger("zcomm.topology")
_RANK = struct.Struct("=q")
# First rank of the node and name of the host, in one fixed size: nothing needs to be pickled.
_RECORD = struct.Struct("=q256s")


def discover(comm: "MPI.Comm") -> Topology:
    """Find the nodes of a communicator; all its ranks must call this, and get equal results.

    Where host names contradict the nodes, MPI is believed and rank 0 logs one warning.

    Args:
        comm: any mpi4py intracommunicator; the ranks of the result are its ranks.
    """
    firsts, hosts = _nodes(comm)
    return from_hosts(firsts, hosts, comm.Get_rank(), partial(_allgather_text, comm))


def survey(comm: "MPI.Comm") -> System:
    """Return all that can be found about the hosts of a communicator; all its ranks call this.

    As ``discover``, and besides CPUs, NICs, and what there is on hosts without GPUs.
    """
    firsts, hosts = _nodes(comm)
    return survey_hosts(firsts, hosts, comm.Get_rank(), partial(_allgather_text, comm))


def from_hosts(nodes: Sequence[int], hosts: Sequence[str], rank: int, share: Share) -> Topology:
    """Return the topology of ranks whose nodes are known; all of them call this.

    Args:
        nodes: by rank, any number that identifies its node.
        hosts: by rank, the name of its host.
        rank: this one.
        share: gives the text of every rank, in order, for that of this rank.
    """
    records = share(_look(rank, hosts, always=False))
    if not any(records):
        return from_nodes(nodes)
    system = live.assemble(nodes, hosts, records)
    if rank == 0:
        for note in system.notes:
            _logger.warning("%s", note)
    return system.topology


def survey_hosts(nodes: Sequence[int], hosts: Sequence[str], rank: int, share: Share) -> System:
    """As ``from_hosts``, and return all that was found."""
    return live.assemble(nodes, hosts, share(_look(rank, hosts, always=True)))


def _nodes(comm: "MPI.Comm") -> tuple[list[int], list[str]]:
    firsts, hosts = _gather(comm)
    found = contradiction(firsts, hosts)
    if found and comm.Get_rank() == 0:
        _logger.warning("%s; nodes are as MPI says, topology= or ZCOMM_TOPOLOGY overrides", found)
    return firsts, hosts


def _look(rank: int, hosts: Sequence[str], *, always: bool) -> str:
    """Return what this rank sees of its host; empty without GPUs, unless ``always``.

    No error leaves this function: the others wait for this rank.
    """
    try:
        api = nvml.load()
        if api is None and not always:
            return ""
        seen = live.machine(hosts[rank], api)
        if not seen.gpus and not always:
            return ""
        visible = live.visible_gpus() if seen.gpus else []
        local = hosts[:rank].count(hosts[rank])
        return live.record(seen, visible[local % len(visible)] if visible else None)
    except Exception as error:
        _logger.warning("rank %d cannot look at its host: %s", rank, error)
        return ""


def _allgather_text(comm: "MPI.Comm", text: str) -> list[str]:
    """Return the texts of all ranks."""
    mine = text.encode()
    lengths = bytearray(_RANK.size * comm.Get_size())
    comm.Allgather(bytearray(_RANK.pack(len(mine))), lengths)
    sizes = [size for (size,) in _RANK.iter_unpack(lengths)]
    longest = max(sizes)
    if longest == 0:
        return [""] * len(sizes)
    everyone = bytearray(longest * len(sizes))
    comm.Allgather(bytearray(mine.ljust(longest, b"\0")), everyone)
    starts = range(0, len(everyone), longest)
    return [
        everyone[start : start + size].decode() for start, size in zip(starts, sizes, strict=True)
    ]


def from_nodes(nodes: Sequence[int]) -> Topology:
    """Return the topology of ranks that are on the same node where their numbers are equal.

    Args:
        nodes: by rank, any number that identifies its node.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    groups = tuple(tuple(ranks) for ranks in ranks_of.values())
    return Topology((Level("node", groups), Level("network", (tuple(range(len(nodes))),))))


def contradiction(nodes: Sequence[int], hosts: Sequence[str]) -> str | None:
    """Say in words where nodes and host names are not the same partition of the ranks."""
    rank_on_node: dict[int, int] = {}
    rank_on_host: dict[str, int] = {}
    for rank, (node, host) in enumerate(zip(nodes, hosts, strict=True)):
        other = rank_on_node.setdefault(node, rank)
        if hosts[other] != host:
            return f"ranks {other} and {rank} share memory, but on hosts {hosts[other]!r}, {host!r}"
        other = rank_on_host.setdefault(host, rank)
        if nodes[other] != node:
            return f"ranks {other} and {rank} are on host {host!r}, but do not share memory"
    return None


def _gather(comm: "MPI.Comm") -> tuple[list[int], list[str]]:
    """Return, by rank, the first rank of its node and the name of its host."""
    from mpi4py import MPI

    first = bytearray(_RANK.pack(comm.Get_rank()))
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.Get_rank())
    try:
        node.Bcast(first, root=0)
    finally:
        node.Free()
    mine = bytearray(_RECORD.pack(*_RANK.unpack(first), MPI.Get_processor_name().encode()))
    everyone = bytearray(_RECORD.size * comm.Get_size())
    comm.Allgather(mine, everyone)
    records = list(_RECORD.iter_unpack(everyone))
    hosts = [host.rstrip(b"\0").decode(errors="replace") for _, host in records]
    return [first_rank for first_rank, _ in records], hosts
