"""Model-state bytes of live tensors against the formulas of the ZeRO paper."""

import pytest
import torch
from torch import nn

import zero
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import SIZES, on, shard

WIDE = {"width": 128, "hidden": 512, "num_blocks": 4, "vocabulary": 512}


def largest_padding(model, size):
    """Elements that the cut can add to the largest shard: 255 a unit, and slots' alignment."""
    num_units = len(model.blocks) + 1
    return 256 * num_units + 32 * len(list(model.parameters())) / size


@pytest.mark.parametrize("topology", ["2x2", "1x2", "2x2x2"])
@pytest.mark.parametrize("stage", range(4))
def test_formulas(topology, stage):
    model = make(Tower, **WIDE, dtype=torch.bfloat16)
    size = SIZES[topology]
    numel = sum(p.numel() for p in model.parameters())

    def program(comm):
        sharded, optimizer = shard(comm, model, zero.Config(stage=stage))
        for step in range(2):
            loss_of(sharded, tokens(comm.rank, step, vocabulary=512)).backward()
            counted = zero.model_state_nbytes(sharded, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return counted

    wanted = {0: 16, 1: 4 + 12 / size, 2: 2 + 14 / size, 3: 16 / size}[stage] * numel
    assert zero.expected_nbytes(numel, stage, size) == wanted
    outcomes = on(topology, program)
    for counted in outcomes:
        assert counted.gathered == 0
        assert abs(counted.total - wanted) <= 0.02 * wanted + 16 * largest_padding(model, size)
    mean = sum(counted.total for counted in outcomes) / size
    assert mean == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("stage", range(4))
def test_frozen_parameters_have_no_gradient_master_or_state(stage):
    model = make(Tower, **WIDE, dtype=torch.bfloat16)
    model.blocks.requires_grad_(False)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)

    def program(comm):
        sharded, optimizer = shard(comm, model, zero.Config(stage=stage))
        for step in range(2):
            loss_of(sharded, tokens(comm.rank, step, vocabulary=512)).backward()
            counted = zero.model_state_nbytes(sharded, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return counted.gradients + counted.masters + counted.optimizer

    replicated = {0: 14, 1: 2, 2: 0, 3: 0}[stage]
    wanted = trained * (4 * replicated + 14 - replicated)
    assert sum(on("2x2", program)) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(("secondary", "group"), [("node", 2), (1, 1), (4, 4)])
def test_secondary(secondary, group):
    model = make(Tower, **WIDE, dtype=torch.bfloat16)
    numel = sum(p.numel() for p in model.parameters())

    def program(comm):
        sharded, optimizer = shard(comm, model, zero.Config(secondary=secondary))
        loss_of(sharded, tokens(comm.rank, 0, vocabulary=512)).backward()
        return zero.model_state_nbytes(sharded, optimizer).secondary

    sizes = on("2x2", program)
    # A group of all ranks would hold what the shards are.
    expected = 0 if group == 4 else 2 * numel * 4 / group
    assert sum(sizes) == expected


def held_gradients(model):
    buffers = [b for unit in model._zero_engine.units for b in unit.buffers]
    return sum(b.local is not None for b in buffers)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_unit_is_reduced_when_its_backward_is_complete(stage):
    """Never more than two units' gradients and the root's; in stage 3 as many whole units."""
    model = make(Tower, num_blocks=6)

    def program(comm):
        sharded, _ = shard(comm, model, zero.Config(stage=stage))
        grads, whole = [], []

        def look(*_):
            grads.append(held_gradients(sharded))
            whole.append(num_whole(sharded))

        for block in sharded.blocks:
            block.norm.register_full_backward_hook(look)
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        assert held_gradients(sharded) == 0
        return max(grads), max(whole)

    for grads, whole in on("2", program):
        assert grads <= 2
        assert stage < 3 or whole == 2


def num_whole(model):
    return sum(all(b.full is not None for b in u.buffers) for u in model._zero_engine.units)


def test_forward_keeps_one_block_whole_and_saves_none():
    model = make(Tower, num_blocks=6)

    def program(comm):
        sharded, _ = shard(comm, model, zero.Config())
        whole = []
        for block in sharded.blocks:
            block.up.register_forward_hook(lambda *_: whole.append(num_whole(sharded)))
        output = sharded(tokens(comm.rank, 0))
        assert num_whole(sharded) == 0
        return whole, output.shape

    for whole, _ in on("2", program):
        assert whole == [2] * 6  # the block and the root


def test_an_interrupted_backward_leaves_no_gradient():
    model = make(Tower)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("broken")

    def program(comm):
        sharded, optimizer = shard(comm, model, zero.Config())
        handle = sharded.blocks[0].register_forward_hook(lambda m, a, out: Broken.apply(out))
        with pytest.raises(KeyError, match="broken"):
            loss_of(sharded, tokens(comm.rank, 0)).backward()
        handle.remove()
        loss_of(sharded, tokens(comm.rank, 1)).backward()
        memory = zero.model_state_nbytes(sharded, optimizer)
        return memory.gathered, held_gradients(sharded)

    assert on("2", program) == [(0, 0)] * 2


def test_modules_without_parameters():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))

    def program(comm):
        sharded, optimizer = shard(comm, model, zero.Config())
        sharded(torch.ones(1, 3)).sum().backward()
        return zero.model_state_nbytes(sharded, optimizer).parameters

    assert sum(on("2", program)) == 4 * 24
