"""Memory of the other ranks of a node, read where it lies: cross memory attach (CMA, Linux).

``process_vm_readv`` copies from one process to another without a copy in between. The system
permits it among processes of one user that may trace each other, which containers and Yama may
forbid, and process numbers mean nothing across PID namespaces. So it is tried once, by a real read
between all pairs of a node's ranks, and all of them decide alike. Where Yama asks for it
(``ptrace_scope`` 1) a rank lets the other processes of its user trace it from then on.

Do not assume that a rank which is read knows when: who reads must say so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zcomm import environment
from zcomm.device import HostMemory
from zcomm.errors import PeerLost, ZcommError
from zcomm.layout import Indices

if TYPE_CHECKING:
    from mpi4py import MPI

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_TOKEN_NBYTES = 16
_WRONG = -2
"""What was read is not what the rank has there: its number is that of another process here."""

_SAMPLE_NBYTES = 2 * 1024 * 1024
_NO_SUCH_PROCESS = 3


class RemoteMemory:
    """The memory of a node's ranks; ``pids[rank]`` is the process of a rank of the transport.

    ``always``: whatever its pages are, it is worth reading.
    """

    def __init__(self, pids: Mapping[int, int], *, always: bool = False) -> None:
        self._native: Any = import_module("zcomm._native")
        self._pids = dict(pids)
        self._always = always

    def worthwhile(self, *memories: HostMemory) -> bool:
        """Tell whether others copy this memory of ours faster than through a window.

        That is where it lies on huge pages: the system looks up every page that is read.
        """
        huge = self._native.on_huge_pages
        return self._always or all(huge(m, _SAMPLE_NBYTES) == 1 for m in memories if m.size)

    def read(
        self,
        rank: int,
        source: tuple[Indices, Indices],
        target: HostMemory,
        place: tuple[Indices, Indices],
    ) -> None:
        """Copy runs of bytes of another rank, one after the other, into ours.

        Args:
            rank: whose memory is read.
            source: addresses in its process, and bytes of each run.
            target: memory of this process.
            place: offsets in ``target``, and bytes of each run: as many together.

        Raises:
            PeerLost: there is no such process any more.
            ZcommError: the system refuses, with what it says.
        """
        pid = self._pids[rank]
        status = self._native.read_process(pid, *source, target, *place)
        if status == _NO_SUCH_PROCESS:
            raise PeerLost(f"rank {rank} (process {pid}) has ended: its memory cannot be read")
        if status:
            words = f"cannot read the memory of rank {rank} (process {pid})"
            raise ZcommError(f"{words}: {_said(status)}")


def probe(node: MPI.Intracomm, ranks: list[int]) -> tuple[RemoteMemory | None, str]:
    """Try to read between all pairs of ``node``, whose ranks have these numbers in the transport.

    All of them call it, where all have the native module. Returns what reads, or None, and the
    reason in words, the same on all.
    """
    native: Any = import_module("zcomm._native")
    setting = environment.text("ZCOMM_CMA")
    wanted = setting != "never"
    restricted = wanted and _yama() == "1"
    if restricted:
        native.permit_reading(True)
    token = np.frombuffer(os.urandom(_TOKEN_NBYTES), np.int64)
    own = np.array([os.getpid() if wanted else 0, token.ctypes.data, *token], np.int64)
    rows = np.empty((node.Get_size(), own.size), np.int64)
    node.Allgather(own, rows)
    refused = np.zeros((node.Get_size(), 2), np.int64)
    node.Allgather(np.array(_try(native, rows, node.Get_rank()), np.int64), refused)
    words = _verdict(rows, refused, ranks)
    if words:
        if restricted:
            native.permit_reading(False)
        return None, words
    pids = {rank: int(row[0]) for rank, row in zip(ranks, rows, strict=True)}
    return RemoteMemory(pids, always=setting == "always"), "permitted between all ranks"


def _try(native: Any, rows: Indices, me: int) -> tuple[int, int]:
    """Read the tokens of all others; return the first that fails and what the system said."""
    if not rows[:, 0].all():
        return 0, 0
    found = np.empty(_TOKEN_NBYTES, np.uint8)
    size = np.array([found.size])
    for index, row in enumerate(rows):
        place = row[1:2].copy(), size, found, np.zeros(1, np.int64), size
        status = 0 if index == me else native.read_process(int(row[0]), *place)
        if status == 0 and index != me and not np.array_equal(found.view(np.int64), row[2:]):
            status = _WRONG
        if status:
            return index, status
    return 0, 0


def _verdict(rows: Indices, refused: Indices, ranks: list[int]) -> str:
    """Return why memory is not read, the same words on all ranks; none where it is."""
    if not rows[:, 0].all():
        return "ZCOMM_CMA=never"
    for rank, (index, status) in zip(ranks, refused.tolist(), strict=True):
        if status:
            return f"rank {rank} cannot read rank {ranks[index]}: {_said(status)}"
    return ""


def _said(status: int) -> str:
    if status == _WRONG:
        return "its process has another number here (another PID namespace)"
    if status < 0:
        return "the system delivered less than was asked for"
    scope = _yama()
    more = f" (ptrace_scope {scope})" if scope not in ("", "0") else ""
    return os.strerror(status) + more


def _yama() -> str:
    """Return the scope of Yama, empty where there is no Yama."""
    try:
        return _YAMA.read_text().strip()
    except OSError:
        return ""


def available() -> bool:
    """Tell whether the native module, which reads, was built."""
    try:
        import_module("zcomm._native")
    except ImportError:
        return False
    return True


def examine() -> tuple[bool, str]:
    """Tell whether another process may read this one's memory, and why not, without MPI.

    Raises:
        ImportError: there is no native module.
    """
    native: Any = import_module("zcomm._native")
    if environment.text("ZCOMM_CMA") == "never":
        return False, "ZCOMM_CMA=never"
    if _yama() == "1":
        native.permit_reading(True)
    token = np.frombuffer(os.urandom(_TOKEN_NBYTES), np.uint8)
    row = [os.getpid(), token.ctypes.data, *token.view(np.int64).tolist()]
    code = f"from zcomm.transports import remote; print(remote.tried({row}))"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    status = int(answer.stdout)
    return status == 0, _said(status) if status else "permitted between processes of this user"


def tried(row: list[int]) -> int:
    """Read one token, as :func:`probe` does; return what the system said."""
    rows = np.array([row], np.int64)
    return _try(import_module("zcomm._native"), rows, -1)[1]
