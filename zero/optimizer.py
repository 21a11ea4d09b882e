"""The sharded step: hooks around the ``step`` of any elementwise torch optimizer.

Before the step: in-place edits of parameters reach the masters, gradients are rounded, all ranks
agree that they are finite, stage 0 gathers them. A non-finite gradient takes all gradients away,
so that the step changes nothing. After the step the masters become the parameters.

A reader must not assume that ``.grad`` keeps its dtype inside the step: torch's optimizers need the
dtype of the master, float32.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import Communicator, ZcommError
from zero.config import Config
from zero.edits import absorb, was_edited
from zero.gather import Gathering
from zero.offload.drive import Faults
from zero.offload.step import BlockStep
from zero.offload.stepping import Stepping, calls_the_step_of_its_base, replace_step
from zero.offload.told import agreed, told
from zero.places import values_of
from zero.publish import Publisher
from zero.reduce import Reducer, any_rank
from zero.scaling import LossScaler
from zero.tensor_parallel import TensorParallel
from zero.unit import Buffer, Master, Unit, pack

logger = logging.getLogger("zcomm")

CHUNK_NUMEL = 1 << 20


class Stepper:
    """Owns what happens around ``optimizer.step()``.

    Attributes:
        scaler: the scale that gradients carry until the step.
        tensor_parallel: the other ranks that the model is split over, which count in the norm.
        num_skipped: steps that were skipped because a gradient was not finite.
        skipped: whether the last step was.
        unfinished: whether a step is in its middle, or ended there: states are of two steps.
    """

    def __init__(
        self,
        comm: Communicator,
        config: Config,
        units: Sequence[Unit],
        reducer: Reducer,
        publisher: Publisher,
        gathering: Gathering,
        faults: Faults,
        blocks: BlockStep | None = None,
    ) -> None:
        self._comm = comm
        self._config = config
        self._units = units
        self._buffers = [buffer for unit in units for buffer in unit.trainable]
        self._reducer = reducer
        self._publisher = publisher
        self._gathering = gathering
        self._faults = faults
        self._blocks = blocks
        self.tensor_parallel: TensorParallel | None = None
        self._aside: list[tuple[Master, Tensor | None]] = []
        self.scaler = LossScaler(config.loss_scaling)
        self.skipped = False
        self.unfinished = False
        self._consecutive = 0
        self.num_skipped = 0

    def _tell_scale(self) -> None:
        if self._reducer.hops is not None:
            self._reducer.hops.scale = self.scaler.scale

    def attach(self, optimizer: Optimizer) -> None:
        """Register the hooks."""
        self._tell_scale()
        if self._blocks is not None:
            self._blocks.attach(optimizer)
        elif calls_the_step_of_its_base(type(optimizer)):
            replace_step(optimizer, Stepping.step_whole)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def save_state(self) -> Mapping[str, Any]:
        """See :class:`~zero.engine.StateProvider`."""
        return {
            "num_skipped": self.num_skipped,
            "consecutive": self._consecutive,
            **self.scaler.save_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`~zero.engine.StateProvider`."""
        self.num_skipped, self._consecutive = state["num_skipped"], state["consecutive"]
        self.scaler.load_state(state)
        self._tell_scale()

    def load_foreign(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take the counts, which are the same on all ranks, whatever the plan."""
        self.load_state(states[0])

    def own_gradients(self) -> list[Tensor]:
        """Return the rounded gradients that this rank owns, in the order of the model."""
        self._reducer.round()
        masters = [master for buffer in self._buffers for master in buffer.own_masters()]
        return [m.tensor.grad for m in masters if m.tensor.grad is not None]

    def norm(self) -> float:
        """Return the global norm without the loss scale: the same on every rank, in every stage.

        Squares are summed in float64 per run, then per rank, then over ranks, ascending.
        """
        if self.tensor_parallel is not None:
            return self._norm_over_mesh(self.tensor_parallel)
        squares = values_of([squared_norm(grad) for grad in self.own_gradients()])
        rows = self._comm.all_gather_values(np.array([sum(squares)], np.float64))
        return math.sqrt(sum(float(row[0]) for row in rows)) / self.scaler.scale

    def _norm_over_mesh(self, mesh: TensorParallel) -> float:
        """Return the norm of a model that is split over a mesh: what is whole there counts once."""
        self._reducer.round()
        sums = np.zeros(2, np.float64)
        for buffer in self._buffers:
            for master in buffer.own_masters():
                parameter = buffer.parameters[master.run.slot]
                if master.tensor.grad is not None and mesh.counts(parameter):
                    whole = not mesh.is_split(parameter)
                    sums[int(whole)] += float(squared_norm(master.tensor.grad))
        rows = self._comm.all_gather_values(sums)
        of_split, of_whole = (sum(map(float, column)) for column in rows.T)
        return math.sqrt(mesh.total(of_split, of_whole)) / self.scaler.scale

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._comm.size > 1:
            _refuse_scaler(optimizer)
        if self._blocks is not None:
            self._blocks.check()
        args, kwargs = _evaluate_closure(args, kwargs)
        self._gathering.forget_ahead()
        self._gathering.stepped()
        # The step itself finds those of what is on disk, when it reads it.
        self.take_edits(on_disk=False)
        self.skipped = not math.isfinite(self.norm())
        if self._blocks is not None:
            self._blocks.skipped = self.skipped
        if self.skipped:
            self._count_skip()
            for buffer in self._buffers:
                for master in buffer.masters:
                    master.tensor.grad = None
            return args, kwargs
        self._consecutive = 0
        if self._config.stage == 0:
            self.gather_gradients()
        if self._blocks is None:
            self._unscale()
        else:
            self._blocks.inverse = 1 / self.scaler.scale
        self.unfinished = True
        return args, kwargs

    def _unscale(self) -> None:
        """Give the step float32 gradients without the loss scale."""
        inverse = 1 / self.scaler.scale
        for buffer in self._buffers:
            for master in buffer.masters:
                grad = master.tensor.grad
                if grad is None:
                    continue
                if grad.dtype != torch.float32:
                    grad = grad.to(torch.float32)
                    self._set_aside(master, grad)
                if inverse != 1:
                    grad.mul_(inverse)

    def take_edits(self, *, on_disk: bool = True) -> None:
        """Stages 0-2: carry what was done to parameters since the last step to their masters."""
        for unit in self._units:
            exact = self._publisher.is_exact(unit)
            for buffer in unit.trainable:
                # Torch does not see edits of p.data; without a codec a comparison does.
                if buffer.full is None or not (on_disk or buffer.columns is None):
                    continue
                if exact or was_edited(buffer):
                    absorb(buffer, exact=exact)

    def take_seen_edits(self) -> None:
        """Stages 0-2 with a codec: before values are compared with other ones than masters."""
        for unit in self._units:
            if not self._publisher.is_exact(unit):
                for buffer in unit.trainable:
                    if buffer.full is not None and not buffer.is_cut and was_edited(buffer):
                        absorb(buffer, exact=False)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for master, grad in self._aside:
            master.tensor.grad = grad
        self._aside.clear()
        self._reducer.stepped()
        if not self.skipped:
            self.scaler.update(skipped=False)
        self._tell_scale()
        with told(self._comm, self._faults):
            if not self.skipped and self._blocks is None:
                for unit in self._units:
                    self._publisher.publish(unit)
            for unit in self._units:
                for buffer in unit.buffers:
                    if buffer.stored is not None:
                        buffer.stored.settle()
            if self._config.on_disk:
                agreed(self._comm)
        self.unfinished = False

    def _set_aside(self, master: Master, grad: Tensor) -> None:
        self._aside.append((master, master.tensor.grad))
        master.tensor.grad = grad

    def _count_skip(self) -> None:
        self.num_skipped += 1
        self._consecutive += 1
        self.scaler.update(skipped=True)
        logger.info(
            "step skipped: a gradient is not finite (%d so far); the loss scale is %g now",
            self.num_skipped,
            self.scaler.scale,
        )
        if self._consecutive > self._config.max_skipped_steps:
            raise ZcommError(
                f"{self._consecutive} steps in a row had gradients that are not finite;"
                f" max_skipped_steps is {self._config.max_skipped_steps}"
            )

    def gather_gradients(self) -> None:
        """Stage 0: give every rank the gradients of all runs."""
        flags = [flag for buffer in self._buffers for flag in slots_with_gradient(buffer)]
        anywhere = iter(any_rank(self._comm, flags))
        for unit in self._units:
            fulls = gather_gradients(self._comm, self._reducer, unit)
            for buffer, full in zip(unit.trainable, fulls, strict=True):
                present = [next(anywhere) for _ in buffer.parameters]
                for master in buffer.masters:
                    given = master.tensor.grad is not None
                    if present[master.run.slot] and not (given and master.owner == buffer.rank):
                        grad = buffer.gradient_run(full, master.run)
                        self._set_aside(master, grad.to(torch.float32))


def gather_gradients(comm: Communicator, reducer: Reducer, unit: Unit) -> list[Tensor]:
    """Gather the rounded gradients of a unit: gradient memory of each trainable buffer.

    Runs without a gradient count as zero. A collective.
    """
    shards, fulls, layouts = [], [], []
    for buffer in unit.trainable:
        dtype = reducer.grad_dtype(buffer)
        masters = buffer.own_masters()
        grads = [
            torch.zeros(m.run.numel, dtype=dtype, device=m.tensor.device)
            if m.tensor.grad is None
            else m.tensor.grad
            for m in masters
        ]
        shards.append(pack(grads, dtype, buffer.device))
        home = reducer.home(buffer)
        fulls.append(buffer.allocate_gradient(dtype) if home is None else home)
        layouts.append(buffer.layout.gradients(dtype))
    if fulls:
        comm.gather_layout(shards, fulls, layouts)
    return fulls


def slots_with_gradient(buffer: Buffer) -> list[bool]:
    """Tell which slots have a gradient in a run of this rank."""
    found = [False] * len(buffer.parameters)
    for master in buffer.own_masters():
        found[master.run.slot] |= master.tensor.grad is not None
    return found


def _refuse_scaler(optimizer: Optimizer) -> None:
    """Refuse a step of ``torch.amp.GradScaler``, which decides on each rank alone.

    Seen where the step is fused; another scaler skips the step before anybody is asked.

    Raises:
        ValueError: saying what scales losses instead.
    """
    if getattr(optimizer, "found_inf", None) is not None:
        for name in ("found_inf", "grad_scale"):  # the scaler would remove them after the step
            vars(optimizer).pop(name, None)
        raise ValueError(
            "torch.amp.GradScaler decides on each rank alone whether to step: use"
            " zero.Config(loss_scale='dynamic') and zero.scale_loss(optimizer, loss).backward()"
        )


def _evaluate_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call a closure before the gradients are looked at, and leave its loss in its place."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[:1], {"closure": lambda: loss}


def squared_norm(grad: Tensor) -> Tensor:
    """Return the sum of squares in float64, where the gradient is."""
    total = torch.zeros((), dtype=torch.float64, device=grad.device)
    for chunk in torch.split(grad, CHUNK_NUMEL):
        wide = chunk.to(torch.float64)
        total += torch.dot(wide, wide)
    return total
