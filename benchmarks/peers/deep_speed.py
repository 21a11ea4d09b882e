"""The training by DeepSpeed's ZeRO-3 on its CPU accelerator, over gloo.

Its ZeRO++ has no CPU version: quantised weights and gradients are CUDA kernels.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.peers.gloo import GlooTraining, adam
from benchmarks.peers.options import Job
from benchmarks.training.data import Batch
from benchmarks.training.model import GPT

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed


def prepare(name: str, job: Job) -> GlooTraining:
    """Join the process group and make this rank's training."""
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return _Engine(job)


class _Engine(GlooTraining):
    def __init__(self, job: Job) -> None:
        super().__init__()
        model = GPT(job.shape, job.seed).to(torch.bfloat16)
        block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=adam(list(model.parameters())),
            config=configuration(job, block),
        )

    def step(self, batch: Batch) -> float:
        loss = self._engine(batch.inputs, batch.targets)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.item())


def configuration(job: Job, block_numel: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Its limits count in models of billions: as they are, all parameters of this one would stay whole
    from the first forward on. Here one block is fetched ahead and one is kept, as FSDP2 does.
    """
    return {
        "train_micro_batch_size_per_gpu": job.sequences,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "communication_data_type": "bf16",
        # Without this it clips at a norm of 1, unasked; the other peers do not clip.
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": block_numel,
            "stage3_prefetch_bucket_size": block_numel,
            "stage3_max_live_parameters": 2 * block_numel,
            "stage3_max_reuse_distance": 0,
        },
        "steps_per_print": 10**9,
    }
