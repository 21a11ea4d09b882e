"""Means, accumulation, unused and frozen parameters, clipping, non-finite gradients.

``Given`` has the gradient that a test gives it: its loss is the product of parameter and gradient.
"""

import logging

import pytest
import torch
from torch import nn

import zero
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import adamw, assert_same_bits, gradients, on, shard, whole
from zcomm import ZcommError

STAGES = pytest.mark.parametrize("stage", range(4))


class Given(nn.Module):
    """``layers`` are units of one parameter each; ``forward({name: gradient})`` is the loss."""

    class Layer(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.p = nn.Parameter(torch.zeros(shape))

        def forward(self, gradient):
            return (self.p * gradient).sum()

    def __init__(self, **shapes):
        super().__init__()
        self.names = list(shapes)
        self.layers = nn.ModuleList([self.Layer(shape) for shape in shapes.values()])

    def forward(self, wanted):
        losses = [self.layers[self.names.index(name)](g) for name, g in wanted.items()]
        return sum(losses)

    def named(self, found):
        return {name: found[f"layers.{i}.p"] for i, name in enumerate(self.names)}


def gradients_of(model, comm, config, backwards):
    """Return the gradients after ``backwards``, a list of {name: gradient}."""
    sharded, _ = shard(comm, model, config)
    for wanted in backwards:
        sharded(wanted).backward()
    return sharded.named(gradients(sharded))


@STAGES
def test_float16_means_neither_overflow_nor_underflow(stage):
    model = Given(a=(300,), b=(1,)).half()

    def program(comm):
        wanted = {
            "a": torch.full((300,), 3e4, dtype=torch.float16),
            "b": torch.full((1,), 6e-8, dtype=torch.float16),
        }
        return gradients_of(model, comm, zero.Config(stage=stage), [wanted])

    for found in on("2x2x2", program):
        assert bool((found["a"] == torch.tensor(3e4, dtype=torch.float16)).all())
        assert found["b"].item() == torch.tensor(6e-8, dtype=torch.float16).item() > 0


@STAGES
@pytest.mark.parametrize("no_sync", [False, True])
def test_accumulation_in_float32(stage, no_sync):
    """1 + 127·2^-9: in bfloat16 every one of the additions would be lost."""
    model = Given(a=(3,)).bfloat16()

    def program(comm):
        config = zero.Config(stage=stage, grad_dtype=torch.float32)
        sharded, _ = shard(comm, model, config)
        for step in range(128):
            value = torch.full((3,), 2.0**-9 if step else 1.0, dtype=torch.bfloat16)
            if no_sync and step < 127:
                with zero.no_sync(sharded):
                    sharded({"a": value}).backward()
            else:
                sharded({"a": value}).backward()
        return gradients(sharded)

    for found in on("2", program):
        assert found["layers.0.p"].dtype == torch.float32
        assert bool((found["layers.0.p"] == 1 + 127 * 2.0**-9).all())


@pytest.mark.slow
@STAGES
def test_accumulation_in_float32_of_1024_backwards(stage):
    model = Given(a=(3,)).bfloat16()

    def program(comm):
        sharded, _ = shard(comm, model, zero.Config(stage=stage))
        sharded({"a": torch.ones(3, dtype=torch.bfloat16)}).backward()
        for _ in range(1024):
            sharded({"a": torch.full((3,), 2.0**-9, dtype=torch.bfloat16)}).backward()
        return gradients(sharded)

    for found in on("2", program):
        assert bool((found["layers.0.p"] == 3).all())


@STAGES
def test_the_mean_is_rounded_once_after_the_last_backward(stage):
    """In the first step and in later ones: 1 + 2^-8 + 2^-8 is 1 + 2^-7, not 1."""
    model = Given(a=(3,)).bfloat16()

    def program(comm):
        sharded, optimizer = shard(comm, model, zero.Config(stage=stage))
        seen = []
        for _ in range(2):
            for value in (1.0, 2.0**-8, 2.0**-8):
                sharded({"a": torch.full((3,), value, dtype=torch.bfloat16)}).backward()
            seen.append(gradients(sharded)["layers.0.p"])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    for seen in on("2", program):
        for grad in seen:
            assert grad.dtype == torch.bfloat16
            assert grad.tolist() == [1 + 2.0**-7] * 3


@STAGES
def test_a_weight_and_a_bias_with_equal_gradients_get_equal_means(stage):
    model = Given(weight=(10, 77), bias=(770,))

    for topology in ("2x2", "4x1", "1x4", "2x2x2"):
        for grads in (None, ("int8", "int4")):

            def program(comm, grads=grads):
                g = torch.randn(770, generator=torch.Generator().manual_seed(comm.rank))
                config = zero.Config(stage=stage, grads=grads, min_numel=0)
                wanted = {"weight": g.view(10, 77), "bias": g}
                return gradients_of(model, comm, config, [wanted])

            for found in on(topology, program):
                assert torch.equal(found["weight"].flatten(), found["bias"])


@STAGES
def test_parameters_that_ranks_do_not_use(stage):
    """Never used: no gradient, no decay, no state. Used on one rank: zero on the others."""
    model = make(Given, never=(300,), sometimes=(300,), late=(300,), always=(300,))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    start = model.named({n: p.detach().clone() for n, p in model.named_parameters()})

    def program(comm):
        # Units of stage 3 are gathered by all ranks; what only some use is a unit's part.
        config = zero.Config(stage=stage, units=() if stage == 3 else "auto")
        sharded, optimizer = shard(comm, model, config)
        g = torch.full((300,), comm.rank + 1.0)
        for part in range(4):
            wanted = {"always": g}
            if comm.rank == 1:
                wanted["sometimes"] = g
            if part == 3:
                wanted["late"] = g
            sharded(wanted).backward()
        found = sharded.named(gradients(sharded))
        optimizer.step()
        with_state = len(optimizer.state)
        return found, sharded.named(whole(sharded)), with_state

    outcomes = on("2x2", program)
    found, after, _ = outcomes[0]
    assert found["never"] is None
    assert bool((found["sometimes"] == 4 * 2 / 4).all())
    assert bool((found["late"] == 2.5).all())
    assert bool((found["always"] == 10).all())
    assert torch.equal(after["never"], start["never"])
    assert not any(torch.equal(after[n], start[n]) for n in ("sometimes", "late", "always"))
    runs_of_three = {0: 4 * 3}.get(stage, 3)
    assert sum(num for *_, num in outcomes) <= 2 * runs_of_three * 4


@pytest.mark.parametrize("stage", range(3))
def test_a_unit_that_one_rank_uses(stage):
    def program(comm):
        wanted = {name: torch.ones(5) for name in ("a", "c", *("b" * (comm.rank == 2)))}
        model = make(Given, a=(5,), b=(5,), c=(5,))
        return gradients_of(model, comm, zero.Config(stage=stage), [wanted, wanted])

    for found in on("2x2", program):
        assert {name: grad.tolist() for name, grad in found.items()} == {
            "a": [2.0] * 5,
            "b": [0.5] * 5,
            "c": [2.0] * 5,
        }


@STAGES
def test_half_of_the_model_frozen(stage):
    model = make(Tower)
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    model.embedding.requires_grad_(False)

    def program(comm, stage):
        sharded, optimizer = shard(comm, model, zero.Config(stage=stage))
        for step in range(4):
            loss_of(sharded, tokens(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(sharded)

    for found, wanted in zip(on("2x2", program, stage), on("2x2", program, 0), strict=True):
        assert_same_bits(found, wanted)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.detach()) != parameter.requires_grad, name


@STAGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_clipping_after_the_user_sets_a_gradient_to_zero(stage, dtype):
    model = make(Tower, dtype=dtype)

    def program(comm):
        sharded, optimizer = shard(comm, model, zero.Config(stage=stage))
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        with zero.full_grads(sharded):
            sharded.head.weight.grad.zero_()
        before = gradients(sharded)
        norm = zero.clip_grad_norm_(optimizer, 0.25).item()
        return norm, before, gradients(sharded)

    norm, before, after = on("2x2", program)[0]
    exact = sum(g.double().square().sum().item() for g in before.values()) ** 0.5
    assert norm == pytest.approx(exact, rel=1e-12)
    assert before["head.weight"].abs().max().item() == 0
    scale = 0.25 / (norm + 1e-6)
    for name, grad in before.items():
        assert torch.equal(after[name], grad.clone().mul_(scale)), name
    reference = on("2x2", program)
    assert all(outcome[0] == norm for outcome in reference)


def test_norms_have_the_same_bits_in_every_stage():
    model = make(Tower)

    def program(comm, stage):
        sharded, optimizer = shard(comm, model, zero.Config(stage=stage))
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        with zero.full_grads(sharded):
            sharded.blocks[1].up.weight.grad.zero_()
        return zero.clip_grad_norm_(optimizer, 1.0).item()

    assert len({norm for stage in range(4) for norm in on("2x2", program, stage)}) == 1


@pytest.mark.parametrize(
    ("stage", "bad", "dtype"),
    [
        *((stage, torch.nan, torch.float32) for stage in range(4)),
        *((stage, torch.inf, torch.bfloat16) for stage in range(4)),
        (3, -torch.inf, torch.float16),
    ],
)
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(stage, bad, dtype, caplog):
    model = make(Given, a=(300,), b=(7,)).to(dtype)

    def program(comm):
        sharded, optimizer = shard(comm, model, zero.Config(stage=stage))
        good = {"a": torch.ones(300, dtype=dtype), "b": torch.ones(7, dtype=dtype)}
        sharded(good).backward()
        optimizer.step()
        optimizer.zero_grad()
        before, states = whole(sharded), copies(optimizer)
        poisoned = dict(good, a=good["a"].clone())
        if comm.rank == 1:
            poisoned["a"][299] = bad
        sharded(poisoned).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same_bits(before, whole(sharded))
        assert_same_bits(states, copies(optimizer))
        counted = zero.num_skipped_steps(optimizer)
        sharded(good).backward()
        optimizer.step()
        return counted, not torch.equal(before["layers.0.p"], whole(sharded)["layers.0.p"])

    with caplog.at_level(logging.INFO, "zcomm"):
        assert on("2x2", program) == [(1, True)] * 4
    assert "step skipped: a gradient is not finite" in caplog.text


def copies(optimizer):
    states = enumerate(optimizer.state.values())
    return {f"{i}.{key}": v.clone() for i, state in states for key, v in state.items()}


def test_too_many_skipped_steps():
    def program(comm):
        sharded, optimizer = shard(comm, make(Given, a=(3,)), zero.Config(max_skipped_steps=2))
        for step in range(3):
            sharded({"a": torch.full((3,), torch.nan)}).backward()
            if step == 2:
                with pytest.raises(ZcommError, match="3 steps in a row"):
                    optimizer.step()
            else:
                optimizer.step()
        return zero.num_skipped_steps(optimizer)

    assert on("2", program) == [3, 3]


@STAGES
def test_zero_grad_of_either_clears_everything(stage):
    def program(comm):
        sharded, optimizer = shard(comm, make(Given, a=(300,)), zero.Config(stage=stage))
        for clear in (optimizer.zero_grad, sharded.zero_grad):
            with zero.no_sync(sharded):
                sharded({"a": torch.full((300,), 5.0)}).backward()
            clear()
            sharded({"a": torch.ones(300)}).backward()
            assert gradients(sharded)["layers.0.p"].unique().tolist() == [1.0]
            clear()
            assert gradients(sharded)["layers.0.p"] is None

    on("2", program)


@STAGES
def test_two_graphs_and_a_block_called_twice(stage):
    model = make(Tower)

    def loss(module, comm):
        first, second = tokens(comm.rank, 0), tokens(comm.rank, 1)
        x = module.blocks[0](module.blocks[0](torch.ones(1, 33)))
        return loss_of(module, first) + loss_of(module, second) + x.square().mean()

    def program(comm, stage):
        sharded, _ = shard(comm, model, zero.Config(stage=stage))
        loss(sharded, comm).backward()
        return gradients(sharded)

    for found, wanted in zip(on("2", program, stage), on("2", program, 0), strict=True):
        assert_same_bits(found, wanted)


@STAGES
def test_sparse_gradients(stage):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 3, sparse=True)

        def forward(self, x):
            return self.embedding(x).sum()

    def program(comm):
        sharded, _ = shard(comm, Sparse(), zero.Config(stage=stage))
        sharded(torch.tensor([1, comm.rank + 2, 1])).backward()
        return gradients(sharded)["embedding.weight"]

    for found in on("2", program):
        assert found[:, 0].tolist() == [0, 2, 0.5, 0.5, 0, 0, 0, 0, 0]


def test_gradients_of_inputs_reduce_nothing():
    def program(comm):
        sharded, _ = shard(comm, make(Tower), zero.Config())
        x = torch.ones(1, 33, requires_grad=True)
        (grad,) = torch.autograd.grad(sharded.blocks[0](x).sum(), x)
        assert all(value is None for value in gradients(sharded).values())
        return grad

    alone = make(Tower)
    x = torch.ones(1, 33, requires_grad=True)
    (wanted,) = torch.autograd.grad(alone.blocks[0](x).sum(), x)
    assert all(torch.equal(found, wanted) for found in on("2", program))


def test_a_parameter_frozen_when_sharded_stays_frozen():
    model = make(Tower)
    model.embedding.requires_grad_(False)

    def program(comm):
        sharded, _ = shard(comm, model, zero.Config())
        sharded.embedding.weight.requires_grad_(True)
        with pytest.raises(ValueError, match=r"embedding\.weight was frozen"):
            sharded(tokens(0, 0))

    on("1", program)


def test_parameters_outside_the_groups_are_not_trained(caplog):
    model = make(Tower)

    def program(comm, stage):
        mine = make(Tower)
        optimizer = adamw(mine.head.parameters())
        sharded, optimizer = zero.shard(mine, optimizer, zero.Config(stage=stage), comm=comm)
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        assert all(p.grad is None for p in sharded.parameters())
        optimizer.step()
        return whole(sharded)

    for stage in range(4):
        found = on("2", program, stage)[0]
        changed = {n for n, p in model.named_parameters() if not torch.equal(found[n], p)}
        assert changed == {"head.weight", "head.bias"}
    assert "in no group of the optimizer" in caplog.text
