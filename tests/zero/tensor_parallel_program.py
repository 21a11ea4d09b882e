"""Tensor parallelism of 2 by DTensor × ZeRO of 2, on 4 ranks; compares with one process.

Then meshes of two dimensions: 2 × 2 without other ranks, and 1 × 2 × ZeRO of 2.

mpirun -n 4 python -m tests.zero.tensor_parallel_program INIT_FILE
"""

import copy
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
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


def alone(model, size=2):
    model = copy.deepcopy(model)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model, torch.cat([tokens(rank, step) for rank in range(size)]))
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


# Split over both dimensions, over the first, over the second.
PLACEMENTS = {
    "up.weight": (Shard(0), Shard(1)),
    "up.bias": (Shard(0), Replicate()),
    "down.weight": (Replicate(), Shard(1)),
}


def over_two_dimensions(model, mesh):
    """Split a copy of the model over a mesh; each rank computes with the same tokens."""
    model = copy.deepcopy(model)
    everywhere = [Replicate(), Replicate()]

    def enter(module, args):
        return (DTensor.from_local(args[0], mesh, everywhere, run_check=False),)

    def leave(module, args, output):
        return output.redistribute(mesh, everywhere).to_local()

    for block in model.blocks:
        for name, placements in PLACEMENTS.items():
            module, entry = getattr(block, name.split(".")[0]), name.split(".")[1]
            made = distribute_tensor(getattr(module, entry).detach(), mesh, placements)
            setattr(module, entry, torch.nn.Parameter(made))
        for module in (block.up, block.down):
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
    return model


def check_two_dimensions(comm, model, shape):
    """Train on 4 ranks of which each mesh has the product of ``shape``; ``alone`` is the oracle."""
    size = shape[0] * shape[1]
    dims = ("dp", "a", "b")
    mesh = init_device_mesh("cpu", (comm.size // size, *shape), mesh_dim_names=dims)["a", "b"]
    data, position = divmod(comm.rank, size)
    losses, norms, _ = alone(model, comm.size // size)
    group = comm.split(color=position, key=data)
    for config in map(zero.Config, range(4)):
        mine = over_two_dimensions(model, mesh)
        mine, optimizer = zero.shard(mine, optimizer_of(mine), config, comm=group)
        for step in range(STEPS):
            loss = loss_of(mine, tokens(data, step))
            loss.backward()
            norm = zero.clip_grad_norm_(optimizer, CLIP).item()
            optimizer.step()
            optimizer.zero_grad()
            found = comm.all_gather_values(np.array([loss.item(), norm]))
            assert abs(found[::size, 0].mean() - losses[step]) <= 1e-5
            assert (found[:, 1] == norm).all()
            assert abs(norm - norms[step]) <= 1e-5 * norms[step], (shape, config, step)


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
        nvme = {"offload_optimizer": "nvme", "nvme_path": Path(sys.argv[1]).parent}
        for config in (
            *map(zero.Config, range(4)),
            zero.Config(secondary=1),
            zero.Config(stage=1, **nvme),
            zero.Config(offload_params="nvme", offload_numel=700, **nvme),
        ):
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
        for shape in ((2, 2), (1, 2)):
            check_two_dimensions(comm, model, shape)
        dist.destroy_process_group()
        if comm.rank == 0:
            print("same")


if __name__ == "__main__":
    main()
