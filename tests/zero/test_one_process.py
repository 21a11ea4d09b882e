"""Sharded training follows plain torch on the global batch, in one process."""

import functools

import pytest
import torch
from torch import nn

import zero
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import (
    SIZES,
    gradients,
    local_gradients,
    on,
    relative_difference,
    shard,
    train,
    train_alone,
)

CONFIGS = [zero.Config(stage=stage) for stage in range(4)] + [zero.Config(secondary="node")]


@functools.cache
def alone(size, steps):
    return train_alone(make(Tower), size, batch=2, steps=steps)


OTHERS = [(topology, config) for topology in ("1", "2", "2x2x2") for config in CONFIGS[::3]]


@pytest.mark.parametrize(
    ("topology", "config", "steps"),
    [*(("2x2", config, 20) for config in CONFIGS), *((*other, 5) for other in OTHERS)],
)
def test_training(topology, config, steps):
    size = SIZES[topology]
    outcomes = on(topology, train, make(Tower), config, batch=2, steps=steps)
    expected = alone(size, steps)
    for step, loss in enumerate(expected.losses):
        assert abs(sum(o.losses[step] for o in outcomes) / size - loss) <= 1e-5
    assert relative_difference(outcomes[0].parameters, expected.parameters) <= 1e-4


@pytest.mark.parametrize(
    ("topology", "config"), [*(("2x2", config) for config in CONFIGS), *OTHERS[2:]]
)
def test_first_gradients(topology, config):
    model = make(Tower)
    size = SIZES[topology]

    def program(comm):
        sharded, _ = shard(comm, model, config)
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        assert all(p.grad is None for p in sharded.parameters())
        return gradients(sharded)

    parts = local_gradients(model, size)
    for found in on(topology, program):
        for name, grad in found.items():
            terms = torch.stack([part[name].double() for part in parts])
            bound = size * 2.0**-23 * terms.abs().sum(0) / size
            assert bool(((grad.double() - terms.mean(0)).abs() <= bound).all()), name


class TiedTwice(nn.Module):
    """An MLP whose two hidden layers, in different units, share a weight; so do its ends."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 21)
        self.layers = nn.ModuleList([nn.Linear(21, 21) for _ in range(3)])
        self.layers[2].weight = self.layers[0].weight
        self.head = nn.Linear(21, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@pytest.mark.parametrize("topology", ["1", "2", "2x2"])
def test_two_tied_weights(topology):
    size = SIZES[topology]
    expected = train_alone(make(TiedTwice), size, steps=8, batch=4 // size)
    for config in CONFIGS:
        outcomes = on(topology, train, make(TiedTwice), config, steps=8, batch=4 // size)
        losses = [sum(o.losses[step] for o in outcomes) / size for step in range(8)]
        assert max(abs(a - b) for a, b in zip(losses, expected.losses, strict=True)) <= 1e-5
        assert relative_difference(outcomes[0].parameters, expected.parameters) <= 1e-4


@pytest.mark.parametrize("stage", range(4))
def test_clipping(stage):
    outcomes = on("2x2", train, make(Tower), zero.Config(stage=stage), steps=4, clip=0.3)
    expected = train_alone(make(Tower), 4, steps=4, clip=0.3)
    assert min(expected.norms) > 0.3
    for norm, wanted in zip(outcomes[0].norms, expected.norms, strict=True):
        assert norm == pytest.approx(wanted, rel=1e-5)
    assert relative_difference(outcomes[0].parameters, expected.parameters) <= 1e-4
    assert all(outcome.norms == outcomes[0].norms for outcome in outcomes)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("batch", "micro", "no_sync"), [(8, 1, False), (2, 4, False), (2, 4, True), (1, 8, True)]
)
def test_accumulation_equals_a_larger_batch(stage, batch, micro, no_sync):
    config = zero.Config(stage=stage)
    options = {"batch": batch, "micro": micro, "no_sync": no_sync, "clip": 1e9, "steps": 2}
    outcomes = on("2", train, make(Tower), config, **options)
    expected = train_alone(make(Tower), 2, batch=8, clip=1e9, steps=2)
    for step in range(2):
        mean = sum(outcome.losses[step] for outcome in outcomes) / 2
        assert mean == pytest.approx(expected.losses[step], abs=1e-5)
        assert outcomes[0].norms[step] == pytest.approx(expected.norms[step], rel=1e-5)
