"""torch.compile: of each unit, of what a unit does inside, of the whole model.

``aot_eager`` traces forward and backward and runs torch's own kernels: the same bits as eager.
Inductor makes kernels of its own, with other bits than eager, but the same in every stage.
"""

import pytest
import torch

import zero
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import assert_same_bits, shard, whole

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _forget_compiled():
    yield
    torch.compiler.reset()


def compile_units(model, backend):
    """After zero.shard, or before: the units' modules."""
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def compile_insides(model, backend):
    for block in model.blocks:
        block.inside = torch.compile(block.inside, backend=backend)
    return model


def compile_whole(model, backend):
    return torch.compile(model, backend=backend)


def train(comm, how, backend, config, *, steps=3):
    mine, optimizer = shard(comm, make(Tower), config)
    called = mine if how is None else how(mine, backend)
    losses = []
    for step in range(steps):
        loss = loss_of(called, tokens(comm.rank, step))
        loss.backward()
        zero.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, whole(mine)


@pytest.mark.parametrize(
    "config",
    [
        zero.Config(),
        pytest.param(zero.Config(2), marks=pytest.mark.slow),
        pytest.param(zero.Config(secondary="node"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("how", [compile_units, compile_insides, compile_whole])
def test_the_bits_of_eager(comm, how, config):
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = train(comm, how, "aot_eager", config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    expected = train(comm, None, None, config)
    assert found[0] == expected[0]
    assert_same_bits(found[1], expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", [compile_units, compile_insides, compile_whole])
def test_inductor_has_the_same_bits_in_all_stages(comm, how):
    expected = train(comm, how, "inductor", zero.Config(0))
    eager = train(comm, None, None, zero.Config(0))
    assert expected[0] == pytest.approx(eager[0], rel=1e-5)
    for stage in (2, 3):
        found = train(comm, how, "inductor", zero.Config(stage))
        assert found[0] == expected[0]
        assert_same_bits(found[1], expected[1])
