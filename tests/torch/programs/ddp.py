"""Train with DDP with and without zcomm's hook, and compare; arguments: backend, names of cases.

After every step the parameters of all ranks have to be the same bits.
"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zcomm.torch import QuantizedAllReduce, all_reduce_hook

STEPS = 5
WIDTH = 37


class Network(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.embed = nn.Embedding(31, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 31)
        self.unused = unused

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.hidden[: 3 if self.unused else 4]:
            x = x + torch.tanh(layer(x))
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """Arguments of DDP, micro-batches of a step, and the dtype of parameters."""

    ddp: dict = field(default_factory=dict)
    micro: int = 1
    dtype: torch.dtype = torch.float32


CASES = {
    "plain": Case(),
    "views": Case({"gradient_as_bucket_view": True}),
    "static": Case({"static_graph": True, "gradient_as_bucket_view": True}),
    "accumulated": Case(micro=3),
    "many buckets": Case({"bucket_cap_mb": 0.005}),
    "unused": Case({"find_unused_parameters": True}),
    "bf16": Case(dtype=torch.bfloat16),
}


def train(case, hook=None):
    """Return the losses and the parameters after the last step."""
    torch.manual_seed(0)
    model = Network("find_unused_parameters" in case.ddp).to(case.dtype)
    ddp = DistributedDataParallel(model, **case.ddp)
    if hook:
        ddp.register_comm_hook(hook, all_reduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        for micro in range(case.micro):
            tokens = torch.randint(31, (2, 17), generator=generator)
            with nullcontext() if micro == case.micro - 1 else ddp.no_sync():
                scores = ddp(tokens[:, :-1]).float()
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        check_equal_replicas(model)
    return losses, [p.detach().clone() for p in model.parameters()]


def check_equal_replicas(model):
    own = torch.cat([p.detach().flatten().view(torch.uint8) for p in model.parameters()])
    first = own.clone()
    dist.broadcast(first, 0)
    assert torch.equal(own, first), f"rank {dist.get_rank()} differs"


def compare(name):
    case = CASES[name]
    size = dist.get_world_size()
    topology = "2x2" if size == 4 else "2x1"
    losses, expected = train(case)
    exactly, found = train(case, QuantizedAllReduce(None, topology=topology))
    same = size == 2
    assert not same or exactly == losses, f"{name}: {exactly} {losses}"
    for one, other in zip(expected, found, strict=True):
        if same:
            assert torch.equal(one, other), f"{name}: parameters differ"
        else:
            limit = 2e-2 if case.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(one, other, rtol=0, atol=limit)
    for feedback in (False, True):
        hook = QuantizedAllReduce("int8", feedback, topology=topology, min_numel=0)
        quantised, _ = train(case, hook)
        assert quantised != losses
        assert bool(hook.state_dict()["residuals"]) == feedback
        for one, other in zip(losses, quantised, strict=True):
            assert abs(one - other) < 0.03 * one, f"{name}: {quantised} {losses}"
    if dist.get_rank() == 0:
        print(f"{name} passed", flush=True)


def main():
    dist.init_process_group(sys.argv[1])
    for name in sys.argv[2:]:
        compare(name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
