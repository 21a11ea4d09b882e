"""Who started this process, as far as torch.distributed asks, and how ranks meet under MPI."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any

import numpy as np
from torch._C._distributed_c10d import Store, TCPStore

from zcomm import launcher
from zcomm.placement import BOOT_ID

_MPI_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
_ADDRESS_NBYTES = 256


def by_mpi() -> bool:
    """Tell whether an MPI launcher started this process, without loading MPI.

    A process that torchrun started is not, whatever started torchrun.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return False
    loaded = sys.modules.get("mpi4py.MPI")
    started = loaded is not None and loaded.Is_initialized() and loaded.COMM_WORLD.Get_size() > 1
    return bool(started) or any(name in os.environ for name in _MPI_RANKS)


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Return a store that all ranks of the MPI job share, this rank's number, and their number."""
    world = launcher.world()
    rank, size = world.Get_rank(), world.Get_size()
    store: Store | None = None
    port = 0
    if rank == 0:
        # Port 0: the system chooses. Others cannot come before they are told which.
        store = TCPStore("localhost", 0, size, True, timeout, wait_for_workers=False)
        port = store.port
    address = _address(world)
    number = np.array([port], np.int64)
    world.Bcast(number, 0)
    if store is None:
        store = TCPStore(address, int(number[0]), size, False, timeout, wait_for_workers=False)
    return store, rank, size


def _address(world: Any) -> str:
    """Return where the others find rank 0: this machine where all share it, else its host name."""
    own = _bytes(_machine())
    machines = np.empty((world.Get_size(), own.size), np.uint8)
    world.Allgather(own, machines)
    if (machines == machines[0]).all():
        return "localhost"
    name = _bytes(os.environ.get("MASTER_ADDR") or socket.getfqdn())
    world.Bcast(name, 0)
    return bytes(name).rstrip(b"\0").decode()


def _machine() -> str:
    """Return what processes that reach each other as localhost have in common."""
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return f"{boot}/{socket.gethostname()}"


def _bytes(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(
        text.encode()[:_ADDRESS_NBYTES].ljust(_ADDRESS_NBYTES, b"\0"), np.uint8
    ).copy()
