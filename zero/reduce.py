"""Gradients: from autograd to the optimizer's tensors, on one path for all stages.

1. ``collect`` moves each parameter's gradient into its unit's local memory, in the parameters'
   dtype; under no_sync, and in the backward after it, it is added there in float32.
2. ``reduce`` averages a unit over the ranks; owners receive float32.
3. The mean is added to the ``.grad`` of the owners' masters. Where a step has one backward it is
   rounded to ``grad_dtype`` at once, else the sum stays float32 and is rounded before the step.
4. ``settle`` removes the gradient of parameters that no rank used.

With ``prefetch`` a reduction is issued and *lands* (step 3) when the next one was issued, or at the
end of the backward: the gradients of one unit are on their way while those of the next are made.

Whether a step has one backward is known from the step before. The first step keeps float32: the
optimizer's states, which need more memory, do not exist yet.

A reader must not assume that ``.grad`` of a master has the dtype of the master.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zcomm import Communicator
from zcomm.errors import CheckpointError
from zcomm.seeds import derive
from zcomm.work import Work
from zero.algorithms import Algorithms
from zero.config import Config
from zero.hops import two_hops
from zero.places import Arrivals
from zero.pool import Pool
from zero.slices import Slices
from zero.unit import Buffer, Master, Unit, split

logger = logging.getLogger("zcomm")


@dataclass(frozen=True, eq=False)
class Reduction:
    """A unit's gradients on their way: ``fulls`` are read until ``works`` have ended."""

    buffers: tuple[Buffer, ...]
    fulls: list[Tensor]
    means: list[Tensor]
    slices: bool
    works: tuple[Work[object], ...]


