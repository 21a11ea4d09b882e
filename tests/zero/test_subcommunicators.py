"""``comm=`` may be any communicator: groups that train apart have the bits of jobs of their own."""

import numpy as np
import pytest

import zero
from tests.marks import one_in
from tests.zero.models import Tower, make
from tests.zero.runs import assert_same_bits, on, train

GROUPS = {
    "level": (lambda comm: comm.level(0), "1x2"),
    "rail": (lambda comm: comm.rail(1), "2x1"),
    "split": (lambda comm: comm.split(comm.rank // 2, comm.rank), "1x2"),
}


@pytest.mark.parametrize(
    ("kind", "config"),
    one_in(3, list(GROUPS), [*map(zero.Config, range(4)), zero.Config.zeropp()]),
)
def test_two_groups(kind, config):
    """Each its own model, both at once."""
    group_of, topology = GROUPS[kind]

    def program(comm):
        group = group_of(comm)
        peers = group.all_gather_values(np.array([comm.rank]))[:, 0].tolist()
        return peers, train(group, make(Tower, seed=min(peers)), config, steps=3)

    outcomes = on("2x2", program)
    assert len({tuple(peers) for peers, _ in outcomes}) == 2
    for peers, outcome in outcomes:
        alone = on(topology, train, make(Tower, seed=min(peers)), config, steps=3)
        expected = alone[0]
        assert outcome.losses in [found.losses for found in alone]
        assert_same_bits(outcome.parameters, expected.parameters)


@pytest.mark.slow
def test_tensor_parallelism_times_zero(launch, tmp_path):
    run = launch("-m", "tests.zero.tensor_parallel_program", tmp_path / "init", num_ranks=4)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["same"]
