"""The handshake before an operation: all ranks do the same thing, or all say what differs.

A *header* of 16 bytes (the number of the call, the length and a hash of its description) goes to
every rank and comes from every rank. It travels in a round (:mod:`zcomm.transports.rounds`):

- with the data, where one message to everybody holds all of it (:meth:`Guard.trade`): the
  *payload*, up to ``PAYLOAD_NBYTES``, follows the header;
- alone otherwise (:meth:`Guard.open`): sent first, compared before the operation's first message
  (:class:`zcomm.collectives.channel.Gate`), so that encoding lies between.

Where headers differ the descriptions themselves are exchanged, and every rank raises the same
``CollectiveMismatch``, or the error of a rank that refused (:mod:`zcomm.refusal`).
``ZCOMM_CHECK=0`` turns headers off, on all ranks alike.
"""

from __future__ import annotations

import os
import struct
import time
from functools import cached_property, lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from zcomm import environment, patience
from zcomm.collectives.channel import Channel, in_words
from zcomm.errors import CollectiveMismatch, CollectiveTimeout, OffloadError, ZcommError
from zcomm.refusal import refused, words_of
from zcomm.traffic import Tally
from zcomm.transports.rounds import Nbytes

PAYLOAD_NBYTES = 4096
"""The largest message that travels with its header."""

_HEADER = struct.Struct("<I12s")
_SAID = struct.Struct("<I8s")
_DESCRIPTION_NBYTES = 1 << 14
_SETTINGS_NBYTES = 4096


class Guard:
    """Counts the operations of one communicator and compares each with those of the other ranks."""

    def __init__(self, channel: Channel, name: str = "world") -> None:
        self._channel = channel
        self._place = "" if name == "world" else f" in {name}"
        self._calls = 0
        self._opened = ""
        self._began = 0.0
        self.enabled = channel.size > 1 and environment.flag("ZCOMM_CHECK")

    @property
    def payloads(self) -> npt.NDArray[np.uint8]:
        """The payloads of a round, one row of ``PAYLOAD_NBYTES`` bytes per rank, always the same.

        Write the own one before :meth:`trade`; read the others after it.
        """
        return self._lines.payloads

    @property
    def outbox(self) -> npt.NDArray[np.uint8]:
        """The payloads of a round in which every rank is sent one of its own, in the same form."""
        return self._lines.outbox

    def check(self, description: str, *, patient: bool = False) -> None:
        """Compare one call with those of all other ranks, and do nothing else.

        Raises:
            CollectiveMismatch: on all ranks, with the differing calls in words.
            CollectiveTimeout: when a rank has not arrived after ``ZCOMM_TIMEOUT`` seconds; a
                ``patient`` call waits forever.
        """
        self._channel.gate.settle()
        if not self.enabled:
            self._calls += 1
            return
        self.begin(description, self.said(description), 0)
        self.end(description, patient)

    def refuse(self, error: OffloadError) -> None:
        """Let all ranks raise an error of this one in the next operation, which it does not do.

        Afterwards ``error.resumable`` says whether they have; without headers nobody can be told.
        """
        if self.enabled:
            try:
                self.check(words_of(error))
            except OffloadError:
                pass  # what all ranks raise
            except ZcommError:
                return  # they are at other things, or gone: this rank's own error says more
        error.resumable = self.enabled or self._channel.size == 1

    def open(self, description: str) -> None:
        """Begin to compare one call; it is done when the channel's gate is settled."""
        self._channel.gate.settle()
        if not self.enabled:
            self._calls += 1
        else:
            self.begin(description, self.said(description), 0)
            self._opened = description
            self._channel.gate.waiting = self._settle
            os.sched_yield()  # ranks that share this core send theirs before this one encodes

    def settle(self) -> None:
        """End what :meth:`open` began, unless a message of the operation has done so.

        Raises:
            CollectiveMismatch: see :meth:`check`.
            CollectiveTimeout: see :meth:`check`.
        """
        self._channel.gate.settle()

    def trade(self, description: str, nbytes: Nbytes) -> None:
        """Compare one call, and with that exchange payloads, of which this rank's has ``nbytes``.

        Several numbers are those of the payloads in the outbox, which are sent instead.

        Raises:
            CollectiveMismatch: see :meth:`check`; payloads are undefined then.
            CollectiveTimeout: see :meth:`check`.
        """
        self.begin(description, self.said(description), nbytes)
        self.end(description)

    def said(self, description: str) -> bytes:
        """Return what a header says of a call."""
        return _said(description + self._place)

    def begin(self, description: str, said: bytes, nbytes: Nbytes) -> None:
        """Send what :meth:`trade` sends."""
        gate = self._channel.gate
        if gate.waiting is not None:
            gate.settle()
        self._calls += 1
        lines = self._lines
        late = lines.start(self._calls, said, nbytes)
        if late:
            self._calls -= 1
            self._raise_late(description, late, resumable=lines.rounds.sent())
        self._began = time.perf_counter()

    def end(self, description: str, patient: bool = False) -> None:
        """Wait for what :meth:`begin` began, and compare; raises what :meth:`check` does."""
        self._finish(description, patient, whole=True)
        self._channel.clock.add("comm", time.perf_counter() - self._began)

    @cached_property
    def _lines(self) -> _Lines:
        return _Lines(self._channel, headed=self.enabled)

    def _settle(self) -> None:
        start = time.perf_counter()
        self._finish(self._opened, False, whole=False)
        self._channel.clock.add("comm", time.perf_counter() - start)

    def _finish(self, description: str, patient: bool, *, whole: bool) -> None:
        """Wait for the headers of all, and compare; ``whole``: the operation is no more than that.

        Where it is more a late rank would wait for what this one never sends.
        """
        lines = self._lines
        late = lines.rounds.finish(patient=patient)
        if late:
            self._raise_late(description, late, resumable=whole and lines.rounds.sent())
        for head in lines.others:
            if head != lines.own:
                self._raise_mismatch(description, patient)

    def _raise_late(self, description: str, late: list[int], *, resumable: bool) -> None:
        seconds = patience.limit()
        raise CollectiveTimeout(
            f"rank {self._channel.rank} waited {seconds:g} s in {self._call(description)} for "
            f"{in_words(late)} ({patience.source()})",
            resumable=resumable,
        )

    def _raise_mismatch(self, description: str, patient: bool) -> None:
        numbers = [_HEADER.unpack(head)[0] for head in self._lines.heads]
        text = (description + self._place).encode()[:_DESCRIPTION_NBYTES]
        texts = _everybodys(
            self._channel,
            text.ljust(_DESCRIPTION_NBYTES),
            doing=self._call(description),
            patient=patient,
        )
        error = refused(texts, self._channel.ranks)
        if error is not None:
            raise error
        calls: dict[tuple[str, int], list[int]] = {}
        for rank, said in enumerate(zip(texts, numbers, strict=True)):
            calls.setdefault(said, []).append(rank)
        words = [
            f"{in_words(ranks)}: {said} (call {number})" for (said, number), ranks in calls.items()
        ]
        raise CollectiveMismatch(f"ranks called different things: {'; '.join(words)}")

    def _call(self, description: str) -> str:
        return f"{description}{self._place} (call {self._calls})"


