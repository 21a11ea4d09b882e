"""Quantised weights and gradients, against the codec's own text of what a receiver decodes.

Blocks and segments count from a parameter's start, so each expected value needs the parameter
alone: no cut, no unit, no number of ranks is in the oracle.
"""

import dataclasses
import functools
import logging

import pytest
import torch

import zero
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import (
    assert_same_bits,
    gradients,
    local_gradients,
    on,
    relative_difference,
    shard,
    train,
    whole,
)
from zcomm import Codec

DTYPES = [torch.float32, torch.bfloat16]
WEIGHTS = ("int8", "int4:block=1024")
OTHER_WEIGHTS = ("int4", "int8:block=64", "int8:block=512", "fp16", "bf16")


def round_trip(codec, tensor, dtype=None):
    """Return what a receiver decodes, in ``dtype`` (the tensor's) and the tensor's shape."""
    codec = Codec.parse(codec)
    flat = tensor.detach().reshape(-1)
    return codec.decode(codec.encode(flat), flat.numel(), dtype or tensor.dtype).view(tensor.shape)


def configs(codec):
    return [
        zero.Config(stage=1, weights=codec, min_numel=0),
        zero.Config(stage=2, weights=codec, min_numel=0),
        zero.Config(stage=3, weights=codec, min_numel=0),
        zero.Config(stage=3, weights=codec, secondary="node", min_numel=0),
        zero.Config(stage=3, weights=codec, secondary=1, min_numel=0),
        zero.Config(stage=3, weights=codec, secondary="node", secondary_codec=codec, min_numel=0),
        zero.Config(stage=3, weights=codec, secondary=1, secondary_codec=codec, min_numel=0),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", WEIGHTS)
@pytest.mark.parametrize("index", range(7))
def test_weights_in_forward_are_what_receivers_decode(codec, dtype, index):
    check_weights(codec, dtype, index)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", OTHER_WEIGHTS)
@pytest.mark.parametrize("index", range(7))
def test_other_codecs_of_weights(codec, dtype, index):
    check_weights(codec, dtype, index)


def check_weights(codec, dtype, index):
    model = make(Tower, dtype=dtype)
    model.blocks[1].requires_grad_(False)

    def program(comm):
        sharded, _ = shard(comm, model, configs(codec)[index])
        return whole(sharded)

    for found in on("2x2", program):
        wanted = {name: round_trip(codec, p) for name, p in model.named_parameters()}
        assert_same_bits(found, wanted)


@functools.cache
def trained(dtype, index):
    return on("2x2", train, make(Tower, dtype=dtype), configs("int8")[index], steps=3, micro=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(1, 7))
def test_stages_and_secondaries_have_the_same_bits(dtype, index):
    for outcome, wanted in zip(trained(dtype, index), trained(dtype, 0), strict=True):
        assert outcome.losses == wanted.losses
        assert_same_bits(outcome.parameters, wanted.parameters)
        assert_same_bits(outcome.parameters, trained(dtype, 0)[0].parameters)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("stage", "grads"),
    [
        *((stage, ("int8", "int4")) for stage in range(4)),
        (3, ("int4:block=32", "int4")),
        (3, (None, "int8")),
    ],
)
def test_gradients_on_two_hops(stage, grads, dtype):
    model = make(Tower, dtype=dtype)
    config = zero.Config(stage=stage, grads=grads, min_numel=0, grad_dtype=torch.float32)

    def program(comm):
        sharded, _ = shard(comm, model, config)
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        return gradients(sharded)

    parts = local_gradients(model, 4)
    for found in on("2x2", program):
        for name, grad in found.items():
            assert torch.equal(grad, two_hops(grads, [part[name] for part in parts])), name


def two_hops(codecs, parts):
    """Sum inside each of two nodes, then over the nodes, every hop through its codec."""
    inner, outer = codecs
    sums = []
    for node in (parts[:2], parts[2:]):
        terms = [p.float() if inner is None else round_trip(inner, p, torch.float32) for p in node]
        sums.append(round_trip(outer, terms[0] + terms[1]))
    return (sums[0] + sums[1]) / 4


@pytest.mark.parametrize("topology", ["2", "1x4", "4x1", "2x2x2"])
def test_gradient_error_is_inside_the_bound(topology):
    model = make(Tower)
    config = zero.Config(grads="int4", min_numel=0)

    def program(comm):
        sharded, _ = shard(comm, model, config)
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        return comm.size, gradients(sharded)

    size, found = on(topology, program)[0]
    parts = local_gradients(model, size)
    nesting = {"2": [2], "1x4": [4], "4x1": [4], "2x2x2": [2, 2, 2]}[topology]
    for name, grad in found.items():
        mean, bound = bounded_mean("int4", [part[name] for part in parts], nesting)
        assert bool(((grad.double() - mean).abs() <= bound).all()), name


