"""Gradients in two operations: accumulation in the node, and what the outer codec lost fed back."""

import dataclasses
import functools

import pytest
import torch

import zcomm
import zero
from tests.marks import one_in
from tests.zero.models import Reordered, Tower, loss_of, make, tokens
from tests.zero.runs import (
    SIZES,
    assert_same_bits,
    gradients,
    local_gradients,
    on,
    shard,
    train,
    whole,
)
from zcomm import Codec

CODECS = [None, ("int8", "int4"), (None, "int8"), ("int8", None)]


@pytest.mark.parametrize(
    ("topology", "grads", "dtype"),
    one_in(
        2,
        ["2x2", "4x1", "2x2x2", "3x2"],
        [(codec,) for codec in CODECS],
        [torch.float32, torch.bfloat16],
    ),
)
def test_one_backward_a_step_has_the_bits_of_one_operation(topology, grads, dtype):
    model = make(Tower, dtype=dtype)
    size = {**SIZES, "3x2": 6}[topology]

    def run(accumulate):
        config = zero.Config(stage=2, grads=grads, accumulate=accumulate, min_numel=0)
        program = functools.partial(train, model=model, config=config, steps=3, clip=0.5)
        return zcomm.run_local(program, size, topology)

    for found, wanted in zip(run("node"), run("rank"), strict=True):
        assert found.losses == wanted.losses
        assert found.norms == wanted.norms
        assert_same_bits(found.parameters, wanted.parameters)


@functools.cache
def stage_0(dtype, feedback):
    return on("2x2", train, make(Tower, dtype=dtype), config_of(0, feedback), **OPTIONS)


OPTIONS = {"steps": 3, "micro": 3, "clip": 0.5}