class Reducer:
    """Owns the gradients between autograd and the optimizer.

    Attributes:
        hops: inside the node and between nodes, where these are two operations.
        slices: what waits for the second of them.
        pool: lends the memory of local gradients, but for what stays.
        synchronise: whether backward reduces; no_sync turns it off.
        num_reductions: backwards reduced since the last step.
    """

    def __init__(self, comm: Communicator, config: Config, units: Sequence[Unit]) -> None:
        self._comm = comm
        self._config = config
        self._codecs = config.grads_codecs(len(comm.topology.levels))
        self._reduce_dtype = None if config.reduce_dtype == "param" else "float32"
        self._units = units
        self._buffers = [buffer for unit in units for buffer in unit.trainable]
        self._used: dict[Buffer, list[bool]] = {}
        self._fresh: list[tuple[Buffer, Master]] = []
        self._under_way: deque[Reduction] = deque()
        self._overlap = config.prefetch > 0 and comm.size > 1
        self._in_float32 = False
        self._keep_float32 = True
        self._warned = False
        self._algorithms = Algorithms()
        self._arrivals = Arrivals()
        self.hops = two_hops(comm, config, self._algorithms)
        self.slices = Slices(self._buffers)
        self.pool = Pool()
        self.synchronise = True
        self.num_reductions = 0

    def grad_dtype(self, buffer: Buffer) -> torch.dtype:
        """Return the dtype of gradients between backward and step."""
        if self._config.grad_dtype == "param":
            return buffer.layout.dtype
        return torch.float32

    def begin(self) -> None:
        """Prepare for a backward."""
        if not self.synchronise:
            self._in_float32 = True

    def collect(self, buffer: Buffer, index: int) -> None:
        """Move the gradient that autograd left on a parameter to the unit's local memory."""
        parameter = buffer.parameters[index]
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return
        if grad.is_sparse:
            grad = grad.to_dense()
        if buffer.local is None:
            buffer.local = self._local_memory(buffer)
        place = buffer.gradient_view(buffer.local, index)
        if buffer.written[index]:
            place.add_(grad)
        else:
            place.copy_(grad)
        buffer.written[index] = True

    def reduce(self, unit: Unit) -> None:
        """Average the local gradients of a unit over all ranks, to be added to the masters'.

        Parameters without a gradient on this rank count as zero. What was issued before lands.
        """
        buffers = unit.trainable
        if not buffers:
            return
        fulls = [self._complete(buffer) for buffer in buffers]
        seed = self._seed(unit)
        if self.hops is None:
            means, works = self._issue(unit, fulls, seed)
        else:
            means, works = self.hops.reduce(unit, fulls, seed, async_op=self._overlap)
        slices = self.hops is not None and self.hops.accumulate
        for buffer in buffers:
            self._used[buffer] = self._used_in(buffer)
            buffer.written = [False] * len(buffer.written)
            buffer.local = None
        self._under_way.append(Reduction(buffers, fulls, means, slices, works))
        self._land(1 if self._overlap else 0)

    def _seed(self, unit: Unit) -> int:
        return derive(self._config.seed, unit.number, unit.version, self.num_reductions)

    def _issue(
        self, unit: Unit, fulls: Sequence[Tensor], seed: int
    ) -> tuple[list[Tensor], tuple[Work[object], ...]]:
        layouts = [
            buffer.layout.gradients(full.dtype)
            for buffer, full in zip(unit.trainable, fulls, strict=True)
        ]
        means = [
            torch.empty(layout.shard_numel(self._comm.rank), device=full.device)
            for layout, full in zip(layouts, fulls, strict=True)
        ]
        codecs = self._codecs if unit.quantise else None
        work = self._comm.reduce_layout(
            fulls,
            means,
            layouts,
            op="avg",
            codec=codecs,
            algorithm=self._algorithms.choose(
                self._comm, unit, layouts, codecs, self._reduce_dtype, op="avg"
            ),
            reduce_dtype=self._reduce_dtype,
            min_numel=0,
            label=unit.label,
            seed=seed,
            async_op=self._overlap,
        )
        return means, (work,) if self._overlap else ()

    def _land(self, left: int = 0) -> None:
        """Wait for reductions, the oldest first, until so many are left; add what they give."""
        while len(self._under_way) > left:
            reduction = self._under_way.popleft()
            for work in reduction.works:
                work.wait()
            for buffer, full, mean in zip(
                reduction.buffers, reduction.fulls, reduction.means, strict=True
            ):
                if full is not buffer.home:
                    self.pool.give(full)
                if not reduction.slices:
                    self._add(buffer, mean)
                else:
                    self.slices.add(buffer, mean)

    def settle(self) -> None:
        """End a backward whose units were reduced: agree with all ranks on what was used.

        The gradient of a parameter that no rank used stays None. A unit that received gradients
        after it was reduced, on any rank, is reduced once more.
        """
        self._land()
        flags = [flag for buffer in self._buffers for flag in self._used_in(buffer)]
        late = [any(b.local is not None for b in unit.trainable) for unit in self._units]
        anywhere = any_rank(self._comm, [*flags, *late])
        for unit, again in zip(self._units, anywhere[len(flags) :], strict=True):
            if again:
                self.reduce(unit)
        self._land()
        self._arrivals.wait()
        start = 0
        used: dict[Buffer, Sequence[bool]] = {}
        for buffer in self._buffers:
            used[buffer] = anywhere[start : start + len(buffer.parameters)]
            start += len(buffer.parameters)
        self.slices.note_used(used)
        for buffer, master in self._fresh:
            if not used[buffer][master.run.slot]:
                master.tensor.grad = None
        self._forget_backward()
        if any(anywhere):
            self._count()

    def _finish_slices(self) -> None:
        """``accumulate="node"``: reduce between nodes what the micro-batches left in slices."""
        for unit in self._units if self.hops is not None and self.slices.held else ():
            slices = self.slices.take(unit)
            if slices and self.hops is not None:
                means, _ = self.hops.finish(unit, slices, self._seed(unit))
                for buffer, mean in zip(unit.trainable, means, strict=True):
                    self.slices.deliver(buffer, mean)

    def clear(self) -> None:
        """Forget all gradients that did not reach the masters."""
        self.drop()
        self.slices.clear()

    def _forget_backward(self) -> None:
        self._fresh.clear()
        self._used.clear()
        self._in_float32 = False

    def _count(self) -> None:
        self.num_reductions += 1
        if self.num_reductions == 2 and not self._keep_float32 and not self._warned:
            self._warned = True
            logger.info(
                "gradient accumulation began: in this step the first backward was rounded to the"
                " parameters' dtype, later steps keep float32"
            )

    def save_state(self) -> Mapping[str, Any]:
        """See :class:`~zero.engine.StateProvider`; local gradients are those of no_sync."""
        local = {
            f"local.{index}": buffer.local
            for index, buffer in enumerate(self._buffers)
            if buffer.local is not None
        }
        return {
            "num_reductions": self.num_reductions,
            "keep_float32": self._keep_float32,
            "in_float32": self._in_float32,
            "written": [buffer.written for buffer in self._buffers],
            **self._algorithms.save_state(),
            **self.slices.save_state(),
            **({} if self.hops is None else self.hops.save_state(self._buffers)),
            **local,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`~zero.engine.StateProvider`."""
        self.clear()
        self._algorithms.load_state(state)
        self.slices.load_state(state)
        if self.hops is not None:
            self.hops.load_state(state, self._buffers)
        self.num_reductions = state["num_reductions"]
        self._keep_float32 = state["keep_float32"]
        self._in_float32 = state["in_float32"]
        for index, buffer in enumerate(self._buffers):
            local = state.get(f"local.{index}")
            if local is not None:
                home = self.home(buffer)
                stays = home is not None and home.dtype == local.dtype
                size = local.numel(), local.dtype
                place = home if stays else self.pool.take(*size, buffer.device)
                assert place is not None
                buffer.local = place.copy_(local)
                buffer.written = list(state["written"][index])

    def load_foreign(self, states: Sequence[Mapping[str, Any]]) -> None:
        """See :class:`~zero.engine.StateProvider`.

        Raises:
            CheckpointError: gradients that the ranks had not reduced yet.
        """
        flags = (used or () for s in states for used in (*s["written"], *s["slices"]))
        if any(map(any, flags)):
            raise CheckpointError(
                "the checkpoint was saved with gradients that its ranks had not reduced (no_sync,"
                " accumulate='node'): load it with the same ranks, topology and configuration"
            )
        none = [None] * len(self._buffers)
        self.load_state({**states[0], "in_float32": False, "slices": none, "algorithms": {}})

    def drop(self) -> None:
        """Forget the local gradients of a backward that did not finish."""
        self._land()
        self._arrivals.wait()
        for buffer in self._buffers:
            if buffer.local is not None and buffer.local is not buffer.home:
                self.pool.give(buffer.local)
            buffer.local = None
            buffer.written = [False] * len(buffer.written)
        self._forget_backward()

    def round(self) -> None:
        """Give the gradients of this rank's masters their dtype, after the last reduction.

        A collective where slices wait for it.
        """
        self._finish_slices()
        for buffer in self._buffers:
            for master in buffer.own_masters():
                grad = master.tensor.grad
                if grad is not None and grad.dtype != self.grad_dtype(buffer):
                    master.tensor.grad = self._rounded(buffer, master, grad)

    def stepped(self) -> None:
        """Learn from a step how many backwards the next one will have."""
        if self.num_reductions:
            self._keep_float32 = self.num_reductions > 1
        self.num_reductions = 0

    def home(self, buffer: Buffer) -> Tensor | None:
        """Return the gradient memory that stays: stages 0 and 1, unless gradients are elsewhere."""
        other = buffer.offloaded or self.grad_dtype(buffer) != buffer.layout.dtype
        if self._config.stage > 1 or other:
            return None
        if buffer.home is None:
            buffer.home = buffer.allocate_gradient(buffer.layout.dtype)
        return buffer.home

    def _local_memory(self, buffer: Buffer) -> Tensor:
        dtype = torch.float32 if self._in_float32 else buffer.layout.dtype
        home = self.home(buffer)
        if home is None or home.dtype != dtype:
            return self.pool.take(buffer.layout.gradient_numel, dtype, buffer.device)
        if any(full is home for reduction in self._under_way for full in reduction.fulls):
            self._land()
        for master in buffer.own_masters():
            grad = master.tensor.grad
            if grad is not None and _shares(grad, home):
                master.tensor.grad = grad.to(torch.float32, copy=True)
        return home

    def _complete(self, buffer: Buffer) -> Tensor:
        if buffer.local is None:
            buffer.local = self._local_memory(buffer)
        for index, slot in enumerate(buffer.layout.slots):
            if slot.trainable and not buffer.written[index]:
                buffer.gradient_view(buffer.local, index).zero_()
        return buffer.local

    def _used_in(self, buffer: Buffer) -> list[bool]:
        before = self._used.get(buffer, [False] * len(buffer.parameters))
        return [a or b for a, b in zip(before, buffer.written, strict=True)]

    def _add(self, buffer: Buffer, mean: Tensor) -> None:
        dtype = self.grad_dtype(buffer)
        at_home = self.home(buffer) is not None
        only = not self._keep_float32 and self.num_reductions == 0
        if only and not at_home:
            mean = mean.to(dtype)
        if buffer.offloaded:
            mean = self._arrivals.bring(mean)
        round_now = at_home and (only or dtype == torch.float32)
        masters = buffer.own_masters()
        parts = split(mean, [master.run for master in masters])
        for master, part in zip(masters, parts, strict=True):
            grad = master.tensor.grad
            if grad is not None and buffer.offloaded:
                self._arrivals.wait()
            if grad is None:
                self._fresh.append((buffer, master))
                master.tensor.grad = self._rounded(buffer, master, part) if round_now else part
            elif grad.dtype == torch.float32:
                grad.add_(part)
            else:
                master.tensor.grad = grad.to(torch.float32).add_(part)

    def _rounded(self, buffer: Buffer, master: Master, grad: Tensor) -> Tensor:
        home = self.home(buffer)
        if home is not None:
            return buffer.gradient_run(home, master.run).copy_(grad)
        return grad.to(self.grad_dtype(buffer))


def any_rank(comm: Communicator, flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether it is set on any rank; all ranks pass as many."""
    packed = np.packbits(np.array(flags, np.bool_))
    words = np.zeros(-(-len(packed) // 8), np.int64)
    words.view(np.uint8)[: len(packed)] = packed
    rows = comm.all_gather_values(words)
    either = np.bitwise_or.reduce(rows, axis=0)
    return [bool(flag) for flag in np.unpackbits(either.view(np.uint8))[: len(flags)]]


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