class _Lines:
    """What the rounds of one communicator need: made at the first, and the same for all."""

    def __init__(self, channel: Channel, *, headed: bool) -> None:
        size = _HEADER.size if headed else 0
        table = np.zeros((channel.size, size + PAYLOAD_NBYTES), np.uint8)
        self.payloads = table[:, size:]
        self.heads = [memoryview(row.data)[:size] for row in table]
        self.own = self.heads[channel.rank]
        self.others = [self.heads[rank] for rank in channel.others] if headed else []
        outbox = np.zeros_like(table)
        self.outbox = outbox[:, size:]
        self._out_heads = [memoryview(row.data)[:size] for row in outbox]
        places = channel.rank, list(table), list(outbox)
        self.rounds = channel.transport.rounds(channel.ranks, *places)
        self._tally = _header_tally(channel) if headed else Tally({})
        self._size = size

    def start(self, number: int, said: bytes, nbytes: Nbytes) -> list[int]:
        """Start a round with payloads of ``nbytes`` bytes; return who is late for the last."""
        if self._size:
            _HEADER.pack_into(self.own, 0, number, said)
        if isinstance(nbytes, int):
            late = self.rounds.start(self._size + nbytes)
        else:
            for head in self._out_heads:
                head[:] = self.own
            late = self.rounds.start(tuple(self._size + each for each in nbytes))
        self._tally.calls += not late
        return late


def _header_tally(channel: Channel) -> Tally:
    nbytes = dict.fromkeys(channel.others, _HEADER.size)
    return channel.tally("guard", nbytes, dict.fromkeys(nbytes, 0))


@lru_cache(maxsize=4096)
def _said(description: str) -> bytes:
    """Return the 12 bytes of a header that stand for a description."""
    text = description.encode()
    return _SAID.pack(len(text), blake2b(text, digest_size=8).digest())


def _everybodys(channel: Channel, own: bytes, *, doing: str, patient: bool = False) -> list[str]:
    """Return the texts of all ranks, of as many bytes on each."""
    mine = np.frombuffer(own, np.uint8)
    rows = [mine if rank == channel.rank else np.empty_like(mine) for rank in range(channel.size)]
    recvs = {rank: rows[rank] for rank in channel.others}
    sends, nothing = dict.fromkeys(recvs, mine), dict.fromkeys(recvs, 0)
    channel.exchange("guard", sends, recvs, nothing, doing=doing, patient=patient)
    return [bytes(row).decode(errors="replace").strip() for row in rows]


def check_sizes(
    operation: str, sent: npt.NDArray[np.int64], received: npt.NDArray[np.int64]
) -> None:
    """Check that what every rank sends is what its peer receives; -1 stands for no message.

    ``sent[i, j]`` are the bytes from rank i to rank j as rank i says, ``received[j, i]`` as rank j.

    Raises:
        CollectiveMismatch: on all ranks, with the first pair that differs.
    """
    wrong = np.argwhere(sent != received.T)
    if wrong.size:
        source, target = wrong[0].tolist()
        here, there = int(sent[source, target]), int(received[target, source])
        raise CollectiveMismatch(
            f"{operation}: rank {source} sends {_nbytes(here)} to rank {target}, "
            f"which expects {_nbytes(there)}"
        )


def _nbytes(number: int) -> str:
    return "nothing" if number < 0 else f"{number} bytes"


def agree(channel: Channel, settings: dict[str, str]) -> None:
    """Check that all ranks have the same settings.

    Raises:
        CollectiveMismatch: on all ranks, with the settings that differ and the values of each rank.
    """
    text = "\n".join(f"{name}={value}" for name, value in sorted(settings.items())).encode()
    own = text[:_SETTINGS_NBYTES].ljust(_SETTINGS_NBYTES)
    ranks_of: dict[str, list[int]] = {}
    for rank, said in enumerate(_everybodys(channel, own, doing="zcomm.init")):
        for line in said.splitlines():
            ranks_of.setdefault(line, []).append(rank)
    differing = [
        f"{line} on {in_words(ranks)}"
        for line, ranks in ranks_of.items()
        if len(ranks) < channel.size
    ]
    if differing:
        raise CollectiveMismatch(
            "ranks do not agree on their settings: " + "; ".join(sorted(differing))
        )
