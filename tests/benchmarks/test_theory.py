"""Theory against the figures that the papers print, and against messages counted one by one."""

import itertools

import pytest

import topology
from benchmarks.training import theory

GIGA = 1e9

# ZeRO (arXiv 1910.02054), table 1: GB of model states of a device, stages 0 and 3.
STATES = [
    (7.5e9, 1, 120, 120),
    (7.5e9, 4, 120, 30),
    (7.5e9, 16, 120, 7.5),
    (7.5e9, 64, 120, 1.88),
    (7.5e9, 256, 120, 0.47),
    (7.5e9, 1024, 120, 0.12),
    (128e9, 64, 2048, 32),
    (128e9, 1024, 2048, 2),
    (1e12, 256, 16000, 62.5),
    (1e12, 1024, 16000, 15.6),
]


@pytest.mark.parametrize(("numel", "num_ranks", "replicated", "sharded"), STATES)
def test_model_states_are_those_of_the_zero_paper(numel, num_ranks, replicated, sharded):
    shape = (num_ranks,)
    assert theory.stage0(numel, shape).states / GIGA == pytest.approx(replicated, abs=0.05)
    assert theory.stage3(numel, shape).states / GIGA == pytest.approx(sharded, abs=0.05)
    assert theory.zeropp(numel, shape).states == theory.stage3(numel, shape).states


@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (8, 4), (1, 4), (2, 2, 2)])
def test_a_node_sends_the_volumes_of_the_papers_to_other_nodes(shape):
    numel, num_nodes = 1e6, shape[-1]
    ranks_per_node = 1
    for extent in shape[:-1]:
        ranks_per_node *= extent
    volume = 2 * numel * (num_nodes - 1) / num_nodes
    sent = {
        "stage 0": theory.stage0(numel, shape),
        "stage 3": theory.stage3(numel, shape),
        "ZeRO++": theory.zeropp(numel, shape),
    }
    volumes = {name: expected.between * ranks_per_node / volume for name, expected in sent.items()}
    assert volumes["stage 0"] == pytest.approx(2)
    assert volumes["stage 3"] == pytest.approx(3)
    # 0.75, and a scale of two bytes for 256 weights and for 128 gradients: 4 times less, or 3.94.
    assert volumes["ZeRO++"] == pytest.approx(0.75 + (2 / 256 + 2 / 128) / 2)
    assert volumes["stage 3"] / volumes["ZeRO++"] == pytest.approx(3.94, abs=0.005)


def test_seven_billion_parameters_on_four_nodes_of_eight():
    numel, shape = 7e9, (8, 4)
    assert theory.stage3(numel, shape).between * 8 / GIGA == pytest.approx(31.5)
    assert theory.zeropp(numel, shape).between * 8 / GIGA == pytest.approx(7.875, rel=0.016)
    assert theory.zeropp(numel, shape).secondary / GIGA == pytest.approx(1.75)


def volume_by_counting(spec):
    """Count what a rank sends per level when one volume is gathered, shard by shard."""
    where = topology.parse(spec)
    holds = {rank: {rank} for rank in range(where.size)}
    sent = [0.0] * len(where.levels)
    for level in reversed(range(len(where.levels))):
        received = {rank: set(shards) for rank, shards in holds.items()}
        for rank, peer in itertools.permutations(range(where.size), 2):
            if peer in where.rail(level, rank):
                received[peer] |= holds[rank]
                sent[level] += len(holds[rank]) / where.size**2
        holds = received
    assert all(len(shards) == where.size for shards in holds.values())
    return sent


@pytest.mark.parametrize("spec", ["4", "2x2", "4x2", "2x4", "1x4", "4x1", "2x2x2", "3x2x4"])
def test_levels_add_up_to_messages_counted_one_by_one(spec):
    shape = topology.parse(spec).shape
    counted = volume_by_counting(spec)
    found = [nbytes / (2 * 3) for nbytes in theory.stage3(1, shape).levels]
    assert found == pytest.approx(counted)


def test_zeropp_sends_16_bit_weights_twice_inside_a_node_and_none_between():
    numel, shape = 1000, (2, 2)
    expected = theory.zeropp(numel, shape)
    scales = numel * 2 / 128
    assert expected.inside == pytest.approx((2 * 2 * numel + numel / 2 + scales) / 2)
    assert expected.between == pytest.approx((numel * (1 + 2 / 256) + numel / 2 + scales) / 4)
    assert expected.secondary == numel * 2 / 2
    one_node = theory.zeropp(numel, (4,))
    assert (one_node.between, one_node.secondary) == (0.0, 0.0)
    assert one_node.inside == pytest.approx((2 * numel * (1 + 2 / 256) + numel / 2 + scales) * 0.75)
    assert theory.zeropp(numel, (1, 4)).inside == 0.0
