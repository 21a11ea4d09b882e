"""What carries the messages of one piece: posted ahead and polled, or exchanged hop by hop.

A collective asks its *courier* for memory to write messages to, hands them over, and is told when
those of a hop have arrived. Messages to the ranks that share memory with this one lie in its
*window* (:mod:`zcomm.transports.windows`): they are written there, and read there by the peer. A
rank's messages of one piece are one slot; where they do not fit, they are sent like all others.
Both sides know from the plan which way a message takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from zcomm.arrays import DeviceMemory, Memory
from zcomm.collectives.channel import Channel
from zcomm.pieces import in_flight, slot_nbytes
from zcomm.plan import Plan
from zcomm.transports.base import Pending
from zcomm.transports.windows import Windows

NUM_TAGS = 64
"""Messages of so many pieces in a row differ in their tags: more than are on their way at once."""

LINE_NBYTES = 64
"""Messages in a slot start at multiples of this many bytes."""

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
    owners: set[int] = field(default_factory=set)

    def done(self) -> bool:
        """See :class:`zcomm.transports.base.Pending`."""
        return all(self.windows.arrived(owner, self.slot) for owner in self.owners)

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


class Courier(Protocol):
    """Carries the messages of one piece."""

    def open(self) -> Pending:
        """Return what to wait for before the first message is written."""

    def outbox(self, index: int, peer: int) -> Memory | None:
        """Return where to write the message to a peer in a hop; None: where the caller likes."""

    def slot(self) -> Memory | None:
        """Return the memory that holds all outboxes, None where there are none."""

    def expect(self, index: int, peer: int, memory: Memory) -> None:
        """Receive the message of a peer in a hop, unless it has an :meth:`inbox`."""

    def send(self, index: int, peer: int, memory: Memory, logical: int) -> None:
        """Send a message, or let the peer read it where it lies."""

    def arrival(self, index: int) -> Pending:
        """Return what to wait for before the messages of a hop are read."""

    def inbox(self, index: int, peer: int) -> Memory | None:
        """Return where a peer's message can be read, None where it is received."""

    def release(self, index: int, peer: int) -> None:
        """Say that the message in an inbox has been read."""

    def sent(self) -> Pending:
        """Return what to wait for before messages that have no outbox are written again."""


class Direct:
    """One exchange per hop, in which the caller waits: device memory, and small messages."""

    def __init__(self, channel: Channel, plan: Plan, number: int) -> None:
        self._channel = channel
        self._plan = plan
        self._number = number
        self._sends: dict[int, Memory] = {}
        self._logical: dict[int, int] = {}
        self._recvs: dict[tuple[int, int], Memory] = {}

    def open(self) -> Pending:
        """See :class:`Courier`."""
        return DONE

    def outbox(self, index: int, peer: int) -> Memory | None:
        """See :class:`Courier`."""
        return None

    def slot(self) -> Memory | None:
        """See :class:`Courier`."""
        return None

    def expect(self, index: int, peer: int, memory: Memory) -> None:
        """See :class:`Courier`."""
        self._recvs[index, peer] = memory

    def send(self, index: int, peer: int, memory: Memory, logical: int) -> None:
        """See :class:`Courier`."""
        self._sends[peer] = memory
        self._logical[peer] = logical

    def arrival(self, index: int) -> Pending:
        """See :class:`Courier`."""
        recvs = {peer: memory for (hop, peer), memory in self._recvs.items() if hop == index}
        self._channel.exchange(
            self._plan.counted_as,
            self._sends,
            recvs,
            self._logical,
            tag=tag_of(self._number, index),
            first=self._number == 0,
        )
        self._sends, self._logical = {}, {}
        return DONE

    def inbox(self, index: int, peer: int) -> Memory | None:
        """See :class:`Courier`."""
        return None

    def release(self, index: int, peer: int) -> None:
        """See :class:`Courier`."""

    def sent(self) -> Pending:
        """See :class:`Courier`."""
        return DONE


