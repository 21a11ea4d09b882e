"""State dicts of a model of which half is frozen (Z6), saved and loaded with torch itself."""

import io

import pytest
import torch
from torch import nn

import zero
from tests.zero.runs import on


def half_frozen(seed):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(37, 19), nn.Tanh(), nn.Linear(19, 37), nn.LayerNorm(37))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model[0].requires_grad_(False)
    return model


def train_step(model, optimizer, rank):
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(3, 37, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def shard(comm, seed, config):
    model = half_frozen(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    return zero.shard(model, torch.optim.SGD(trained, lr=0.1), config, comm=comm)


@pytest.mark.parametrize("stage", range(4))
def test_a_half_frozen_model_is_saved_and_loaded(stage):
    """Loaded into a model of other values and another stage, one more step gives the same bits."""

    def program(comm):
        model, optimizer = shard(comm, 1, zero.Config(stage))
        train_step(model, optimizer, comm.rank)
        file = io.BytesIO()
        with zero.full_params(model):
            torch.save(model.state_dict(), file)
        file.seek(0)
        other, other_optimizer = shard(comm, 2, zero.Config(3 - stage))
        with zero.full_params(other):
            other.load_state_dict(torch.load(file))
        train_step(model, optimizer, comm.rank)
        train_step(other, other_optimizer, comm.rank)
        with zero.full_params(model), zero.full_params(other):
            pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
            frozen = torch.equal(other[0].weight, half_frozen(1)[0].weight)
            moved = not torch.equal(other[2].weight, half_frozen(1)[2].weight)
            return all(torch.equal(a, b) for a, b in pairs), frozen, moved

    assert on("2x2", program) == [(True, True, True)] * 4
