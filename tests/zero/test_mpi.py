"""The same under MPI, at any number of ranks: bits of stage 0, losses of one process."""

import functools

import pytest
import torch

import zero
from tests.zero.models import Tower, make
from tests.zero.runs import assert_same_bits, relative_difference, train, train_alone

pytestmark = pytest.mark.mpi

CONFIGS = [
    *(zero.Config(stage=stage) for stage in range(4)),
    zero.Config(secondary="node"),
    zero.Config(secondary=1),
    zero.Config(prefetch=0),
    zero.Config(secondary=1, prefetch=2),
]
EVERY_CONFIG = pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.stage}-{c.secondary}-{c.prefetch}"
)


@functools.cache
def alone(size):
    return train_alone(make(Tower), size, steps=6, batch=2)


@EVERY_CONFIG
def test_one_process(comm, config):
    outcome = train(comm, make(Tower), config, steps=6, batch=2)
    expected = alone(comm.size)
    for losses, wanted in zip(
        comm.all_gather_values(as_float64(outcome.losses)).T, expected.losses, strict=True
    ):
        assert abs(losses.sum() / comm.size - wanted) <= 1e-5
    assert relative_difference(outcome.parameters, expected.parameters) <= 1e-4


def as_float64(values):
    return torch.tensor(values, dtype=torch.float64).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_CONFIG
def test_bits_of_stage_0(comm, config, dtype):
    model = make(Tower, dtype=dtype)
    wanted = train(comm, model, zero.Config(stage=0), steps=4, micro=2, clip=0.5)
    outcome = train(comm, model, config, steps=4, micro=2, clip=0.5)
    assert outcome.losses == wanted.losses
    assert outcome.norms == wanted.norms
    assert_same_bits(outcome.parameters, wanted.parameters)


QUANTISED = {
    "zeropp": zero.Config.zeropp(),
    "safe4": zero.Config.safe4(),
    "persistent": zero.Config(
        secondary="persistent", grads=("int8", "int4"), accumulate="node", grads_feedback=True
    ),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised(comm, name):
    model = make(Tower, width=128, hidden=512)
    options = {"steps": 10, "batch": 4}
    exact = train(comm, model, zero.Config(), **options)
    quantised = train(comm, model, QUANTISED[name], **options)
    assert quantised.losses[-1] == pytest.approx(exact.losses[-1], rel=0.02)
    weights = quantised.parameters["blocks.0.up.weight"].double()
    sums = comm.all_gather_values(weights.sum(0).numpy())
    assert (sums == sums[0]).all()
