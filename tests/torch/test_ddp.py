"""The hook for DDP: means and residuals by their definitions on threads, then trainings."""

from types import SimpleNamespace

import pytest
import torch

from tests.collectives import checks
from tests.torch import groups
from zcomm import Codec
from zcomm.torch import ddp
from zcomm.torch.ddp import QuantizedAllReduce, _cut

SIZE = 4
NUMELS = (300, 7, 12_000)
PARAMETERS = [torch.nn.Parameter(torch.zeros(numel)) for numel in NUMELS]
INSIDE = ("int4", None)
"""The first hop loses something, what follows does not."""


@pytest.fixture(autouse=True)
def _no_default_group(monkeypatch):
    """Take the communicator that a test gives for the process group's."""
    places = SimpleNamespace(group=lambda comm: comm)
    monkeypatch.setattr(ddp, "world", lambda topology: places)


def on_four_ranks(program):
    def test():
        groups.run(program, SIZE, "2x2")

    return test


def gradient(rank, step=0):
    return torch.randn(sum(NUMELS), generator=torch.Generator().manual_seed(100 * step + rank))


def state(comm, codec, **options):
    return QuantizedAllReduce(codec, process_group=comm, min_numel=0, **options)


def reduced(state, given, parameters=PARAMETERS):
    """Reduce as the hook does, and return the bucket."""
    bucket = given.clone()
    for work in state.reduce(bucket, parameters):
        work.wait()
    return bucket


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("lengths", [(5,), (4096, 1, 4096), (300, 0, 7, 12_000), (0,)])
def test_shards_cover_a_bucket_and_no_segment_holds_two_parameters(size, lengths):
    layout = _cut("float32", lengths, size)
    owner = [number for number, length in enumerate(lengths) for _ in range(length)]
    covered = []
    for shard in layout.shards:
        for segment in shard:
            inside = range(segment.start, segment.start + segment.numel)
            assert len({owner[element] for element in inside}) == 1
            covered += inside
    assert covered == list(range(sum(lengths)))


@on_four_ranks
def test_the_exact_mean_is_the_communicators(comm):
    given = gradient(comm.rank)
    expected = comm.all_reduce(given.clone(), op="avg")
    assert torch.equal(reduced(state(comm, None), given), expected)


@on_four_ranks
def test_a_quantised_mean_is_near_and_the_same_on_all_ranks(comm):
    found = reduced(state(comm, "int8"), gradient(comm.rank))
    checks.same_everywhere(comm, found)
    mean = sum(gradient(rank) for rank in range(SIZE)) / SIZE
    # Three encodings; of a block the extreme is at most that of the whole, and a code half a step.
    largest = max(gradient(rank).abs().max() for rank in range(SIZE))
    assert (found - mean).abs().max() <= 3 * 1.02 * largest / 128
    assert not torch.equal(found, mean)


@on_four_ranks
def test_what_is_lost_is_kept_and_sent_later(comm):
    steps = 6
    fed, plain = state(comm, INSIDE, feedback=True), state(comm, INSIDE)
    plain._algorithm = fed._algorithm  # left alone it would take one exact hop
    total, without = torch.zeros(sum(NUMELS)), torch.zeros(sum(NUMELS))
    for _ in range(steps):
        total += reduced(fed, gradient(comm.rank))
        without += reduced(plain, gradient(comm.rank))
    lost = torch.cat([fed.state_dict()["residuals"][number] for number in range(len(NUMELS))])
    comm.all_reduce(lost, op="avg")
    mean = sum(gradient(rank) for rank in range(SIZE)) / SIZE
    # All but the last residuals has arrived, up to float32.
    torch.testing.assert_close(total + lost, steps * mean, rtol=0, atol=1e-4)
    assert (total - steps * mean).abs().max() < 0.4 * (without - steps * mean).abs().max()


@on_four_ranks
def test_the_first_residual_is_what_the_codec_loses(comm):
    fed = state(comm, INSIDE, feedback=True)
    given = gradient(comm.rank)
    reduced(fed, given)
    lengths = [s.numel for shard in _cut("float32", NUMELS, SIZE).shards for s in shard]
    codec = Codec.parse("int4")
    wire = codec.encode(given, segments=lengths)
    expected = given - codec.decode(wire, given.numel(), torch.float32, segments=lengths)
    found = fed.state_dict()["residuals"]
    assert torch.equal(torch.cat([found[number] for number in range(len(NUMELS))]), expected)


@on_four_ranks
def test_residuals_survive_saving_and_other_buckets(comm):
    whole, first = (state(comm, "int8", feedback=True) for _ in range(2))
    for step in range(4):
        expected = reduced(whole, gradient(comm.rank, step))
    for step in range(2):
        reduced(first, gradient(comm.rank, step))
    later = state(comm, "int8", feedback=True)
    later.load_state_dict(first.state_dict())
    for step in range(2, 4):
        found = reduced(later, gradient(comm.rank, step))
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="before the first backward of this hook"):
        later.load_state_dict(first.state_dict())
    # DDP makes other buckets after the first step: the residual goes with the parameter.
    kept = later.state_dict()["residuals"][2]
    zero = torch.zeros(NUMELS[2])
    wire = Codec.parse("int8").encode(kept, segments=[s.numel for s in _flat(NUMELS[2])])
    arrives = Codec.parse("int8").decode(
        wire, kept.numel(), torch.float32, segments=[s.numel for s in _flat(NUMELS[2])]
    )
    reduced(later, zero, [PARAMETERS[2]])
    assert torch.equal(later.state_dict()["residuals"][2], kept - arrives)


def _flat(numel):
    return [segment for shard in _cut("float32", (numel,), SIZE).shards for segment in shard]


@on_four_ranks
def test_an_infinite_gradient_is_not_kept(comm):
    fed = state(comm, "int8", feedback=True)
    given = gradient(comm.rank)
    given[3] = torch.inf
    assert not reduced(fed, given).isfinite().all()
    assert all(x.isfinite().all() for x in fed.state_dict()["residuals"].values())


@on_four_ranks
def test_feedback_needs_a_codec_on_the_first_hop(comm):
    with pytest.raises(ValueError, match="the first hop, at level 0, has none"):
        state(comm, (None, "int8"), feedback=True)


@on_four_ranks
def test_feedback_does_not_go_with_stochastic_rounding(comm):
    with pytest.raises(ValueError, match="possible is rounding=nearest"):
        state(comm, "int8:rounding=stochastic", feedback=True)


def trained(launch, ranks, *cases):
    command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks
    run = launch(*command, "tests/torch/programs/ddp.py", "gloo", *cases)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:-1] == [f"{case} passed" for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_trainings_as_without_the_hook_however(launch, ranks):
    cases = "plain", "views", "static", "accumulated", "many buckets", "unused", "bf16"
    trained(launch, ranks, *cases)


@pytest.mark.slow
def test_a_group_of_backend_zcomm_trains_as_without_the_hook(launch):
    cases = "plain", "views", "accumulated"
    run = launch("tests/torch/programs/ddp.py", "zcomm", *cases, num_ranks=4)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:-1] == [f"{case} passed" for case in cases]
