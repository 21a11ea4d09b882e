"""The way from a collective to its transport: ranks of the communicator in, counted bytes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from topology import Topology
from zcomm.arrays import BufferPool, Memory
from zcomm.traffic import Clock, Traffic
from zcomm.transports.base import Transport


@dataclass(frozen=True)
class Channel:
    """A group of a transport's ranks, with the counters and scratch memory of their collectives.

    ``ranks[i]`` is the transport's number of the communicator's rank i.
    """

    transport: Transport
    ranks: tuple[int, ...]
    rank: int
    topology: Topology
    traffic: Traffic
    clock: Clock
    pool: BufferPool

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def exchange(
        self,
        operation: str,
        sends: Mapping[int, Memory],
        recvs: Mapping[int, Memory],
        logical: Mapping[int, int] | None = None,
        *,
        timeout: float | None = None,
    ) -> frozenset[int]:
        """Send and receive one message per peer, counted under ``operation``.

        ``logical`` says what each message holds in the caller's dtype (default: its wire bytes).
        Returns the peers that were late, see :meth:`Transport.exchange`.
        """
        levels = set()
        for peer, memory in sends.items():
            level = self.topology.distance(self.rank, peer)
            levels.add(level)
            nbytes = memory.size if logical is None else logical[peer]
            self.traffic.record(operation, level, logical=nbytes, wire=memory.size)
        for level in levels:
            self.traffic.record(operation, level, calls=1)
        with self.clock.measure("comm"):
            late = self.transport.exchange(
                {self.ranks[peer]: memory for peer, memory in sends.items()},
                {self.ranks[peer]: memory for peer, memory in recvs.items()},
                timeout=timeout,
            )
        return frozenset(self.ranks.index(peer) for peer in late)
