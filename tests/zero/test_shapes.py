"""Parameters of awkward sizes, in every stage, against plain torch."""

import pytest
import torch
from torch import nn

import zero
from tests.zero.models import make
from tests.zero.runs import adamw, on, relative_difference, whole

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element")

CONFIGS = [
    *(zero.Config(stage=stage) for stage in range(4)),
    zero.Config(secondary="node"),
    zero.Config(secondary=1),
    zero.Config(secondary=2),
    zero.Config(stage=3, weights="bf16", secondary=2, secondary_codec="bf16", min_numel=0),
]
EVERY_CONFIG = pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.stage}-{c.secondary}-{c.weights}"
)


class Awkward(nn.Module):
    """A scalar, a zero-size parameter in the middle, one and three elements, Linear(4, 0) last."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.first = nn.Linear(256, 4)
        self.nothing = nn.Parameter(torch.zeros(0, 7))
        self.three = nn.Parameter(torch.randn(3))
        self.one = nn.Parameter(torch.randn(1))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.last = nn.Linear(4, 0)

    def forward(self, x):
        h = self.first(x) * self.scalar + self.one
        image = self.conv(x.view(-1, 1, 16, 16).expand(-1, 3, 16, 16) * self.three.view(3, 1, 1))
        empty = self.last(h).sum() + self.nothing.sum()
        return h.square().mean() + image.square().mean() + empty


def inputs(rank):
    return torch.randn(2, 256, generator=torch.Generator().manual_seed(rank))


@EVERY_CONFIG
@pytest.mark.parametrize("make_model", [Awkward, lambda: nn.Linear(256, 1)])
def test_training(config, make_model):
    model = make(make_model)
    if config.weights is not None:
        model = model.bfloat16()  # bf16 on the wire changes nothing
    wanted = alone(model)

    def program(comm):
        mine = make(make_model).to(next(model.parameters()).dtype)
        shapes = {n: (p.shape, p.dtype) for n, p in mine.named_parameters()}
        sharded, optimizer = zero.shard(mine, adamw(mine.parameters()), config, comm=comm)
        for _ in range(3):
            loss(sharded, inputs(comm.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert {n: (p.shape, p.dtype) for n, p in sharded.named_parameters()} == shapes
        return whole(sharded)

    tolerance = 1e-4 if config.weights is None else 2e-2
    for found in on("2x2x2", program):
        assert relative_difference(found, wanted) <= tolerance


def loss(model, x):
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def alone(model):
    model = make(lambda: model).float()
    optimizer = adamw(model.parameters())
    for _ in range(3):
        # The loss of each rank is squared on its own, so the global loss is their mean.
        (sum(loss(model, inputs(rank)) for rank in range(8)) / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}
