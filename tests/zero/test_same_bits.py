"""Without codecs every stage, secondary and division into units has the bits of stage 0.

Batch 1 and odd sizes: a product of a matrix that starts elsewhere would have other bits.
"""

import functools

import pytest
import torch

import zero
from tests.marks import one_in
from tests.zero.models import Reordered, Tower, make
from tests.zero.runs import SIZES, assert_same_bits, on, shard, train, whole
from topology import Level, Topology

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@functools.cache
def reference(topology, dtype, **options):
    model = make(Tower, dtype=DTYPES[dtype])
    return on(topology, train, model, zero.Config(stage=0), **options)


def check(topology, dtype, config, **options):
    expected = reference(topology, dtype, **options)
    outcomes = on(topology, train, make(Tower, dtype=DTYPES[dtype]), config, **options)
    for rank, (outcome, wanted) in enumerate(zip(outcomes, expected, strict=True)):
        assert outcome.losses == wanted.losses, rank
        assert outcome.norms == wanted.norms, rank
        assert_same_bits(outcome.parameters, wanted.parameters)
        assert_same_bits(outcome.parameters, expected[0].parameters)
        assert_same_bits(outcome.buffers, expected[0].buffers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config", [*(zero.Config(stage=stage) for stage in (1, 2, 3)), zero.Config(secondary="node")]
)
def test_twenty_steps(config, dtype):
    check("2x2", dtype, config, steps=20)


PLACES = [
    ("2x2", 1),
    ("2x2", 4),
    ("1x4", 2),
    ("1x4", "node"),
    ("4x1", "node"),
    ("2x2x2", "node"),
    ("2x2x2", 2),
    ("1x4", None),
    ("4x1", None),
    ("2x2x2", None),
]


@pytest.mark.parametrize(
    ("topology", "secondary", "dtype"), one_in(2, PLACES, ["float32", "bfloat16"])
)
def test_other_topologies_and_groups(topology, dtype, secondary):
    check(topology, dtype, zero.Config(secondary=secondary), steps=3)


@pytest.mark.parametrize("topology", ["1x4", "4x1", "2x2x2"])
@pytest.mark.parametrize("stage", [1, 2])
def test_other_topologies(topology, stage):
    check(topology, "bfloat16", zero.Config(stage=stage), steps=3)


@pytest.mark.parametrize("units", [(), ("blocks.0",), ("blocks.0.up", "blocks.1", "head")])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_units(stage, units):
    check("2x2", "float32", zero.Config(stage=stage, units=units), steps=5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float16(stage):
    check("2x2", "float16", zero.Config(stage=stage), steps=5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_and_clipping(dtype, stage):
    check("2x2", dtype, zero.Config(stage=stage), steps=3, micro=3, clip=0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_sync(dtype, stage):
    check("2x2", dtype, zero.Config(stage=stage), steps=3, micro=3, no_sync=True, clip=0.5)


@pytest.mark.parametrize("option", ["grad_dtype", "reduce_dtype"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float32_gradients(stage, option):
    model = make(Tower, dtype=torch.bfloat16)
    wide = {option: torch.float32}
    expected = on("2x2", train, model, zero.Config(stage=0, **wide), steps=5)
    outcomes = on("2x2", train, model, zero.Config(stage=stage, **wide), steps=5)
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert outcome.losses == wanted.losses
        assert_same_bits(outcome.parameters, wanted.parameters)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_that_begins_and_ends_with_a_parameter_used_late(stage):
    """The number of backwards changes from step to step; what is rounded when does not differ."""
    model = make(Reordered, dtype=torch.bfloat16)

    def program(comm, config):
        sharded, optimizer = shard(comm, model, config)
        for step, num_backwards in enumerate((1, 1, 3, 2, 1, 1)):
            for part in range(num_backwards):
                x = normal(comm.rank, step, part).bfloat16()
                order = (0, 1, 2) if part == num_backwards - 1 else (0, 2)
                sharded(x, order).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(sharded)

    compare_with_stage_0(program, zero.Config(stage=stage))


@pytest.mark.parametrize("config", [zero.Config(stage=2), zero.Config(secondary="node")])
def test_order_of_calls_changes_and_units_are_left_out(config):
    """In one unit parameters of two dtypes, too."""
    model = make(Reordered)
    model.parts[1].bfloat16()
    model.parts[1].norm.float()

    def program(comm, config):
        sharded, optimizer = shard(comm, model, config)
        for step, order in enumerate([(0, 2), (2, 0), (2,), (0, 0, 2), (0, 2)]):
            x = normal(comm.rank, step)
            # Autocast's cache of casts is shared, and emptied, by all threads: here, by all ranks.
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                y = sharded(x, order) + sharded.parts[1](x)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(sharded)

    compare_with_stage_0(program, config)


def normal(*numbers):
    seed = sum(number * 1000**place for place, number in enumerate(numbers))
    return torch.randn(3, 33, generator=torch.Generator().manual_seed(seed))


def compare_with_stage_0(program, config, topology="2x2"):
    expected = on(topology, program, zero.Config(stage=0))
    for found in on(topology, program, config):
        assert_same_bits(found, expected[0])


UNEVEN = Topology((Level("node", ((0, 2), (1,))), Level("network", ((0, 1, 2),))))
PERMUTED = Topology((Level("node", ((3, 0), (2, 1))), Level("network", ((0, 1, 2, 3),))))


@pytest.mark.parametrize(
    ("topology", "config"),
    [
        (UNEVEN, zero.Config(stage=2)),
        (UNEVEN, zero.Config(stage=3)),
        (UNEVEN, zero.Config(secondary=1)),
        (PERMUTED, zero.Config(stage=1)),
        (PERMUTED, zero.Config(stage=3)),
        (PERMUTED, zero.Config(secondary="node")),
    ],
)
def test_uneven_nodes_and_permuted_ranks(topology, config):
    model = make(Tower)

    def program(comm, config):
        return train(comm, model, config, steps=3).parameters

    compare_with_stage_0(program, config, topology)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("topology", [t for t in SIZES if SIZES[t] > 1])
@pytest.mark.parametrize(
    ("stage", "secondary"), [(1, None), (2, None), (3, None), (3, "node"), (3, 1)]
)
def test_every_topology_for_longer(topology, dtype, stage, secondary):
    check(topology, dtype, zero.Config(stage=stage, secondary=secondary), steps=40)
