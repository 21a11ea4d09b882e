"""Bytes between nodes, counted, against the volumes of the ZeRO++ paper (table 1)."""

import dataclasses
import functools

import pytest
import torch

import zero
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import SIZES, on, shard

WIDE = {"width": 128, "hidden": 512, "num_blocks": 2, "vocabulary": 512}
DATA = ("all_gather", "reduce_scatter")


@functools.cache
def model():
    return make(Tower, **WIDE, dtype=torch.bfloat16)


@functools.cache
def volume():
    return 2 * sum(p.numel() for p in model().parameters())


def sent_between_nodes(topology, config, *, micro=1):
    """Return the bytes of one step between nodes, all ranks together, per operation."""

    def program(comm):
        sharded, optimizer = shard(comm, model(), config)
        for _ in range(2):
            comm.traffic.reset()
            for part in range(micro):
                loss_of(sharded, tokens(comm.rank, part, vocabulary=512)).backward()
            optimizer.step()
            optimizer.zero_grad()
        last = len(comm.topology.levels) - 1
        return [comm.traffic.wire_nbytes(last, name) for name in DATA]

    per_rank = on(topology, program)
    return [sum(column) for column in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("topology", ["2x2", "4x1", "2x2x2"])
@pytest.mark.parametrize("stage", range(4))
def test_exact_stages_send_two_or_three_volumes(topology, stage):
    num_nodes = int(topology[0])
    gathers = {0: 1, 1: 1, 2: 1, 3: 2}[stage]
    once = volume() * (num_nodes - 1)  # all nodes together: volume·(n-1)/n for each
    assert sent_between_nodes(topology, zero.Config(stage=stage)) == [gathers * once, once]


def test_zeropp_sends_a_quarter():
    exact = sum(sent_between_nodes("2x2", zero.Config()))
    quantised = sum(sent_between_nodes("2x2", zero.Config.zeropp()))
    assert exact / quantised >= 3.8
    # int8 weights once, int4 gradients: one and a half bytes for each two, and 2 % of scales.
    numel = volume() / 2
    assert numel * 1.5 <= quantised <= numel * 1.5 * 1.03


@pytest.mark.parametrize("codec", [None, "int8"])
def test_later_gathers_of_a_version_stay_inside_the_node(codec):
    for codes in (None, codec):
        config = zero.Config(weights=codec, secondary="node", secondary_codec=codes)
        once = sent_between_nodes("2x2", config)
        thrice = sent_between_nodes("2x2", config, micro=3)
        assert thrice == [once[0], 3 * once[1]]


@pytest.mark.parametrize(("codec", "codes"), [(None, None), ("int8", None), ("int8", "int8")])
def test_gathers_inside_the_node_send_what_is_held(codec, codes):
    config = zero.Config(weights=codec, secondary="node", secondary_codec=codes)

    def program(comm):
        sharded, _ = shard(comm, model(), config)
        comm.traffic.reset()
        loss_of(sharded, tokens(comm.rank, 0, vocabulary=512)).backward()
        return comm.traffic.wire_nbytes(0, "all_gather")

    inside = sum(on("2x2", program))
    # Forward and backward, in each of two nodes, half of the model from each of two ranks.
    whole = 2 * 2 * volume()
    assert inside == whole if codes is None else whole / 2 <= inside <= whole / 2 * 1.03


FOUR_BITS = {"grads": ("int4", "int4"), "min_numel": 0}


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(
    ("secondary", "accumulate", "weights", "once", "each"),
    [
        ("node", "rank", "int8", 0.5, 0.25),
        ("node", "node", "int8", 0.75, 0.0),
        ("persistent", "rank", None, 0.25, 0.25),
        ("persistent", "node", None, 0.5, 0.0),
    ],
)
def test_volumes_with_accumulation(secondary, accumulate, weights, once, each, micro):
    """Volumes of 16-bit parameters between nodes: ``once`` a step, ``each`` micro-batch."""
    config = zero.Config(secondary=secondary, accumulate=accumulate, weights=weights, **FOUR_BITS)
    sent = sum(sent_between_nodes("2x2", config, micro=micro)) / volume()
    elements = once + each * micro
    # Scales: 2 bytes for 128 elements of int4, 256 of int8; and padding of messages.
    assert elements <= sent <= 1.04 * elements


@pytest.mark.parametrize("topology", ["2x2", "2x2x2"])
def test_a_persistent_secondary_sends_a_sixth_of_stage_3(topology):
    exact = sum(sent_between_nodes(topology, zero.Config()))
    config = zero.Config(secondary="persistent", **FOUR_BITS)
    assert exact / sum(sent_between_nodes(topology, config)) >= 5.8


def test_safe4_sends_no_more_between_nodes_than_zeropp():
    safe4, zeropp = (
        dataclasses.replace(config, min_numel=0)
        for config in (zero.Config.safe4(), zero.Config.zeropp())
    )
    assert sent_between_nodes("2x2", safe4) == sent_between_nodes("2x2", zeropp)


def test_frozen_parameters_have_no_gradient_traffic():
    def program(comm, frozen):
        sharded_model = make(Tower, **WIDE)
        for block in sharded_model.blocks:
            block.requires_grad_(not frozen)
        sharded, _ = shard(comm, sharded_model, zero.Config(stage=2))
        loss_of(sharded, tokens(comm.rank, 0, vocabulary=512)).backward()
        return comm.traffic.wire_nbytes(operation="reduce_scatter")

    blocks = sum(p.numel() for p in model().blocks.parameters())
    difference = sum(on("4x1", program, frozen=False)) - sum(on("4x1", program, frozen=True))
    assert difference == 4 * blocks * (SIZES["4x1"] - 1)