def bounded_mean(codec, parts, nesting):
    """Return the float64 mean, and the bound of NUMERICS: of every chunk encoded at each level."""
    codec = Codec.parse(codec)
    size = len(parts)
    exact = torch.stack([part.double() for part in parts])
    bound = size * 2.0**-22 * exact.abs().sum(0)
    terms = parts
    for extent in nesting:
        for term in terms:
            bound += torch.from_numpy(codec.error_bound(term))
        groups = [terms[i : i + extent] for i in range(0, len(terms), extent)]
        terms = [sum(round_trip(codec, term, torch.float32) for term in group) for group in groups]
    return exact.mean(0), bound / size


@pytest.mark.parametrize("stage", range(4))
def test_quantised_gradients_have_the_same_bits_in_every_stage(stage):
    config = zero.Config(stage=stage, grads=("int8", "int4"), min_numel=0)
    outcomes = on("2x2", train, make(Tower), config, steps=3, micro=2, clip=0.5)
    for outcome, wanted in zip(outcomes, quantised_stage_0(), strict=True):
        assert outcome.losses == wanted.losses
        assert outcome.norms == wanted.norms
        assert_same_bits(outcome.parameters, wanted.parameters)


@functools.cache
def quantised_stage_0():
    config = zero.Config(stage=0, grads=("int8", "int4"), min_numel=0)
    return on("2x2", train, make(Tower), config, steps=3, micro=2, clip=0.5)


RANDOM = "int4:rounding=stochastic,transform=hadamard"


@functools.cache
def trained_at_random(stage, index, seed):
    weights = dataclasses.replace(configs(RANDOM)[index], seed=seed)
    config = dataclasses.replace(weights, stage=stage, grads=("int8:rounding=stochastic", RANDOM))
    return on("2x2", train, make(Tower), config, steps=3, micro=2)


@pytest.mark.parametrize(("stage", "index"), [(2, 1), (3, 2), (3, 3), (3, 5)])
def test_draws_depend_on_seed_shard_and_version_alone(stage, index):
    """All gathers of a version, in every stage and from either secondary, decode to one result."""
    outcomes = trained_at_random(stage, index, 7)
    for outcome, wanted in zip(outcomes, trained_at_random(1, 0, 7), strict=True):
        assert outcome.losses == wanted.losses
        assert_same_bits(outcome.parameters, wanted.parameters)
        assert_same_bits(outcome.parameters, outcomes[0].parameters)


def test_another_seed_draws_otherwise():
    losses = [trained_at_random(1, 0, seed)[0].losses for seed in (7, 8)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("topology", ["2x2", pytest.param("1x4", marks=pytest.mark.slow)])
def test_zeropp_trains_as_exact_stage_3_does(topology):
    config = dataclasses.replace(zero.Config.zeropp(), min_numel=0)
    options = {"steps": 15, "batch": 4, "data": same_tokens}
    exact = on(topology, train, make(Tower), zero.Config(), **options)
    quantised = on(topology, train, make(Tower), config, **options)
    losses = [mean_losses(outcomes) for outcomes in (exact, quantised)]
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.02)
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert relative_difference(quantised[0].parameters, exact[0].parameters) > 0
    for outcome in quantised:
        assert_same_bits(outcome.parameters, quantised[0].parameters)


def same_tokens(rank, step, batch):
    return tokens(rank, 0, batch)


def mean_losses(outcomes):
    return [sum(step) / len(step) for step in zip(*(o.losses for o in outcomes), strict=True)]


def test_nan_in_a_quantised_gradient_skips_the_step():
    model = make(Tower)

    def program(comm):
        config = zero.Config(grads=("int8", "int4"), min_numel=0)
        sharded, optimizer = shard(comm, model, config)
        before = whole(sharded)
        loss = loss_of(sharded, tokens(comm.rank, 0))
        (loss * (torch.nan if comm.rank == 3 else 1)).backward()
        optimizer.step()
        assert_same_bits(whole(sharded), before)
        return zero.num_skipped_steps(optimizer)

    assert on("2x2", program) == [1] * 4


def test_small_units_travel_exactly_and_are_named(caplog):
    model = make(Tower)
    numel = sum(p.numel() for p in model.blocks[0].parameters())

    def program(comm):
        config = zero.Config(weights="int4", min_numel=numel)
        sharded, _ = shard(comm, model, config)
        return whole(sharded)

    with caplog.at_level(logging.INFO, "zcomm"):
        for found in on("2x2", program):
            for name, p in model.named_parameters():
                inside = name.startswith("blocks")
                wanted = round_trip("int4", p) if inside else p.detach()
                assert torch.equal(found[name], wanted), name
    assert f"units of fewer than {numel} elements travel without codecs: the root" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("topology", ["2x2", "2x2x2"])
def test_zeropp_trains_as_exact_stage_3_does_for_long(topology, dtype):
    model = make(Tower, width=128, hidden=512, dtype=dtype)
    options = {"steps": 60, "batch": 4, "data": same_tokens}
    exact = on(topology, train, model, zero.Config(), **options)
    quantised = on(topology, train, model, zero.Config.zeropp(), **options)
    tails = [sum(mean_losses(outcomes)[-20:]) for outcomes in (exact, quantised)]
    assert tails[1] == pytest.approx(tails[0], rel=0.02)
