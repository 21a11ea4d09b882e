"""One run: a training on the threads of this process, and validation losses on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import zcomm
import zero
from benchmarks.quality.plan import NUM_RANKS, Plan, Setting, Texts
from benchmarks.training.data import Batch, batch
from benchmarks.training.model import GPT
from zcomm import Communicator

VALIDATION_SEED = 1_000_003


@dataclass(frozen=True)
class Run:
    """What a run gave: means over all ranks, ``validation`` by :meth:`Plan.evaluated_after`."""

    setting: str
    seed: int
    validation: list[float]
    training: list[float]
    seconds: float


class Training:
    """One rank's model, optimizer and data, stepped by the caller."""

    def __init__(
        self, comm: Communicator, plan: Plan, setting: Setting, texts: Texts, seed: int
    ) -> None:
        self._comm, self._plan, self._texts, self._seed = comm, plan, texts, seed
        self.model: nn.Module = GPT(plan.shape, seed).to(torch.bfloat16)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), fused=True
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, plan.rate)
        zero.shard(self.model, self._optimizer, setting.config, comm=comm)

    def step(self, step: int) -> float:
        """Train one step; return the mean loss of all ranks before it."""
        own = self._batch(self._texts.training, self._seed, step, self._plan.sequences)
        loss = self.model(own.inputs, own.targets)
        loss.backward()
        zero.clip_grad_norm_(self._optimizer, self._plan.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        return self._mean(loss.item())

    def validate(self) -> float:
        """Return the mean loss of the held-out sequences, with the weights that ranks use."""
        own = self._batch(self._texts.validation, VALIDATION_SEED, 0, self._plan.validation)
        each = max(1, self._plan.sequences // self._comm.size)
        losses = []
        with torch.no_grad():
            for inputs, targets in zip(
                own.inputs.split(each), own.targets.split(each), strict=True
            ):
                losses.append(self.model(inputs, targets).item() * len(inputs))
        return self._mean(sum(losses) / len(own.inputs))

    def _batch(self, text: np.ndarray, seed: int, step: int, sequences: int) -> Batch:
        context = self._plan.shape.context
        whole = batch(text, seed=seed, step=step, num_sequences=sequences, num_tokens=context)
        return whole.part(self._comm.rank, self._comm.size)

    def _mean(self, value: float) -> float:
        return float(self._comm.all_gather_values(np.array([value])).mean())


def train(plan: Plan, setting: Setting, texts: Texts, seed: int) -> Run:
    """Train with one setting from one seed."""
    start = time.perf_counter()

    def on_rank(comm: Communicator) -> tuple[list[float], list[float]]:
        training = Training(comm, plan, setting, texts, seed)
        losses, validation = [], []
        due: Iterator[int] = iter(plan.evaluated_after())
        next_one = next(due)
        for step in range(plan.steps):
            losses.append(training.step(step))
            if step + 1 == next_one:
                validation.append(training.validate())
                next_one = next(due, 0)
        return validation, losses

    (validation, losses), *_ = zcomm.run_local(on_rank, NUM_RANKS, setting.topology)
    return Run(setting.name, seed, validation, losses, time.perf_counter() - start)
