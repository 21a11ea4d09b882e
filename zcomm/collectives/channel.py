"""The way from a collective to its transport: ranks of the communicator in, counted bytes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from topology import Topology
from zcomm import patience
from zcomm.arrays import BufferPool, Memory
from zcomm.device import Device
from zcomm.errors import CollectiveTimeout, ZcommError
from zcomm.seeds import Calls
from zcomm.traffic import Clock, Counter, Tally, Traffic
from zcomm.transports.base import Transport

T = TypeVar("T")


class Gate:
    """What an operation's first message waits for: the handshake that was begun before it."""

    def __init__(self) -> None:
        self.waiting: Callable[[], None] | None = None
        """What returns when the handshake has ended."""

    def settle(self) -> None:
        """Wait, where there is something to wait for; raises what is wrong."""
        if self.waiting is not None:
            wait, self.waiting = self.waiting, None
            wait()


class Health:
    """Whether ranks still agree on which messages were sent, received and read.

    After an operation that ended in its middle they do not: a peer's message that nobody received,
    or a slot that nobody released, would be taken for one of the next operation. One that failed
    while its first message still waited at the ``gate`` has sent nothing.
    """

    def __init__(self) -> None:
        self.gate = Gate()
        self._reason = ""
        self.left = False
        """Whether ``sys.exit`` ended an operation in its middle, in a handler of a signal say."""

    def check(self) -> None:
        """Raise ZcommError where an operation ended in its middle."""
        if self._reason:
            raise ZcommError(
                f"no communicator of this job can be used: an operation ended in its middle "
                f"({self._reason})"
            )

    def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run an operation, and remember it if it ends in its middle."""
        if self._reason:
            self.check()
        try:
            return function(*arguments)
        except BaseException as error:
            if self.gate.waiting is None and not getattr(error, "resumable", False):
                self._reason = f"{type(error).__name__}: {error}"
                self.left = isinstance(error, SystemExit)
            raise


@dataclass(frozen=True)
class Channel:
    """A group of a transport's ranks, with the counters and scratch memory of their collectives.

    ``ranks[i]`` is the transport's number of the communicator's rank i; ``device`` the one that
    this rank was given, None for the host.
    """

    transport: Transport
    ranks: tuple[int, ...]
    rank: int
    topology: Topology
    traffic: Traffic
    clock: Clock
    pool: BufferPool
    calls: Calls
    device: Device | None = None
    health: Health = field(default_factory=Health)

    @property
    def gate(self) -> Gate:
        """What the first message of an operation waits for."""
        return self.health.gate

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def distances(self) -> tuple[int, ...]:
        """For every rank, the smallest level whose group holds it and this one."""
        return tuple(self.topology.distance(self.rank, peer) for peer in range(self.size))

    @cached_property
    def near(self) -> frozenset[int]:
        """The other ranks that share memory with this one."""
        windows = self.transport.windows
        shared = frozenset() if windows is None else windows.ranks
        near = {rank for rank, number in enumerate(self.ranks) if number in shared}
        return frozenset(near - {self.rank})

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(len(self.ranks)) if rank != self.rank]

    def tally(self, operation: str, wire: Mapping[int, int], logical: Mapping[int, int]) -> Tally:
        """Return the tally of calls that send bytes to peers, counted as ``exchange`` does."""
        sums: dict[tuple[str, int], list[int]] = {}
        for peer, nbytes in wire.items():
            total = sums.setdefault((operation, self.topology.distance(self.rank, peer)), [0, 0])
            total[0] += logical[peer]
            total[1] += nbytes
        return self.traffic.tally({key: Counter(1, *total) for key, total in sums.items()})

    def exchange(
        self,
        operation: str,
        sends: Mapping[int, Memory],
        recvs: Mapping[int, Memory],
        logical: Mapping[int, int] | None = None,
        *,
        doing: str | None = None,
        patient: bool = False,
        tag: int = 0,
        first: bool = True,
    ) -> None:
        """Send and receive one message per peer, counted under ``operation``.

        ``logical`` says what each message holds in the caller's dtype (default: its wire bytes),
        ``doing`` what is done, in words. ``tag`` tells the messages of several exchanges apart; an
        exchange that is not the ``first`` of its call is not counted as a call.

        Raises:
            CollectiveTimeout: naming the peers whose message has not arrived after
                ``ZCOMM_TIMEOUT`` seconds; a ``patient`` exchange waits forever.
        """
        self.gate.settle()
        levels = set()
        for peer, memory in sends.items():
            level = self.topology.distance(self.rank, peer)
            levels.add(level)
            nbytes = memory.size if logical is None else logical[peer]
            self.traffic.record(operation, level, logical=nbytes, wire=memory.size)
        for level in levels:
            self.traffic.record(operation, level, calls=int(first))
        with self.clock.measure("comm"):
            timeout = None if patient else patience.limit()
            late = self.transport.exchange(
                {self.ranks[peer]: memory for peer, memory in sends.items()},
                {self.ranks[peer]: memory for peer, memory in recvs.items()},
                timeout=timeout,
                tag=tag,
            )
        if late:
            assert timeout is not None
            raise self.timed_out(doing or operation, timeout, late)

    def timed_out(self, doing: str, timeout: float, late: Iterable[int]) -> CollectiveTimeout:
        """Return the error that names the ranks (numbers of the transport) that have not come."""
        peers = in_words(sorted(self.ranks.index(peer) for peer in set(late)))
        return CollectiveTimeout(
            f"rank {self.rank} waited {timeout:g} s in {doing} for {peers} ({patience.source()})"
        )


def in_words(ranks: Sequence[int]) -> str:
    """Return ranks as people say them."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
