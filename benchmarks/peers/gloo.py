"""The training by torch over gloo: FSDP2 alone and with zcomm, DDP, and every rank for itself."""

from __future__ import annotations

import os
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcomm.torch
from benchmarks.peers.options import Job
from benchmarks.peers.rank import BETAS, LEARNING_RATE
from benchmarks.peers.registry import ALONE, DDP, ONE_LINE, RECIPE
from benchmarks.training.data import Batch
from benchmarks.training.model import GPT


def prepare(name: str, job: Job) -> GlooTraining:
    """Join the process group and make this rank's training."""
    dist.init_process_group("gloo")
    # The weights that all peers start from are bfloat16 numbers.
    model = GPT(job.shape, job.seed).to(torch.bfloat16)
    if name in (ALONE.name, DDP.name):
        return _Mastered(model, replicated=name == DDP.name)
    if name in (ONE_LINE.name, RECIPE.name):
        return _Quantised(model, recipe=name == RECIPE.name)
    return _Sharded(model)


class GlooTraining:
    """What the trainings over gloo have in common."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.local_rank = int(os.environ["LOCAL_RANK"])

    def barrier(self) -> None:
        dist.barrier()

    def counted_nbytes(self) -> int | None:
        """Return None: gloo does not count."""
        return None

    def close(self) -> None:
        dist.destroy_process_group()


class _Sharded(GlooTraining):
    """FSDP2 as its documentation has it: a group for each block, float32 shards, bfloat16 sent."""

    def __init__(self, model: GPT, **options: int) -> None:
        super().__init__()
        model.float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy, **options)
        fully_shard(model, mp_policy=policy)
        self._model = model
        self._optimizer = adam(list(model.parameters()))

    def step(self, batch: Batch) -> float:
        loss: Tensor = self._model(batch.inputs, batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


class _Quantised(_Sharded):
    """The same with ``quantize_fsdp``, one line.

    With ``recipe`` nodes keep blocks for backward (hpZ), and the next one is gathered while one
    computes.
    """

    def __init__(self, model: GPT, *, recipe: bool) -> None:
        ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        super().__init__(model, **({"reshard_after_forward": ranks_per_node} if recipe else {}))
        self._comm = zcomm.torch.quantize_fsdp(model)
        if recipe:
            for one, following in pairwise([model, *model.blocks]):
                one.set_modules_to_forward_prefetch([following])

    def counted_nbytes(self) -> int | None:
        """Return the wire bytes that this rank has sent between nodes."""
        return self._comm.traffic.wire_nbytes(level=1)


class _Mastered(GlooTraining):
    """A bfloat16 model, by DDP or without communication, and float32 masters that Adam steps.

    Without communication only a rank's share of the masters exists: arithmetic as in ZeRO.
    """

    def __init__(self, model: GPT, *, replicated: bool) -> None:
        super().__init__()
        self._held = [parameter.detach().view(-1) for parameter in model.parameters()]
        if not replicated:
            self._held = [part.chunk(dist.get_world_size())[0] for part in self._held]
        self._parameters = list(model.parameters())
        self._masters = [part.to(torch.float32) for part in self._held]
        self._model: nn.Module = DistributedDataParallel(model) if replicated else model
        self._optimizer = adam(self._masters)

    def step(self, batch: Batch) -> float:
        loss: Tensor = self._model(batch.inputs, batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            assert parameter.grad is not None
            grad = parameter.grad.view(-1)[: master.numel()]
            master.grad = grad.to(torch.float32)
        self._optimizer.step()
        for held, master in zip(self._held, self._masters, strict=True):
            held.copy_(master)
        self._model.zero_grad()
        self._optimizer.zero_grad()
        return loss.item()


def adam(parameters: list[Tensor] | list[nn.Parameter]) -> torch.optim.AdamW:
    """Return the optimizer that all peers have."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, fused=True)
