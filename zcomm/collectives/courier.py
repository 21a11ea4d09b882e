"""What carries the messages of one piece: posted ahead and polled, or exchanged hop by hop.

A collective tells its *courier* which messages to send, and is told when those of a hop have
arrived. Messages to the ranks that share memory with this one lie in its *window*
(:mod:`zcomm.transports.windows`): they are written there, and read there by the peer. A rank's
messages of one piece are one slot; where they do not fit, they are sent like all others. Both sides
know from the plan which way a message takes: its :class:`Ways`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from zcomm.arrays import DeviceMemory, HostMemory
from zcomm.collectives.channel import Channel
from zcomm.collectives.memories import Memories, Numbers, Region
from zcomm.pieces import slot_nbytes
from zcomm.plan import Plan
from zcomm.transports.base import Pending
from zcomm.transports.windows import Windows

NUM_TAGS = 64
"""Messages of so many pieces in a row differ in their tags: more than are on their way at once."""

Regions = dict[tuple[int, int], slice]
"""Where in the sender's slot the message of (hop, peer) lies."""


class Written(Protocol):
    """How a collective lays out a rank's messages in its slot."""

    def __call__(self, plan: Plan, sender: int, near: frozenset[int]) -> tuple[Regions, int]:
        """Return the regions of the messages to near peers, and the bytes of all."""


class Done:
    """Nothing is on its way."""

    def done(self) -> bool:
        """See :class:`zcomm.transports.base.Pending`."""
        return True

    def late(self) -> list[int]:
        """See :class:`zcomm.transports.base.Pending`."""
        return []

    def wait(self, seconds: float) -> None:
        """See :class:`zcomm.transports.base.Pending`."""


DONE = Done()


