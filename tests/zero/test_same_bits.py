"""Without codecs every stage, secondary and division into units has the bits of stage 0.

Batch 1 and odd sizes: a product of a matrix that starts elsewhere would have other bits.
"""

import functools

import pytest
import torch

import zero
from tests.zero.models import Tower, make
from tests.zero.runs import SIZES, assert_same_bits, on, train

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("topology", "secondary"),
    [
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
    ],
)
def test_other_topologies_and_groups(topology, dtype, secondary):
    check(topology, dtype, zero.Config(secondary=secondary), steps=5)


@pytest.mark.parametrize("topology", ["1x4", "4x1", "2x2x2"])
@pytest.mark.parametrize("stage", [1, 2])
def test_other_topologies(topology, stage):
    check(topology, "bfloat16", zero.Config(stage=stage), steps=5)


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("topology", [t for t in SIZES if SIZES[t] > 1])
@pytest.mark.parametrize(
    ("stage", "secondary"), [(1, None), (2, None), (3, None), (3, "node"), (3, 1)]
)
def test_every_topology_for_longer(topology, dtype, stage, secondary):
    check(topology, dtype, zero.Config(stage=stage, secondary=secondary), steps=40)
