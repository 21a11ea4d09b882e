"""Loss scaling, against a training in one process that keeps float32 masters by hand."""

import copy
import math

import pytest
import torch

import zero
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import adamw, assert_same_bits, on, shard, whole
from zero.scaling import LossScaler

STEPS = 5


def by_hand(dtype, scale, clip, spoiled=()):
    """Train two ranks' batches: scaled gradients in ``dtype``, their mean rounded once to it.

    Returns losses of rank 0, norms and parameters. ``scale`` doubles after two good steps.
    """
    model = make(Tower, dtype=dtype)
    masters = [torch.nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    optimizer = adamw(masters, fused=True)
    losses, norms, scales, good = [], [], [], 0
    for step in range(STEPS):
        grads = []
        for rank in range(2):
            alone = copy.deepcopy(model)
            loss = loss_of(alone, tokens(rank, step))
            if rank == 0:
                losses.append(loss.item())
            factor = scale * (math.inf if (step, rank) in spoiled else 1)
            (loss * factor).backward()
            grads.append([p.grad for p in alone.parameters()])
        means = [((a.float() + b.float()) / 2).to(dtype) for a, b in zip(*grads, strict=True)]
        scales.append(scale)
        square = sum(m.double().square().sum().item() for m in means)
        norms.append(math.sqrt(square) / scale if math.isfinite(square) else math.inf)
        if not math.isfinite(norms[-1]):
            scale, good = scale / 2, 0
            continue
        if clip is not None and norms[-1] > clip:
            for mean in means:
                mean.mul_(clip / (norms[-1] + 1e-6))
        for master, mean in zip(masters, means, strict=True):
            master.grad = mean.float() / scale
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
        good += 1
        if good == 2:
            scale, good = scale * 2, 0
    return losses, norms, scales, {name: p.detach() for name, p in model.named_parameters()}


DYNAMIC = zero.DynamicLossScale(initial=1024.0, interval=2)


def scaled_training(comm, config, dtype, clip, spoiled=()):
    sharded, optimizer = shard(comm, make(Tower, dtype=dtype), config)
    losses, norms, scales, skipped = [], [], [], []
    for step in range(STEPS):
        loss = loss_of(sharded, tokens(comm.rank, step))
        losses.append(loss.item())
        scales.append(zero.loss_scale(optimizer))
        factor = math.inf if (step, comm.rank) in spoiled else 1
        zero.scale_loss(optimizer, loss * factor).backward()
        norm = zero.clip_grad_norm_(optimizer, math.inf if clip is None else clip).item()
        norms.append(norm if math.isfinite(norm) else math.inf)
        optimizer.step()
        skipped.append(zero.step_was_skipped(optimizer))
        optimizer.zero_grad()
    assert zero.num_skipped_steps(optimizer) == sum(skipped)
    return losses, norms, scales, skipped, whole(sharded)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("spoiled", [(), ((1, 1), (2, 0))])
@pytest.mark.parametrize("stage", range(4))
def test_float16(stage, spoiled, clip):
    """Z11: an overflow on one rank halves the scale on all, and changes nothing else."""
    config = zero.Config(stage=stage, loss_scale=DYNAMIC)
    losses, norms, scales, parameters = by_hand(torch.float16, 1024.0, clip, spoiled)
    for rank, found in enumerate(on("2", scaled_training, config, torch.float16, clip, spoiled)):
        if rank == 0:
            assert found[0] == losses
        assert found[1] == pytest.approx(norms, rel=1e-12)
        assert found[2] == scales
        assert found[3] == [step in {s for s, _ in spoiled} for step in range(STEPS)]
        assert_same_bits(found[4], parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_power_of_two_changes_no_bit_where_nothing_underflows(stage, dtype):
    plain = on("2x2", scaled_training, zero.Config(stage=stage), dtype, 0.5)
    scaled = on("2x2", scaled_training, zero.Config(stage=stage, loss_scale=4096.0), dtype, 0.5)
    for found, wanted in zip(scaled, plain, strict=True):
        assert found[2] == [4096.0] * STEPS
        assert found[0] == wanted[0]
        assert found[1] == pytest.approx(wanted[1], rel=1e-12)
        assert_same_bits(found[4], wanted[4])


def test_gradients_that_float16_has_not_are_kept():
    """Gradients of 1e-9 are zero in float16; scaled by 2**14 they arrive with 1 % of error."""

    def program(comm, scale):
        model = torch.nn.Linear(64, 1, bias=False).half()
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
        zero.shard(model, optimizer, zero.Config(loss_scale=scale), comm=comm)
        loss = model(torch.ones(1, 64).half()).float().sum() * 1e-9
        zero.scale_loss(optimizer, loss).backward()
        optimizer.step()
        return whole(model)["weight"]

    assert all(torch.equal(w, torch.zeros(1, 64).half()) for w in on("2", program, None))
    for weight in on("2", program, 2.0**14):
        assert torch.allclose(weight, torch.full((1, 64), -1e-3).half(), rtol=0.01)


def test_a_codec_does_not_hide_an_overflow():
    config = zero.Config(grads=("int8", "int4"), min_numel=0, loss_scale=DYNAMIC)
    found = on("2x2", scaled_training, config, torch.float16, 1.0, ((1, 3),))
    for outcome in found:
        assert outcome[3] == [False, True, False, False, False]
        assert outcome[2] == [1024.0, 1024.0, 512.0, 512.0, 1024.0]
        assert_same_bits(outcome[4], found[0][4])


def test_the_scale_of_half_a_loss_does_not_overflow():
    def program(comm):
        config = zero.Config(loss_scale="dynamic")
        _, optimizer = shard(comm, make(Tower, dtype=torch.float16), config)
        return zero.scale_loss(optimizer, torch.tensor(3.0, dtype=torch.float16))

    for loss in on("2", program):
        assert loss.dtype == torch.float32
        assert loss.item() == 3 * 65536


def test_growth_starts_again_and_the_scale_does_not_fall_below_the_minimum():
    moves = zero.DynamicLossScale(initial=8.0, growth=4.0, backoff=0.25, interval=3, minimum=1.0)
    scaler = LossScaler(moves)
    scales = []
    for skipped in (False, False, True, False, False, False, True, True, True):
        scaler.update(skipped=skipped)
        scales.append(scaler.scale)
    assert scales == [8, 8, 2, 2, 2, 8, 2, 1, 1]


@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (lambda: zero.Config(loss_scale=0.0), "loss_scale 0.0: expected a finite number above 0"),
        (lambda: zero.Config(loss_scale=True), "loss_scale True"),
        (lambda: zero.Config(loss_scale="static"), "possible are 'dynamic', a number and None"),
        (lambda: zero.DynamicLossScale(backoff=2.0), r"backoff in \(0, 1\]"),
        (lambda: zero.DynamicLossScale(minimum=0.0), "minimum 0.0"),
    ],
)
def test_refused(make_one, message):
    with pytest.raises(ValueError, match=message):
        make_one()


def test_torchs_scaler_which_decides_on_each_rank_alone_is_refused():
    def program(comm):
        model = torch.nn.Linear(8, 8)
        fused = torch.optim.AdamW(model.parameters(), fused=True)
        model, optimizer = zero.shard(model, fused, zero.Config(stage=2), comm=comm)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        with pytest.raises(ValueError, match=r"use zero.Config\(loss_scale='dynamic'\)"):
            scaler.step(optimizer)
        optimizer.step()  # without it

    on("2", program)