class Posted:
    """Messages posted ahead and polled; windows inside the node. For host memory."""

    def __init__(self, channel: Channel, plan: Plan, number: int, written: Written) -> None:
        self._channel = channel
        self._transport = channel.transport
        self._windows = channel.transport.windows
        self._plan = plan
        self._number = number
        self._num_slots = in_flight(plan)
        self._slot = number % self._num_slots
        self._written = written
        self._own = self._transport.rank
        self._levels = channel.distances
        self._boxes = self._regions(channel.rank) if channel.near else {}
        self._messages: dict[int, list[Pending]] = {}
        self._inboxes: dict[int, Inboxes] = {}
        self._sending: list[Pending] = []
        self._counted: set[tuple[int, int]] = set()

    def open(self) -> Pending:
        """See :class:`Courier`."""
        if not self._boxes or self._windows is None:
            return DONE
        return FreeSlot(self._windows, self._slot, self._num_slots)

    def outbox(self, index: int, peer: int) -> Memory | None:
        """See :class:`Courier`."""
        span = self._boxes.get((index, peer))
        if span is None or self._windows is None:
            return None
        return self._windows.slot(self._own, self._slot, self._num_slots)[span]

    def slot(self) -> Memory | None:
        """See :class:`Courier`."""
        if not self._boxes or self._windows is None:
            return None
        return self._windows.slot(self._own, self._slot, self._num_slots)

    def expect(self, index: int, peer: int, memory: Memory) -> None:
        """See :class:`Courier`."""
        assert not isinstance(memory, DeviceMemory)
        if memory.size:
            recvs = {self._channel.ranks[peer]: memory}
            posted = self._transport.receive(recvs, tag_of(self._number, index))
            self._messages.setdefault(index, []).append(posted)

    def send(self, index: int, peer: int, memory: Memory, logical: int) -> None:
        """See :class:`Courier`."""
        assert not isinstance(memory, DeviceMemory)
        self._channel.gate.settle()
        self._count(index, peer, memory.size, logical)
        if not memory.size:
            return
        rank = self._channel.ranks[peer]
        if (index, peer) in self._boxes and self._windows is not None:
            self._windows.publish(self._slot, rank)
        else:
            tag = tag_of(self._number, index)
            self._sending.append(self._transport.send({rank: memory}, tag))

    def arrival(self, index: int) -> Pending:
        """See :class:`Courier`."""
        parts = self._messages.get(index, [])
        return All([*parts, self._inboxes[index]] if index in self._inboxes else parts)

    def inbox(self, index: int, peer: int) -> Memory | None:
        """See :class:`Courier`."""
        windows = self._windows
        if windows is None or peer not in self._channel.near:
            return None
        span = self._regions(peer).get((index, self._channel.rank))
        if span is None:
            return None
        rank = self._channel.ranks[peer]
        if span.stop > span.start:
            if index not in self._inboxes:
                self._inboxes[index] = Inboxes(windows, self._slot)
            self._inboxes[index].owners.add(rank)
        return windows.slot(rank, self._slot, self._num_slots)[span]

    def release(self, index: int, peer: int) -> None:
        """See :class:`Courier`."""
        rank = self._channel.ranks[peer]
        if index in self._inboxes and rank in self._inboxes[index].owners:
            inboxes = self._inboxes[index]
            inboxes.owners.remove(rank)
            inboxes.windows.release(rank, self._slot)

    def sent(self) -> Pending:
        """See :class:`Courier`."""
        return All(self._sending)

    def _regions(self, sender: int) -> Regions:
        """Return where the messages of a rank of this node lie in its slot."""
        found = self._plan.regions.get(sender)
        if found is None:
            near = (self._channel.near | {self._channel.rank}) - {sender}
            regions, nbytes = self._written(self._plan, sender, near)
            found = self._plan.regions[sender] = (
                regions if nbytes <= slot_nbytes(self._plan) else {}
            )
        return found

    def _count(self, index: int, peer: int, wire: int, logical: int) -> None:
        channel, level = self._channel, self._levels[peer]
        calls = 0
        if self._number == 0 and (index, level) not in self._counted:
            self._counted.add((index, level))
            calls = 1
        name = self._plan.counted_as
        channel.traffic.record(name, level, calls=calls, logical=logical, wire=wire)
