"""The handshake before an operation: all ranks do the same thing, or all say what differs.

A header of 16 bytes (the number of the call, the length and a hash of its description) goes to
every rank and comes from every rank. Where headers differ the descriptions themselves are
exchanged, and every rank raises the same ``CollectiveMismatch``. ``ZCOMM_CHECK=0`` turns it off, on
all ranks alike.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np

from zcomm import environment
from zcomm.arrays import HostMemory
from zcomm.collectives.channel import Channel, in_words
from zcomm.errors import CollectiveMismatch

_HEADER = struct.Struct("<II8s")
_DESCRIPTION_NBYTES = 512
_SETTINGS_NBYTES = 4096


class Guard:
    """Counts the operations of one communicator and compares each with those of the other ranks."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls = 0
        self.enabled = channel.size > 1 and environment.flag("ZCOMM_CHECK")

    def check(self, description: str, *, patient: bool = False) -> None:
        """Compare one call with those of all other ranks.

        Raises:
            CollectiveMismatch: on all ranks, with the differing calls in words.
            CollectiveTimeout: when a rank has not arrived after ``ZCOMM_TIMEOUT`` seconds; a
                ``patient`` call waits forever.
        """
        self._calls += 1
        if not self.enabled:
            return
        text = description.encode()
        header = _HEADER.pack(self._calls, len(text), blake2b(text, digest_size=8).digest())
        headers = self._exchange(np.frombuffer(header, np.uint8), description, patient)
        if all(bytes(other) == header for other in headers):
            return
        texts = self._exchange(
            np.frombuffer(text[:_DESCRIPTION_NBYTES].ljust(_DESCRIPTION_NBYTES), np.uint8),
            description,
            patient,
        )
        raise CollectiveMismatch(self._in_words(headers, texts))

    def _exchange(self, own: HostMemory, description: str, patient: bool) -> list[HostMemory]:
        channel = self._channel
        rows = [own if rank == channel.rank else np.empty_like(own) for rank in range(channel.size)]
        recvs = {rank: row for rank, row in enumerate(rows) if rank != channel.rank}
        sends, nothing = dict.fromkeys(recvs, own), dict.fromkeys(recvs, 0)
        doing = f"{description} (call {self._calls})"
        channel.exchange("guard", sends, recvs, nothing, doing=doing, patient=patient)
        return rows

    def _in_words(self, headers: list[HostMemory], texts: list[HostMemory]) -> str:
        calls: dict[tuple[str, int], list[int]] = {}
        for rank, (header, text) in enumerate(zip(headers, texts, strict=True)):
            number = _HEADER.unpack(bytes(header))[0]
            calls.setdefault((bytes(text).decode(errors="replace").strip(), number), []).append(
                rank
            )
        said = "; ".join(
            f"{in_words(ranks)}: {text} (call {number})" for (text, number), ranks in calls.items()
        )
        return f"ranks called different things: {said}"


def agree(channel: Channel, settings: dict[str, str]) -> None:
    """Check that all ranks have the same settings.

    Raises:
        CollectiveMismatch: on all ranks, with the settings that differ and the values of each rank.
    """
    text = "\n".join(f"{name}={value}" for name, value in sorted(settings.items())).encode()
    own = np.frombuffer(text[:_SETTINGS_NBYTES].ljust(_SETTINGS_NBYTES), np.uint8)
    rows = [own if rank == channel.rank else np.empty_like(own) for rank in range(channel.size)]
    recvs = {rank: row for rank, row in enumerate(rows) if rank != channel.rank}
    sends, nothing = dict.fromkeys(recvs, own), dict.fromkeys(recvs, 0)
    channel.exchange("guard", sends, recvs, nothing, doing="zcomm.init")
    ranks_of: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        for line in bytes(row).decode(errors="replace").strip().splitlines():
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
