"""Train with FSDP2 with and without zcomm, and compare.

``torchrun ... fsdp.py BACKEND CASE...``; prints "CASE passed" on rank 0. An assertion
ends all ranks.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import zcomm.torch

STEPS = 4
WIDTH = 29  # not a multiple of any number of ranks: shards are uneven, and padded


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(31, WIDTH), Block(), Block(), nn.Linear(WIDTH, 31))


@dataclass(frozen=True)
class Case:
    """How to shard and train.

    ``shard`` are arguments of fully_shard, ``set`` is called last, ``narrow``: sums are 16-bit.
    """

    shard: dict = field(default_factory=dict)
    narrow: bool = False
    mesh: tuple = ()
    micro: int = 1
    frozen: tuple = ()
    replicas: bool = False
    set: object = None


def prefetching(model):
    blocks = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for one, following in pairwise(blocks[1:]):
        one.set_modules_to_forward_prefetch([following])
    model._set_unshard_async_op(True)


def dividing(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(8.0)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)
ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
CASES = {
    "plain": Case(),
    "kept": Case({"reshard_after_forward": False}),
    "pairs": Case({"reshard_after_forward": 2}),
    "bf16": Case({"mp_policy": BF16}, narrow=True),
    "all bf16": Case({"mp_policy": ALL_BF16}, narrow=True),
    "fp16": Case({"mp_policy": FP16}, narrow=True),
    "accumulated": Case(micro=3),
    "frozen": Case(frozen=("0.", "2.up")),
    "prefetched": Case(set=prefetching),
    "divided": Case(set=dividing),
    "replicated": Case(mesh=(2, 2)),
    "replicas": Case(mesh=(2, 2), replicas=True),
}


def train(case, install=None):
    """Return the losses and the final parameters of a training."""
    model = network()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(case.frozen or ("none",)))
    names = ("replicate", "shard")[-max(len(case.mesh), 1) :]
    mesh = init_device_mesh("cpu", case.mesh or (dist.get_world_size(),), mesh_dim_names=names)
    replicas = None
    if install and case.replicas:
        replicas, mesh = mesh["replicate"].get_group(), mesh["shard"]
    for block in (model[1], model[2]):
        fully_shard(block, mesh=mesh, **case.shard)
    fully_shard(model, mesh=mesh, **case.shard)
    comm = install(model, replicas=replicas) if install else None
    if case.set:
        case.set(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    # Not Adam, whose first steps divide by what may be nearly nothing.
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        for micro in range(case.micro):
            model.set_requires_gradient_sync(micro == case.micro - 1)
            tokens = torch.randint(31, (2, 17), generator=generator)
            scores = model(tokens[:, :-1]).float()
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.full_tensor() for p in model.parameters()], comm


def compare(name):
    """Check that exact communication changes nothing, and quantised little."""
    case = CASES[name]
    topology = "2x2" if dist.get_world_size() == 4 else "2x1"
    losses, expected, _ = train(case)
    exact = {"weights": None, "grads": None, "topology": topology}
    exactly, found, comm = train(case, partial(zcomm.torch.quantize_fsdp, **exact))
    same = dist.get_world_size() == 2
    for one, other in zip(expected, found, strict=True):
        if same:
            assert torch.equal(one, other), f"{name}: parameters differ"
        else:
            # Sums nest as the nodes do, and 16-bit ones are rounded in other places.
            torch.testing.assert_close(one, other, rtol=0, atol=5e-3 if case.narrow else 1e-5)
    assert not same or exactly == losses, f"{name}: {exactly} {losses}"
    before = comm.traffic.wire_nbytes()
    rough = {"topology": topology, "min_numel": 0}
    quantised, _, comm = train(case, partial(zcomm.torch.quantize_fsdp, **rough))
    assert comm.traffic.wire_nbytes() > before
    for one, other in zip(losses, quantised, strict=True):
        assert abs(one - other) < 0.05 * one, f"{name}: {quantised} {losses}"
    if dist.get_rank() == 0:
        print(f"{name} passed", flush=True)


def main():
    dist.init_process_group(sys.argv[1])
    for name in sys.argv[2:]:
        compare(name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
