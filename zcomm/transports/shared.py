"""Windows of a node's ranks without MPI: files in ``/dev/shm`` that have no name once all are open.

Ranks that seem to share a host try it: each makes a file under a name that nobody else has, tells
the others, and opens theirs. Where one of a node cannot (containers of one host name with a
``/dev/shm`` each, say), none of its ranks has windows, and they send each other messages.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zcomm.device import HostMemory
from zcomm.placement import gather
from zcomm.transports.base import Transport
from zcomm.transports.remote import available
from zcomm.transports.windows import Windows, shared_nbytes, window_nbytes

FOLDER = Path("/dev/shm")


def open_windows(control: Transport, hosts: Sequence[int]) -> Windows | None:
    """Return the windows of this rank's node; None where its ranks have none.

    Args:
        control: carries host memory among all ranks; all of them call this.
        hosts: by rank, a number of its host.
    """
    ranks = [rank for rank, host in enumerate(hosts) if host == hosts[control.rank]]
    size = window_nbytes(len(ranks))
    wanted = len(ranks) > 1 and available() and shared_nbytes() > 2 * len(ranks) * size
    token = int.from_bytes(os.urandom(7), "little") if wanted else 0
    mine = _create(token, size) if wanted else None
    tokens = gather(control, token if mine is not None else 0)
    opened = [_open(int(tokens[rank]), size) for rank in ranks] if mine is not None else []
    memories = [memory for memory in opened if memory is not None]
    complete = gather(control, int(len(memories) == len(ranks)))
    if mine is not None:
        _path(token).unlink()
    if not complete[ranks].all():
        return None
    made = Windows(memories, ranks, ranks.index(control.rank))
    made.reading = "ranks of a node read arrays through shared windows"
    return made


def _create(token: int, nbytes: int) -> HostMemory | None:
    with contextlib.suppress(OSError):
        number = os.open(_path(token), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.ftruncate(number, nbytes)
        return _map(number, nbytes)
    return None


def _open(token: int, nbytes: int) -> HostMemory | None:
    with contextlib.suppress(OSError):
        return _map(os.open(_path(token), os.O_RDWR), nbytes)
    return None


def _map(number: int, nbytes: int) -> HostMemory:
    try:
        return np.frombuffer(mmap.mmap(number, nbytes), np.uint8)
    finally:
        os.close(number)


def _path(token: int) -> Path:
    return FOLDER / f"zcomm-{token:016x}"
