"""How torch.distributed comes to know "zcomm": the name, and a rendezvous that asks MPI.

torch meets at MASTER_ADDR and MASTER_PORT (``env://``). A job that an MPI launcher started and that
has neither meets through MPI instead, whatever the backend; every other job as before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import Store

NAME = "zcomm"
Meeting = tuple[Store, int, int]


def register() -> None:
    """Register the backend and the rendezvous, once."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    # torch.distributed.rendezvous is the function; the module of that name holds the handlers.
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers["env"] = _meet(handlers["env"])


def _create(opts: Any, options: Any) -> dist.ProcessGroup:
    from zcomm.torch.backend import create

    return create(opts, options)


def _meet(before: Callable[..., Iterator[Meeting]]) -> Callable[..., Iterator[Meeting]]:
    """Return torch's handler of ``env://``, with MPI where the variables are not set."""

    def handler(url: str, timeout: timedelta, **more: Any) -> Iterator[Meeting]:
        from zcomm.torch import launch

        if "MASTER_PORT" in os.environ or not launch.by_mpi():
            yield from before(url, timeout=timeout, **more)
            return
        said = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
        store, rank, size = launch.meet(timeout)
        if (said.get("rank", rank), said.get("world_size", size)) != (rank, size):
            raise ValueError(
                f"init_process_group was given {said}, but MPI says rank {rank} of {size}: leave "
                "both out, or set MASTER_ADDR and MASTER_PORT"
            )
        yield store, rank, size

    return handler
