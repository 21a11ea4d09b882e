"""What a transport is: something that moves bytes among the ranks of one job.

Everything else (order, meaning, sizes, sub-groups) is decided above it. Ranks here are those of the
transport. Between two ranks messages arrive in the order in which they were sent; both sides know
every size. No pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from zcomm.device import Device, HostMemory, Memory
from zcomm.transports.rounds import Rounds
from zcomm.transports.windows import Windows


class Pending(Protocol):
    """Messages on their way."""

    def done(self) -> bool:
        """Tell whether all have arrived, or may be overwritten, as of the last ``poll``."""

    def late(self) -> list[int]:
        """Return the ranks whose message has not arrived, or has not left."""

    def wait(self, seconds: float) -> None:
        """Give the core away, until something may have happened; at most so long where it can."""


class Transport(Protocol):
    """Moves bytes among ``size`` ranks, of which this is number ``rank``."""

    rank: int
    size: int
    name: str
    device: Device | None
    """The one device whose memory it moves; None: any, through the host."""

    def exchange(
        self,
        sends: Mapping[int, Memory],
        recvs: Mapping[int, Memory],
        *,
        timeout: float | None = None,
        tag: int = 0,
    ) -> frozenset[int]:
        """Send and receive one message per named peer; return when all are done.

        Args:
            sends: bytes for each peer, unchanged until the call returns. Empty ones are not sent.
            recvs: memory for what each peer sends here, of exactly that size.
                Device memory is read and written in the order of its current stream; the call may
                return before that has happened.
            timeout: seconds after which the call gives up, None for never.
            tag: messages of one tag arrive in order; those of different tags in any.

        Returns:
            The peers whose message has not arrived (empty unless the time ran out).
        """

    def send(self, sends: Mapping[int, HostMemory], tag: int) -> Pending:
        """Start sending host memory, which is left alone until the messages are done."""

    def receive(self, recvs: Mapping[int, HostMemory], tag: int) -> Pending:
        """Start receiving into host memory, of exactly the sizes that are sent."""

    def cancel(self) -> None:
        """Give up all messages that were started: none is received any more."""

    def poll(self) -> None:
        """Move on all messages that were started."""

    @property
    def windows(self) -> Windows | None:
        """The memory that this rank shares with the others of its node, where it does."""

    def rounds(
        self,
        ranks: Sequence[int],
        me: int,
        table: Sequence[HostMemory],
        outbox: Sequence[HostMemory],
    ) -> Rounds:
        """Return rounds among ``ranks``, of which this is number ``me``, over these rows."""

    def abort(self, code: int) -> None:
        """End all ranks of the job."""

    def close(self) -> None:
        """Release what the transport holds; all ranks call it."""


class HostTransport(Protocol):
    """A transport of host memory only; :mod:`zcomm.transports.staged` makes a whole one of it."""

    rank: int
    size: int
    name: str

    def exchange(
        self,
        sends: Mapping[int, HostMemory],
        recvs: Mapping[int, HostMemory],
        *,
        timeout: float | None = None,
        tag: int = 0,
    ) -> frozenset[int]:
        """See :class:`Transport`."""

    def send(self, sends: Mapping[int, HostMemory], tag: int) -> Pending:
        """See :class:`Transport`."""

    def receive(self, recvs: Mapping[int, HostMemory], tag: int) -> Pending:
        """See :class:`Transport`."""

    def cancel(self) -> None:
        """See :class:`Transport`."""

    def poll(self) -> None:
        """See :class:`Transport`."""

    @property
    def windows(self) -> Windows | None:
        """See :class:`Transport`."""

    def rounds(
        self,
        ranks: Sequence[int],
        me: int,
        table: Sequence[HostMemory],
        outbox: Sequence[HostMemory],
    ) -> Rounds:
        """See :class:`Transport`."""

    def abort(self, code: int) -> None:
        """See :class:`Transport`."""

    def close(self) -> None:
        """See :class:`Transport`."""
