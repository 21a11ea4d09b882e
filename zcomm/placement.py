"""Which device and which transport a rank uses, decided by all ranks alike.

A rank's *device* is that of its number among the ranks of its host. A reader must not assume that
the choice is local: every rank tells what it has, and all decide from the same table.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zcomm.collectives.channel import in_words
from zcomm.cuda import REMEDY, CudaDevice, cuda_device, load_cupy
from zcomm.errors import ZcommError
from zcomm.transports.base import Transport
from zcomm.transports.nccl import NcclTransport, load_nccl

DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "mpi", "nccl", "process_group")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
logger = logging.getLogger("zcomm")


@dataclass(frozen=True)
class Own:
    """What this rank has: a device or the reason why not, and NCCL or not."""

    device: CudaDevice | None
    reason: str
    nccl: Any = None


def check(device: str, transport: str) -> None:
    """Check the two arguments of ``zcomm.init``.

    Raises:
        ValueError: a value that is unknown, or NCCL without a device.
    """
    for name, given, possible in (
        ("device", device, DEVICES),
        ("transport", transport, TRANSPORTS),
    ):
        if given not in possible:
            raise ValueError(f"{name} {given!r} is not available; possible: {', '.join(possible)}")
    if device == "cpu" and transport == "nccl":
        raise ValueError(
            "transport 'nccl' moves device memory, device is 'cpu': possible are transport='mpi', "
            "or device='cuda'"
        )


def choose(
    device: str, transport: str, control: Transport
) -> tuple[CudaDevice | None, Transport, str]:
    """Return this rank's device, the transport to use, and the choice in words; on all ranks.

    Args:
        device: "auto": CUDA where every rank has it; "cpu"; "cuda".
        transport: "auto": NCCL where every rank has it and a device for itself; "nccl"; "mpi" and
            "process_group": that of ``control``.
        control: carries host memory among the ranks, and all memory where NCCL does not.

    Raises:
        ZcommError: on all ranks, when what was asked for cannot be had on one.
    """
    number = local_rank(control)
    own = Own(None, "asked for") if device == "cpu" else _look(number)
    table = _tell(control, own)
    without = [rank for rank in range(control.size) if not table[rank, 0]]
    if without and device == "cuda":
        raise ZcommError(f"device 'cuda': {_lacking(own, control, without)}")
    if without:
        return None, _plain(transport, control, own, without), f"device cpu ({own.reason})"
    assert own.device is not None
    refusal = _refusal(table)
    if transport == "nccl" and refusal:
        possible = f"possible here is transport={control.name!r}"
        raise ZcommError(f"transport 'nccl': {refusal}; {possible}")
    own.device.make_current()
    words = f"device {own.device.name} ({own.device.title})"
    by_host = transport in ("mpi", "process_group")
    if by_host or (transport == "auto" and (refusal or control.size == 1)):
        return own.device, control, words
    return own.device, NcclTransport(control, own.device, own.nccl), words


def _look(number: int) -> Own:
    """Find the device of this number, modulo how many there are."""
    if importlib.util.find_spec("cupy") is None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            logger.warning("torch finds a CUDA device, but sending its tensors needs CuPy")
        return Own(None, f"CuPy is not installed: {REMEDY}")
    try:
        count = load_cupy().cuda.runtime.getDeviceCount()
        return Own(cuda_device(number % count), "", load_nccl())
    except ZcommError as error:
        return Own(None, str(error))


def local_rank(control: Transport) -> int:
    """Return this rank's number among the ranks of its host; all ranks call it."""
    numbers = hosts(control)
    return int((numbers[: control.rank] == numbers[control.rank]).sum())


def hosts(control: Transport) -> npt.NDArray[np.int64]:
    """Return, by rank, a number of its host; all ranks call it."""
    return gather(control, _digest(f"{_machine()}/{socket.gethostname()}"))


def _tell(control: Transport, own: Own) -> npt.NDArray[np.int64]:
    """Return, for every rank: has a device, has NCCL, which device (a digest)."""
    rows = [int(own.device is not None), int(own.nccl is not None), 0]
    if own.device is not None:
        rows[2] = _digest(f"{_machine()}/{own.device.bus}")
    return np.stack([gather(control, value) for value in rows], axis=1)


def _refusal(table: npt.NDArray[np.int64]) -> str:
    """Say why NCCL cannot be used, empty where it can."""
    without = [rank for rank, has in enumerate(table[:, 1]) if not has]
    if without:
        return f"{in_words(without)} cannot load libnccl.so.2, which torch or nvidia-nccl brings"
    for rank, device in enumerate(table[:, 2]):
        sharing = np.flatnonzero(table[:, 2] == device).tolist()
        if sharing != [rank]:
            return f"{in_words(sharing)} share a device, and NCCL wants one each"
    return ""


def _plain(transport: str, control: Transport, own: Own, without: list[int]) -> Transport:
    if transport == "nccl":
        raise ZcommError(f"transport 'nccl': {_lacking(own, control, without)}")
    if own.device is not None:
        logger.warning("device cpu on all ranks: %s no CUDA device", _have(without))
    return control


def _lacking(own: Own, control: Transport, without: list[int]) -> str:
    return own.reason if control.rank in without else f"{_have(without)} no CUDA device"


def _have(ranks: list[int]) -> str:
    return in_words(ranks) + (" has" if len(ranks) == 1 else " have")


def gather(control: Transport, value: int) -> npt.NDArray[np.int64]:
    """Return one number of every rank."""
    rows = np.full((control.size, 1), value, np.int64)
    others = [rank for rank in range(control.size) if rank != control.rank]
    own = rows[control.rank].view(np.uint8)
    control.exchange(
        dict.fromkeys(others, own), {rank: rows[rank].view(np.uint8) for rank in others}
    )
    return rows[:, 0]


def gather_text(control: Transport, text: str) -> list[str]:
    """Return one text of every rank; all ranks call it."""
    mine = text.encode()
    sizes = gather(control, len(mine)).tolist()
    longest = max(sizes)
    if longest == 0:
        return [""] * control.size
    rows = np.zeros((control.size, longest), np.uint8)
    rows[control.rank, : len(mine)] = np.frombuffer(mine, np.uint8)
    others = [rank for rank in range(control.size) if rank != control.rank]
    control.exchange(
        dict.fromkeys(others, rows[control.rank]), {rank: rows[rank] for rank in others}
    )
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def _machine() -> str:
    """Return what containers of one machine share and machines of one name do not."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