def config_of(stage, feedback):
    grads = ("int8", "int4") if feedback else None
    return zero.Config(
        stage=stage, grads=grads, grads_feedback=feedback, accumulate="node", min_numel=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_have_the_same_bits(stage, feedback, dtype):
    outcomes = on("2x2", train, make(Tower, dtype=dtype), config_of(stage, feedback), **OPTIONS)
    for found, wanted in zip(outcomes, stage_0(dtype, feedback), strict=True):
        assert found.losses == wanted.losses
        assert found.norms == wanted.norms
        assert_same_bits(found.parameters, wanted.parameters)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_sum_of_micro_batches_is_that_of_float64(stage):
    model = make(Tower)

    def program(comm):
        sharded, _ = shard(comm, model, zero.Config(stage=stage, accumulate="node"))
        for part in range(3):
            loss_of(sharded, tokens(comm.rank, part)).backward()
        return gradients(sharded)

    parts = [local_gradients(model, 4, step=part) for part in range(3)]
    for found in on("2x2", program):
        for name, grad in found.items():
            each = torch.stack([rank[name].double() for part in parts for rank in part])
            bound = 12 * 2.0**-24 * each.abs().sum(0) / 4
            assert bool(((grad.double() - each.sum(0) / 4).abs() <= bound).all()), name


def test_parameters_that_were_not_used_have_no_gradient():
    def program(comm):
        sharded, optimizer = shard(comm, make(Reordered), zero.Config(accumulate="node"))
        x = torch.ones(3, 33)
        for order in ((0, 2), (0,)):
            sharded(x, order).sum().backward()
        used = {name.split(".")[1] for name, g in gradients(sharded).items() if g is not None}
        optimizer.zero_grad()
        sharded(x, (1,)).sum().backward()
        after = {name.split(".")[1] for name, g in gradients(sharded).items() if g is not None}
        return used, after

    assert on("2x2", program) == [({"0", "2", "weight", "bias"}, {"1", "weight", "bias"})] * 4


FEEDBACK = zero.Config(grads=("int8", "int4"), grads_feedback=True, min_numel=0, prefetch=0)


def delivered(comm, config, times):
    """Reduce the same gradients again and again."""
    sharded, optimizer = shard(comm, make(Tower), config)
    found = []
    for _ in range(times):
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        found.append(gradients(sharded))
        optimizer.zero_grad()
    return found


def by_hand(times):
    """The three lines of ``zero.hops`` for whole parameters: blocks count from their start."""
    inner, outer, kept = Codec.parse("int8"), Codec.parse("int4"), Codec.parse("int8:block=256")

    def through(codec, x):
        return codec.decode(codec.encode(x.flatten()), x.numel(), torch.float32).view(x.shape)

    parts = local_gradients(make(Tower), 4)
    residuals = {}
    for _ in range(times):
        found = {}
        for name in parts[0]:
            sums = []
            for node in range(2):
                a, b = (through(inner, parts[2 * node + k][name]) for k in range(2))
                c = a + b + residuals.get((node, name), 0)
                sums.append(through(outer, c))
                residuals[node, name] = through(kept, c - sums[-1])
            found[name] = (sums[0] + sums[1]) / 4
        yield found


def test_feedback_is_the_text_of_the_algorithm():
    for found in on("2x2", delivered, FEEDBACK, 4):
        for got, wanted in zip(found, by_hand(4), strict=True):
            for name, grad in got.items():
                assert torch.equal(grad, wanted[name]), name


def test_errors_do_not_add_up():
    """After T reductions the error of the mean is that of one, divided by T; without, it stays."""
    times = 16

    def error(config):
        found = on("2x2", delivered, config, times)[0]
        parts = local_gradients(make(Tower), 4)
        inner = Codec.parse("int8")
        total = wrong = 0.0
        for name in parts[0]:
            sent = [
                inner.decode(inner.encode(p[name].flatten()), p[name].numel(), torch.float32)
                for p in parts
            ]
            exact = torch.stack(sent).double().mean(0)
            mean = torch.stack([g[name].double() for g in found]).mean(0).flatten()
            wrong += (mean - exact).square().sum().item()
            total += exact.square().sum().item()
        return (wrong / total) ** 0.5

    without = error(dataclasses.replace(FEEDBACK, grads_feedback=False))
    assert without > 0.05
    assert error(FEEDBACK) < 2 * without / times


def test_a_gradient_that_is_not_finite_does_not_stay_in_the_residual():
    def program(comm):
        sharded, optimizer = shard(comm, make(Tower), FEEDBACK)
        for step in range(3):
            loss = loss_of(sharded, tokens(comm.rank, step))
            (loss * (torch.inf if step == 1 and comm.rank == 3 else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero.num_skipped_steps(optimizer), whole(sharded)

    for skipped, parameters in on("2x2", program):
        assert skipped == 1
        assert all(bool(p.isfinite().all()) for p in parameters.values())


def test_a_residual_moves_with_the_loss_scale():
    """A scale that doubles every step changes no bit: all are powers of two."""

    def program(comm, scale):
        config = dataclasses.replace(FEEDBACK, loss_scale=scale)
        sharded, optimizer = shard(comm, make(Tower), config)
        for step in range(4):
            zero.scale_loss(optimizer, loss_of(sharded, tokens(comm.rank, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (zero.loss_scale(optimizer) == 16 * 64) == (scale is not None)
        return whole(sharded)

    moving = zero.DynamicLossScale(initial=64.0, interval=1)
    for found, wanted in zip(on("2x2", program, moving), on("2x2", program, None), strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("topology", ["2x2", "4x1"])
def test_memory_is_a_share_of_the_node(topology):
    model = make(Tower, width=128, hidden=512)
    num_local = int(topology[2])
    numel = sum(p.numel() for p in model.parameters())

    def program(comm):
        config = dataclasses.replace(FEEDBACK, accumulate="node")
        sharded, optimizer = shard(comm, model, config)
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        waiting = zero.model_state_nbytes(sharded, optimizer).gradients
        optimizer.step()
        hops = sharded._zero_engine.reducer.hops
        return waiting, hops.residual_nbytes

    for waiting, residual in on(topology, program):
        assert waiting == pytest.approx(4 * numel / num_local, rel=0.01)
        assert residual == pytest.approx(numel * (1 + 2 / 256) / num_local, rel=0.01)


def test_one_node_has_one_hop(caplog):
    def program(comm, config):
        return train(comm, make(Tower), config, steps=2).parameters

    config = dataclasses.replace(FEEDBACK, accumulate="node", grads="int4")
    plain = zero.Config(grads="int4", min_numel=0)
    with caplog.at_level("INFO", "zcomm"):
        found = on("1x4", program, config)
    for parameters, wanted in zip(found, on("1x4", program, plain), strict=True):
        assert_same_bits(parameters, wanted)
    assert "one node: accumulate='node' and grads_feedback have no hop" in caplog.text


def test_uneven_nodes_are_refused():
    def program(comm):
        with pytest.raises(ValueError, match="nodes of one size; these have 2, 1 ranks"):
            shard(comm, make(Tower), zero.Config(accumulate="node"))

    from tests.zero.test_same_bits import UNEVEN

    on(UNEVEN, program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": "world"}, "accumulate 'world': possible are 'rank' and 'node'"),
        ({"grads_feedback": True}, "there has to be a codec"),
        ({"grads_feedback": True, "grads": ("int8", None)}, "there has to be a codec"),
        ({"grads_feedback": True, "grads": "int4:rounding=stochastic"}, "rounds to nearest"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zero.Config(**options)
