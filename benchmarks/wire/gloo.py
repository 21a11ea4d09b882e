"""gloo through torch.distributed, among the ranks that MPI started.

torch has two calls for a gather and a reduce-scatter, of one tensor and of a list, which gloo does
differently; both are measured, and the better one is what others are compared with.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zcomm import launcher

_NAME_NBYTES = 64
Call = Callable[[], object]


class Gloo:
    """A process group of all ranks. Collective: made and closed on all of them."""

    def __init__(self) -> None:
        world = launcher.world()
        # The store of rank 0 waits at a port that the system chooses.
        host = np.zeros(_NAME_NBYTES, np.uint8)
        port = np.zeros(1, np.int64)
        store: Any = None
        if world.rank == 0:
            name = socket.gethostname().encode()[:_NAME_NBYTES]
            host[: len(name)] = np.frombuffer(name, np.uint8)
            text = name.decode()
            store = dist.TCPStore(text, 0, world.size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            port[0] = store.port
        world.Bcast(host)
        world.Bcast(port)
        if store is None:
            text = bytes(host).rstrip(b"\0").decode()
            store = dist.TCPStore(text, int(port[0]), world.size, is_master=False)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        self._size = world.size

    def ways(self, operation: str, source: torch.Tensor, out: torch.Tensor) -> dict[str, Call]:
        """Return the calls by name; for all_reduce ``out`` is what it works on."""
        match operation:
            case "all_gather":
                one, outs = _newest("all_gather_single", "all_gather_into_tensor"), self._parts(out)
                return {
                    "gloo tensor": lambda: one(out, source),
                    "gloo list": lambda: dist.all_gather(outs, source),
                }
            case "reduce_scatter":
                one, parts = (
                    _newest("reduce_scatter_single", "reduce_scatter_tensor"),
                    self._parts(source),
                )
                return {
                    "gloo tensor": lambda: one(out, source),
                    "gloo list": lambda: dist.reduce_scatter(out, parts),
                }
            case _:
                return {"gloo": lambda: dist.all_reduce(out)}

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(x.view(self._size, -1).unbind())

    def close(self) -> None:
        """Leave the group; all ranks do."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group()


def connect() -> Gloo | None:
    """Make the group; None where torch was built without gloo. Collective."""
    return Gloo() if dist.is_available() and dist.is_gloo_available() else None


def _newest(*names: str) -> Callable[..., object]:
    """Return the first function that this torch has: 2.13 has renamed some."""
    found: Callable[..., object] = next(
        getattr(dist, name) for name in names if hasattr(dist, name)
    )
    return found
