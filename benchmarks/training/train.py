"""One training, the same for every scheme, and what was counted on the way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

import zero
from benchmarks.training.data import Text, batch
from benchmarks.training.model import GPT, Shape
from benchmarks.training.schemes import Scheme
from zcomm import Communicator

NUM_SEQUENCES = 16
"""Of a step, all ranks together, where the ranks divide it; else one a rank more than fits."""

LEARNING_RATE = 4e-4
"""At 6e-4 and more this model spikes now and then, and the noise of 4-bit gradients with it."""

NUM_WARMUP_STEPS = 20
CLIP_NORM = 1.0

# Operations that carry parameters and gradients; the others are handshakes, norms and losses.
PAYLOAD = frozenset({"all_gather", "reduce_scatter", "all_reduce", "broadcast"})

OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class Trained:
    """What a training gave. Bytes are wire bytes per step that a rank sends, the mean of all ranks.

    ``losses`` are means over the global batch. ``levels`` is innermost first, parameters and
    gradients; ``control`` is what else was sent, all levels together. ``states`` and ``secondary``
    are the bytes of the rank that holds most, between the last backward and its step.
    """

    losses: tuple[float, ...]
    tokens_per_second: float
    levels: tuple[float, ...]
    control: float
    states: int
    secondary: int


def sequences_per_rank(num_ranks: int) -> int:
    """Return a rank's share of the batch, at least one sequence."""
    return -(-NUM_SEQUENCES // num_ranks)


def train(
    comm: Communicator,
    text: Text,
    scheme: Scheme,
    *,
    shape: Shape,
    steps: int,
    seed: int,
    on_step: OnStep,
) -> Trained:
    """Train ``steps`` steps from ``seed``. Collective; ``on_step`` is called on every rank."""
    model, optimizer, warmup = _prepare(comm, scheme, shape, seed)
    num_sequences = comm.size * sequences_per_rank(comm.size)
    size = {"num_sequences": num_sequences, "num_tokens": shape.context}
    comm.traffic.reset()
    losses, seconds = [], []
    for step in range(steps):
        own = batch(text, seed=seed, step=step, **size).part(comm.rank, comm.size)
        start = time.perf_counter()
        loss = model(own.inputs, own.targets)
        loss.backward()
        states = zero.model_state_nbytes(model, optimizer)
        zero.clip_grad_norm_(optimizer, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        losses.append(_mean(comm, loss.item()))
        seconds.append(time.perf_counter() - start)
        on_step(step, losses[-1])
    levels, control = _sent(comm, steps)
    most = comm.all_gather_values(np.array([states.total, states.secondary])).max(axis=0)
    return Trained(
        tuple(losses),
        # The median: the first steps allocate, and a pause of the machine is nobody's speed.
        num_sequences * shape.context / statistics.median(seconds),
        levels,
        control,
        int(most[0]),
        int(most[1]),
    )


def _prepare(
    comm: Communicator, scheme: Scheme, shape: Shape, seed: int
) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = GPT(shape, seed).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True
    )
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / NUM_WARMUP_STEPS)
    )
    zero.shard(model, optimizer, scheme.config, comm=comm)
    return model, optimizer, warmup


def _mean(comm: Communicator, value: float) -> float:
    return float(comm.all_gather_values(np.array([value])).mean())


def _sent(comm: Communicator, steps: int) -> tuple[tuple[float, ...], float]:
    """Return (payload per level, the rest) in bytes per step, the mean over ranks."""
    counted = np.zeros(len(comm.topology.levels) + 1)
    for (operation, level), counter in comm.traffic.snapshot().items():
        counted[level if operation in PAYLOAD else -1] += counter.wire_nbytes
    mean = comm.all_gather_values(counted).mean(axis=0) / steps
    return tuple(mean[:-1].tolist()), float(mean[-1])
