"""The optimizer's step, block by block (ZeRO-Infinity, arXiv 2104.07857, section 5.2.2).

The ``step`` of any optimizer that treats elements alone is called once for each block, with the
pieces of that block in its groups and nothing else; settings, hooks and what it returns stay as
they are.

1. Begin to read block k + 1, and wait for block k.
2. Give its pieces their gradients, float32 and without the loss scale, and step them.
3. Pass the new values on in the parameters' dtype.
4. Begin to write block k, and wait for block k - 1.
5. After the last block of a unit its parameters are published.

Where blocks would save nothing, the step is called once for all: a fused step of masters in memory
whose gradients are float32 already needs none of its own.

What a reader must not assume: that a step which raised left the states as they were. Nothing can be
done with them any more then, see :class:`~zero.offload.drive.Faults`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import Communicator
from zero.edits import differs, slot_was_edited
from zero.offload.blocks import cut_blocks
from zero.offload.drive import Faults
from zero.offload.opened import gradient, part
from zero.offload.pipeline import Job, Pipeline
from zero.offload.stepping import States, Stepping, refuse_state_dict, replace_step
from zero.offload.told import told
from zero.publish import Publisher
from zero.unit import Buffer, Unit, check_hidden

Pieces = Sequence[tuple[Tensor, States]]

IN_MEMORY = 4
"""Blocks of masters that stay in memory are so many times as large: a step in fewer calls, and of
their elements only the gradient is extra memory."""


class BlockStep:
    """Steps the masters of all units block by block.

    Attributes:
        inverse: what gradients are multiplied by: one over the loss scale.
        skipped: whether the step that comes changes nothing.
    """

    def __init__(
        self,
        comm: Communicator,
        units: Sequence[Unit],
        publisher: Publisher,
        faults: Faults,
        *,
        stage: int,
        block_numel: int,
    ) -> None:
        self._comm = comm
        self._units = [unit for unit in units if unit.trainable]
        self._publisher = publisher
        self._faults = faults
        self._sends = stage < 3
        self._blocks = {
            buffer: cut_blocks([m.run.numel for m in buffer.masters], IN_MEMORY * block_numel)
            if buffer.columns is None
            else buffer.columns.blocks
            for unit in units
            for buffer in unit.trainable
        }
        self.inverse = 1.0
        self.skipped = False

    def attach(self, optimizer: Optimizer) -> None:
        """Put the step in blocks in the place of the optimizer's own.

        Raises:
            ValueError: somebody else replaced the step of this object before.
        """
        replace_step(optimizer, self._run)
        if any(buffer.columns is not None for buffer in self._blocks):
            refuse_state_dict(optimizer)

    def check(self) -> None:
        """Raise OffloadError where a step before ended in its middle, ValueError after a write."""
        self._faults.check()
        for buffer in self._blocks:
            if buffer.columns is not None:
                for master in buffer.masters:
                    check_hidden(master.tensor, buffer.layout.slots[master.run.slot].name)

    def _run(self, stepping: Stepping) -> Any:
        with told(self._comm), self._faults.watch():
            if not self.skipped and self._blocks_save_nothing(stepping.optimizer):
                self._step_whole(stepping)
                return stepping.result
            jobs = [[] if self.skipped else self._jobs(unit) for unit in self._units]
            if not any(job.has_gradient for found in jobs for job in found):
                stepping.step([], [])
            if not self.skipped:
                self._step(jobs, stepping)
            return stepping.result

    def _blocks_save_nothing(self, optimizer: Optimizer) -> bool:
        grads = [master.tensor.grad for buffer in self._blocks for master in buffer.masters]
        return (
            all(buffer.columns is None for buffer in self._blocks)
            and all(grad is None or grad.dtype == torch.float32 for grad in grads)
            and all(group.get("fused") for group in optimizer.param_groups)
        )

    def _step_whole(self, stepping: Stepping) -> None:
        for buffer in self._blocks:
            for master in buffer.masters:
                if self.inverse != 1 and master.tensor.grad is not None:
                    master.tensor.grad.mul_(self.inverse)
        stepping.step_whole()
        for unit in self._units:
            self._publisher.publish(unit)

    def _step(self, jobs: Sequence[Sequence[Job]], stepping: Stepping) -> None:
        pipeline = Pipeline([job for found in jobs for job in found], stepping.optimizer.state)
        for unit, found in zip(self._units, jobs, strict=True):
            given = {job.buffer: self._is_complete(job.buffer, found) for job in found}
            values = self._publisher.begin(unit, given)
            for job in found:
                with pipeline.next() as opened:
                    pieces = opened.open()
                    edited = self._absorb(unit, job, pieces)
                    if job.has_gradient:
                        opened.close(self._step_block(job, pieces, stepping))
                    elif edited:
                        opened.close([{} for _ in pieces])
                    if job.buffer in values:
                        _pass_on(job, pieces, values[job.buffer].places)
            self._publisher.publish(unit, values)
        pipeline.finish()

    def _jobs(self, unit: Unit) -> list[Job]:
        """Return the blocks of a unit that have a gradient.

        Where parameters are not the masters rounded, those that have none are needed too: their
        values are sent again.
        """
        found = []
        decoded = self._sends and not self._publisher.is_exact(unit)
        for buffer in unit.trainable:
            for index, block in enumerate(self._blocks[buffer]):
                masters = (buffer.masters[piece.master] for piece in block.pieces)
                given = any(master.tensor.grad is not None for master in masters)
                if given or (decoded and buffer.columns is not None):
                    found.append(Job(buffer, index, block, given))
        return found

    def _is_complete(self, buffer: Buffer, jobs: Sequence[Job]) -> bool:
        """Tell whether all blocks of a buffer are among the jobs."""
        return sum(job.buffer is buffer for job in jobs) == len(self._blocks[buffer])

    def _step_block(self, job: Job, pieces: Pieces, stepping: Stepping) -> list[States]:
        masters = [job.buffer.masters[piece.master] for piece in job.block.pieces]
        for master, piece, (tensor, _) in zip(masters, job.block.pieces, pieces, strict=True):
            tensor.grad = gradient(master, piece, self.inverse)
        after = stepping.step([master.tensor for master in masters], pieces)
        for tensor, _ in pieces:
            tensor.grad = None
        return after

    def _absorb(self, unit: Unit, job: Job, pieces: Pieces) -> bool:
        """Stages 1 and 2: carry edits of parameters to masters on disk, see zero.edits."""
        if not self._sends or job.buffer.columns is None:
            return False
        found = False
        exact = self._publisher.is_exact(unit)
        for piece, (tensor, _) in zip(job.block.pieces, pieces, strict=True):
            master = job.buffer.masters[piece.master]
            held = part(master.held, piece).to(tensor.device)
            if exact:
                changed = differs(held, tensor.to(held.dtype))
            else:
                changed = torch.full_like(
                    held, slot_was_edited(job.buffer, master.run.slot), dtype=torch.bool
                )
            if bool(changed.any()):
                found = True
                tensor.copy_(torch.where(changed, held.to(tensor.dtype), tensor))
        return found


def _pass_on(job: Job, pieces: Pieces, places: Sequence[Tensor]) -> None:
    """Round a block's masters to the places of their values."""
    for piece, (tensor, _) in zip(job.block.pieces, pieces, strict=True):
        part(places[piece.master], piece).copy_(tensor)
