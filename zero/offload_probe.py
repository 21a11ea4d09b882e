"""How fast this machine is at what offload does: a quick look, of a few seconds.

The disk is measured by what uses it, ``zero.offload.Swap``, checksums included: first written, then
read, then read and written at once as in a step. The update is torch's fused AdamW on a block, in
as many threads as torch has here.

A reader must not assume that a rate holds for long: disks have caches, virtual ones most of all.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import zcomm
from zcomm import Communicator
from zero.offload import Extent, Pending, Swap

BLOCK_NBYTES = 1 << 23
REPEATS = 3


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second; ``mixed`` counts both directions. ``free`` is in bytes."""

    write: float
    read: float
    mixed: float
    free: int


def probe_disk(path: str | os.PathLike[str], nbytes: int = 1 << 28) -> DiskRates:
    """Measure the disk of a folder with ``nbytes`` of data, which are gone afterwards.

    Raises:
        OffloadError: nothing can be written there.
    """
    count = max(4, nbytes // BLOCK_NBYTES)
    with Swap(path, rank=0) as swap:
        extents = [swap.allocate(f"probe.{number}", BLOCK_NBYTES) for number in range(count)]
        buffers = [swap.buffer(BLOCK_NBYTES).random_() for _ in range(3)]
        moves = partial(_move, swap, extents, buffers)
        write = _rate(lambda: moves(reads=False, writes=True), count)
        read = _rate(lambda: moves(reads=True, writes=False), count)
        mixed = _rate(lambda: moves(reads=True, writes=True), 2 * count)
    return DiskRates(write, read, mixed, shutil.disk_usage(path).free)


def _rate(run: Callable[[], None], num_blocks: int) -> float:
    return num_blocks * BLOCK_NBYTES / _seconds(run)


def _seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _move(
    swap: Swap, extents: list[Extent], buffers: list[Tensor], *, reads: bool, writes: bool
) -> None:
    """Go through the extents as a step does: read one, while the one before is written."""
    count = len(extents)
    reading: dict[int, Pending] = {}
    writing: dict[int, Pending] = {}
    for ahead in range(count + 1):
        slot = ahead % len(buffers)
        if slot in writing:
            writing.pop(slot).wait()
        if reads and ahead < count:
            reading[slot] = swap.read(extents[ahead], buffers[slot])
        if ahead:
            last = (ahead - 1) % len(buffers)
            if last in reading:
                reading.pop(last).wait()
            if writes:
                writing[last] = swap.write(extents[ahead - 1], buffers[last])
    for pending in writing.values():
        pending.wait()


def probe_update(num_ranks: int) -> float:
    """Return the elements per second that each of ``num_ranks`` on this machine steps by AdamW."""
    # More than a cache holds: blocks come from the disk.
    values = torch.zeros(1 << 24).requires_grad_()
    values.grad = torch.ones_like(values)
    optimizer = torch.optim.AdamW([values], fused=True)
    optimizer.step()
    alone = values.numel() / _seconds(optimizer.step)
    return alone * _cores(num_ranks)


def probe_send(num_ranks: int) -> float:
    """Return the bytes per second that each rank of one node receives; ranks are threads here.

    That is what two gathers and a reduction of 16-bit values bring, over all the time they take.
    """
    if num_ranks == 1:
        return math.inf

    def program(comm: Communicator) -> float:
        shard = torch.zeros(BLOCK_NBYTES // 2, dtype=torch.bfloat16)
        full = torch.zeros(shard.numel() * comm.size, dtype=torch.bfloat16)

        def volumes() -> None:
            comm.all_gather(shard)
            comm.all_gather(shard)
            comm.reduce_scatter(full, op="avg")

        return 3 * (full.nbytes - shard.nbytes) / _seconds(volumes)

    return min(zcomm.run_local(program, num_ranks))


def _cores(num_ranks: int) -> float:
    """Return which part of this process's threads each rank has when all compute."""
    cores = len(os.sched_getaffinity(0))
    return min(1.0, cores / (num_ranks * torch.get_num_threads()))
