"""Operations that only move bytes: all_to_all, broadcast, send, recv, barrier, control values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from zcomm.arrays import View
from zcomm.collectives.channel import Channel
from zcomm.device import copy


def all_to_all(channel: Channel, send: View, recv: View) -> None:
    """Send the i-th of W equal runs to rank i; the run received from rank i lands in place i."""
    me, nbytes = channel.rank, send.memory.size // channel.size
    runs = [slice(rank * nbytes, (rank + 1) * nbytes) for rank in range(channel.size)]
    others = [rank for rank in range(channel.size) if rank != me]
    sends = {rank: send.memory[runs[rank]] for rank in others}
    recvs = {rank: recv.memory[runs[rank]] for rank in others}
    channel.exchange("all_to_all", sends, recvs)
    copy(recv.memory[runs[me]], send.memory[runs[me]])


def exchange(
    channel: Channel, operation: str, sends: Mapping[int, View], recvs: Mapping[int, View]
) -> None:
    """Send to and receive from the named ranks; what a rank sends itself is copied."""
    me = channel.rank
    if me in sends and me in recvs:
        copy(recvs[me].memory, sends[me].memory)
    channel.exchange(
        operation,
        {rank: x.memory for rank, x in sends.items() if rank != me},
        {rank: x.memory for rank, x in recvs.items() if rank != me},
    )


def broadcast(channel: Channel, x: View, root: int) -> None:
    """Copy the root's elements to all ranks.

    1. Over each level, outermost first, the ranks that hold them send them to their peers of the
       level: the bytes enter a node once. Where groups are uneven, the root sends to everybody.
    """
    topology, me = channel.topology, channel.rank
    if not topology.uniform:
        others = [rank for rank in range(channel.size) if rank != root]
        sends = dict.fromkeys(others, x.memory) if me == root else {}
        channel.exchange("broadcast", sends, {} if me == root else {root: x.memory})
        return
    here, origin = topology.coordinates(me), topology.coordinates(root)
    for level in reversed(range(len(here))):
        if here[:level] != origin[:level]:
            continue
        peers = topology.rail(level, me)
        holder = peers[origin[level]]
        sends = {peer: x.memory for peer in peers if peer != me} if me == holder else {}
        channel.exchange("broadcast", sends, {} if me == holder else {holder: x.memory})


def send(channel: Channel, x: View, peer: int) -> None:
    """Send the elements to one rank, which calls :func:`recv`."""
    channel.exchange("send", {peer: x.memory}, {})


def recv(channel: Channel, x: View, peer: int) -> None:
    """Receive the elements that one rank sends."""
    channel.exchange("send", {}, {peer: x.memory})


def barrier(channel: Channel) -> None:
    """Return when all ranks have called."""
    token = np.zeros(1, np.uint8)
    others = [rank for rank in range(channel.size) if rank != channel.rank]
    channel.exchange(
        "barrier", dict.fromkeys(others, token), {rank: token.copy() for rank in others}
    )


def gather_values(channel: Channel, values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the control values of all ranks, shape (W, n): the same rows on every rank."""
    rows = np.empty((channel.size, *values.shape), values.dtype)
    rows[channel.rank] = values
    others = [rank for rank in range(channel.size) if rank != channel.rank]
    own = rows[channel.rank].reshape(-1).view(np.uint8)
    channel.exchange(
        "values",
        dict.fromkeys(others, own),
        {rank: rows[rank].reshape(-1).view(np.uint8) for rank in others},
    )
    return rows