class All:
    """Several things to wait for."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def done(self) -> bool:
        """See :class:`zcomm.transports.base.Pending`."""
        return all(part.done() for part in self._parts)

    def late(self) -> list[int]:
        """See :class:`zcomm.transports.base.Pending`."""
        return [rank for part in self._parts for rank in part.late()]

    def wait(self, seconds: float) -> None:
        """See :class:`zcomm.transports.base.Pending`."""
        for part in self._parts:
            if not part.done():
                part.wait(seconds)
                return


@dataclass
class Inboxes:
    """Slots of other ranks that are yet to be written; all have the number ``slot``."""

    windows: Windows
    slot: int
    owners: Sequence[int]

    def done(self) -> bool:
        """See :class:`zcomm.transports.base.Pending`."""
        return all(self.windows.arrived(owner, self.slot) for owner in self.owners)

    def release(self) -> None:
        """Let the owners write them again: they have been read."""
        for owner in self.owners:
            self.windows.release(owner, self.slot)

    def late(self) -> list[int]:
        """See :class:`zcomm.transports.base.Pending`."""
        return [owner for owner in self.owners if not self.windows.arrived(owner, self.slot)]

    def wait(self, seconds: float) -> None:
        """See :class:`zcomm.transports.base.Pending`."""
        time.sleep(seconds)


@dataclass
class FreeSlot:
    """A slot of this rank that others may still read."""

    windows: Windows
    slot: int
    num_slots: int

    def done(self) -> bool:
        """See :class:`zcomm.transports.base.Pending`."""
        return self.windows.free(self.slot, self.num_slots)

    def late(self) -> list[int]:
        """See :class:`zcomm.transports.base.Pending`."""
        return self.windows.readers()

    def wait(self, seconds: float) -> None:
        """See :class:`zcomm.transports.base.Pending`."""
        time.sleep(seconds)


def tag_of(number: int, index: int) -> int:
    """Return the tag of the messages of a piece in a hop."""
    return 1 + index * NUM_TAGS + number % NUM_TAGS


class Ways:
    """Where the messages of one piece lie that need no sending, as one rank sees it.

    ``peers`` are the near ranks whose slots this rank reads, ``slot`` tells whether it writes its
    own.
    """

    def __init__(
        self, channel: Channel | None, plan: Plan, written: Written, numbers: Numbers
    ) -> None:
        near = frozenset() if channel is None else channel.near
        me = 0 if channel is None else channel.rank
        self.numbers = numbers
        self._own = _regions(plan, written, me, near | {me}) if near else {}
        self._theirs: dict[int, Regions] = {}
        for peer in sorted(near):
            found = _regions(plan, written, peer, near | {me})
            self._theirs[peer] = {(hop, to): span for (hop, to), span in found.items() if to == me}
        self.slot = bool(self._own)
        self.peers = tuple(peer for peer, found in self._theirs.items() if found)

    def outbox(self, index: int, peer: int) -> Region | None:
        """Return where to write the message to a peer in a hop; None: where the caller likes."""
        span = self._own.get((index, peer))
        return None if span is None else Region(self.numbers.slot, span.start, span.stop)

    def inbox(self, index: int, peer: int, me: int) -> Region | None:
        """Return where the message of a peer to this rank can be read, None: it is received."""
        span = self._theirs.get(peer, {}).get((index, me))
        if span is None:
            return None
        return Region(self.numbers.inbox(self.peers.index(peer)), span.start, span.stop)


def _regions(plan: Plan, written: Written, sender: int, node: frozenset[int]) -> Regions:
    regions, nbytes = written(plan, sender, node - {sender})
    return regions if nbytes <= slot_nbytes(plan) else {}


class Post(NamedTuple):
    """A message to or from a peer: the ``region`` that is sent, or into which it comes.

    ``shared``: it lies in a slot that both ranks see. ``logical`` is what it holds in the caller's
    dtype, in bytes.
    """

    peer: int
    region: Region
    shared: bool
    logical: int = 0

    @property
    def sent(self) -> bool:
        """Tell whether there is anything to send."""
        return not self.shared and self.region.stop > self.region.start


class Mail:
    """What one rank receives in every hop of a piece, and by which ways messages travel.

    ``receives`` are all messages by hop; ``sent`` those of them that are sent, and ``owners`` the
    near peers that write the others.
    """

    def __init__(self, ways: Ways, receives: Sequence[Sequence[Post]]) -> None:
        self.ways = ways
        self.receives = receives
        self.sent = tuple(tuple(post for post in posts if post.sent) for posts in receives)
        self.owners = tuple(
            tuple(post.peer for post in posts if post.shared and post.region.nbytes)
            for posts in receives
        )


class Courier(Protocol):
    """Carries the messages of one piece."""

    def open(self) -> Pending:
        """Return what to wait for before the first message is written."""

    def expect(self) -> None:
        """Receive what peers send in all hops."""

    def send(self, index: int, post: Post) -> None:
        """Send a message in a hop, or let the peer read it where it lies."""

    def arrival(self, index: int) -> Pending:
        """Return what to wait for before the messages of a hop are read."""

    def release(self, index: int) -> None:
        """Say that the messages of a hop have been read."""

    def sent(self) -> Pending:
        """Return what to wait for before messages outside the slot are written again."""


class Direct:
    """One exchange per hop, in which the caller waits: device memory, and small messages."""

    def __init__(
        self, channel: Channel, plan: Plan, number: int, memories: Memories, mail: Mail
    ) -> None:
        self._channel = channel
        self._plan = plan
        self._number = number
        self._memories = memories
        self._mail = mail
        self._posts: list[Post] = []

    def open(self) -> Pending:
        """See :class:`Courier`."""
        return DONE

    def expect(self) -> None:
        """See :class:`Courier`."""

    def send(self, index: int, post: Post) -> None:
        """See :class:`Courier`."""
        self._posts.append(post)

    def arrival(self, index: int) -> Pending:
        """See :class:`Courier`."""
        memories = self._memories
        self._channel.exchange(
            self._plan.counted_as,
            {post.peer: memories.at(post.region) for post in self._posts},
            {post.peer: memories.at(post.region) for post in self._mail.receives[index]},
            {post.peer: post.logical for post in self._posts},
            tag=tag_of(self._number, index),
            first=self._number == 0,
        )
        self._posts = []
        return DONE

    def release(self, index: int) -> None:
        """See :class:`Courier`."""

    def sent(self) -> Pending:
        """See :class:`Courier`."""
        return DONE


class Posted:
    """Messages posted ahead and polled; windows inside the node. For host memory."""

    def __init__(
        self, channel: Channel, number: int, num_slots: int, memories: Memories, mail: Mail
    ) -> None:
        self._channel = channel
        self._transport = channel.transport
        self._number = number
        self._windows = channel.transport.windows
        self._num_slots = num_slots
        self._slot = number % num_slots
        self._memories = memories
        self._mail = mail
        self._arrivals: list[Pending] = []
        self._inboxes: list[Inboxes | None] = []
        self._sending: list[Pending] = []

    def open(self) -> Pending:
        """See :class:`Courier`."""
        windows = self._windows
        if windows is None or not self._mail.ways.slot:
            return DONE
        return FreeSlot(windows, self._slot, self._num_slots)

    def expect(self) -> None:
        """See :class:`Courier`."""
        ranks, windows, mail = self._channel.ranks, self._windows, self._mail
        for index, (posts, peers) in enumerate(zip(mail.sent, mail.owners, strict=True)):
            arrival: Pending = DONE
            if posts:
                recvs = {ranks[post.peer]: self._host(post.region) for post in posts}
                arrival = self._transport.receive(recvs, tag_of(self._number, index))
            inboxes = None
            if peers:
                assert windows is not None
                inboxes = Inboxes(windows, self._slot, [ranks[peer] for peer in peers])
                arrival = All((arrival, inboxes)) if posts else inboxes
            self._arrivals.append(arrival)
            self._inboxes.append(inboxes)

    def send(self, index: int, post: Post) -> None:
        """See :class:`Courier`."""
        self._channel.gate.settle()
        rank = self._channel.ranks[post.peer]
        if post.sent:
            message = {rank: self._host(post.region)}
            self._sending.append(self._transport.send(message, tag_of(self._number, index)))
        elif post.region.nbytes:
            assert self._windows is not None
            self._windows.publish(self._slot, rank)

    def arrival(self, index: int) -> Pending:
        """See :class:`Courier`."""
        return self._arrivals[index]

    def release(self, index: int) -> None:
        """See :class:`Courier`."""
        inboxes = self._inboxes[index]
        if inboxes is not None:
            inboxes.release()

    def sent(self) -> Pending:
        """See :class:`Courier`."""
        return All(self._sending)

    def _host(self, region: Region) -> HostMemory:
        memory = self._memories.at(region)
        assert not isinstance(memory, DeviceMemory)
        return memory
