"""The training by zero: stage 3 exact, and ZeRO++."""

from __future__ import annotations

import torch

import zcomm
import zero
from benchmarks.peers.gloo import adam
from benchmarks.peers.options import Job
from benchmarks.peers.registry import STAGE_3
from benchmarks.training.data import Batch
from benchmarks.training.model import GPT


def prepare(name: str, job: Job) -> ZeroTraining:
    """Join the communicator and make this rank's training."""
    config = zero.Config(stage=3) if name == STAGE_3.name else zero.Config.zeropp()
    return ZeroTraining(zcomm.init(), job, config)


class ZeroTraining:
    """A model and an optimizer, sharded by zero."""

    def __init__(self, comm: zcomm.Communicator, job: Job, config: zero.Config) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.local_rank = comm.topology.coordinates(comm.rank)[0]
        model = GPT(job.shape, job.seed).to(torch.bfloat16)
        optimizer = adam(list(model.parameters()))
        self._model, self._optimizer = zero.shard(model, optimizer, config, comm=comm)

    def step(self, batch: Batch) -> float:
        loss = self._model(batch.inputs, batch.targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.item())

    def barrier(self) -> None:
        self._comm.barrier()

    def counted_nbytes(self) -> int:
        """Return the wire bytes that this rank has sent between nodes."""
        levels = self._comm.topology.levels
        return self._comm.traffic.wire_nbytes(level=len(levels) - 1) if len(levels) > 1 else 0

    def close(self) -> None:
        self._comm.close()
