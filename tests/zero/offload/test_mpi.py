"""The same in processes of their own: bits of no offload, and a full stop when a disk fails."""

import re

import pytest
import torch

import zero
from tests.zero.models import Tower, make
from tests.zero.offload.runs import assert_alike, offloaded
from tests.zero.runs import train


@pytest.mark.mpi
@pytest.mark.parametrize(("stage", "place"), [(3, "nvme both"), (2, "nvme"), (3, "cpu")])
def test_no_offload(comm, stage, place, tmp_path):
    """Each rank has a folder of its own."""
    model = make(Tower, dtype=torch.bfloat16)
    configs = [zero.Config(stage=stage), offloaded(zero.Config(stage=stage), place, tmp_path)]
    expected, found = (train(comm, model, c, steps=3, micro=2, clip=0.5) for c in configs)
    assert_alike(found, expected)


PROGRAM = """
import torch, zcomm, zero
from tests.zero.models import Tower, loss_of, make, tokens
with zcomm.init() as comm:
    model = make(Tower)
    optimizer = torch.optim.AdamW(model.parameters())
    config = zero.Config(offload_optimizer="nvme", offload_params="nvme", nvme_path={path!r})
    zero.shard(model, optimizer, config, comm=comm)
    for step in range(100000):
        loss_of(model, tokens(comm.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and comm.rank == 1:
            file = zero.engine.engine_of(model).offload.drive.swap._file
            def broken(*arguments):
                raise zcomm.errors.OffloadError("rank 1 lost its disk")
            file.read = broken
"""


@pytest.mark.slow
def test_one_rank_that_fails_ends_all(launch, tmp_path):
    run = launch("-c", PROGRAM.format(path=str(tmp_path)), num_ranks=2, timeout=60)
    assert run.returncode != 0
    # Of rank 1, or of rank 0 that was told: whoever comes first ends the job.
    assert re.search(r"OffloadError(: |\(')(rank 1: )?rank 1 lost its disk", run.stderr)
