"""Tensor parallelism of 2 by DTensor × ZeRO of 2, on 4 ranks; compares with one process.

mpirun -n 4 python -m tests.zero.tensor_parallel_program INIT_FILE
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import zcomm
import zero
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import assert_same_bits, relative_difference, whole

STEPS, CLIP = 5, 0.5


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def alone(model):
    model = copy.deepcopy(model)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model, torch.cat([tokens(rank, step) for rank in range(2)]))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, dict(model.named_parameters())


def parallel(comm, mesh, model, config):
    data, position = divmod(comm.rank, 2)
    model = copy.deepcopy(model)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    group = comm.split(color=position, key=data)
    model, optimizer = zero.shard(model, optimizer_of(model), config, comm=group)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model, tokens(data, step))
        loss.backward()
        norms.append(zero.clip_grad_norm_(optimizer, CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, whole(model)


def local_part(name, parameter, position):
    """Return what a rank of the mesh holds: rows of up, columns of down."""
    if ".up." in name:
        return parameter.chunk(2, 0)[position]
    return parameter.chunk(2, 1)[position] if ".down." in name else parameter


def main():
    model = make(Tower, hidden=72)
    with zcomm.init() as comm:
        method = f"file://{sys.argv[1]}"
        dist.init_process_group("gloo", init_method=method, rank=comm.rank, world_size=comm.size)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        losses, norms, parameters = alone(model)
        reference = None
        for config in (*map(zero.Config, range(4)), zero.Config(secondary=1)):
            found = parallel(comm, mesh, model, config)
            reference = reference or found
            assert found[:2] == reference[:2], config
            assert_same_bits(found[2], reference[2])
        rows = comm.all_gather_values(torch.tensor(found[0], dtype=torch.float64).numpy())
        for step, loss in enumerate(losses):
            assert abs((rows[0, step] + rows[2, step]) / 2 - loss) <= 1e-5
            assert abs(found[1][step] - norms[step]) <= 1e-5 * norms[step]
        wanted = {n: local_part(n, p.detach(), comm.rank % 2) for n, p in parameters.items()}
        assert relative_difference(found[2], wanted) <= 1e-4
        norms = comm.all_gather_values(torch.tensor(found[1], dtype=torch.float64).numpy())
        assert (norms == norms[0]).all()
        dist.destroy_process_group()
        if comm.rank == 0:
            print("same")


if __name__ == "__main__":
    main()
