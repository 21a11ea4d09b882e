"""Blocks of a step one after the other: while one is updated, the next is read, the last written.

At most three are in memory. A reader must not assume that a block is on disk when the next one is
opened; it is when :meth:`Pipeline.finish` has returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from zero.offload.blocks import Block
from zero.offload.opened import InMemory, Ledger, OnDisk, Opened
from zero.offload.stepping import States
from zero.unit import Buffer

AHEAD = 2
"""The block that is updated, and the one that is read."""


@dataclass(frozen=True, eq=False)
class Job:
    """A block of a buffer that a step needs: to be updated, or for its masters only."""

    buffer: Buffer
    index: int
    block: Block
    has_gradient: bool


class Pipeline:
    """Opens the blocks of jobs in their order."""

    def __init__(self, jobs: Iterable[Job], states: MutableMapping[Tensor, States]) -> None:
        self._jobs = iter(jobs)
        self._states = states
        self._ahead: deque[Opened] = deque()
        self._behind: deque[Opened] = deque()
        self._ledger = Ledger()

    @contextmanager
    def next(self) -> Iterator[Opened]:
        """Open the next block; on leaving, it may be written behind what follows."""
        self._begin()
        opened = self._ahead.popleft()
        yield opened
        self._behind.append(opened)
        while len(self._behind) > 1:
            self._behind.popleft().finish()

    def _begin(self) -> None:
        while len(self._ahead) < AHEAD:
            job = next(self._jobs, None)
            if job is None:
                return
            self._ahead.append(self._made(job))

    def _made(self, job: Job) -> Opened:
        if job.buffer.columns is None:
            return InMemory(job.buffer, job.block, self._states, self._ledger)
        return OnDisk(
            job.buffer, job.index, self._states, self._ledger, values_only=not job.has_gradient
        )

    def finish(self) -> None:
        """Wait for what is written, and put the states in place: the step is done."""
        while self._behind:
            self._behind.popleft().finish()
        self._ledger.commit(self._states)
