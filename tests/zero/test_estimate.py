"""Estimates against the paper's table and against live tensors."""

import dataclasses

import pytest
import torch

import zero
from tests.marks import one_in
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import SIZES, on, shard
from zcomm import cli
from zero.estimate import Model, estimate
from zero.memory import report
from zero.offload_estimate import _transfers, offloaded


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        (4, ["120", "52.5", "41.3", "30.0"]),
        (64, ["120", "31.4", "16.6", "1.88"]),
        (1024, ["120", "30.1", "15.1", "0.117"]),
    ],
)
def test_the_table_of_the_paper(capsys, ranks, wanted):
    """arXiv 1910.02054, table 1, 7.5 B; there 0.117 is printed 0.12."""
    assert cli.main(["memory", "--params", "7.5e9", "--ranks", str(ranks)]) == 0
    assert row(capsys.readouterr().out, "model states") == wanted


def row(text, label):
    (line,) = [line for line in text.splitlines() if line.strip().startswith(label)]
    return line.replace(label, "").split()


def test_one_stage_with_everything(capsys):
    words = "--params 8e9 --ranks 64 --ranks-per-node 8 --stage 3 --weights int8 --secondary node"
    words += " --secondary-codec int8 --grads int8 --grads int4 --grads-feedback --largest-unit 2e8"
    assert cli.main(["memory", *words.split(), "--root-unit", "5e8", "--prefetch", "2"]) == 0
    text = capsys.readouterr().out
    assert row(text, "model states") == ["2.00"]
    assert row(text, "+ secondary (hpZ)") == ["1.01"]  # a byte, 2 for 256 of scales, an eighth
    assert row(text, "+ residuals") == ["1.01"]
    assert row(text, "+ whole units") == ["2.20"]  # 2 bytes of 0.5 + 3·0.2
    assert row(text, "+ local gradients") == ["1.80"]
    assert row(text, "peak, no activations") == ["9.02"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 6 --ranks-per-node 4", "4 ranks per node, 6 ranks"),
        ("--ranks 8 --ranks-per-node 0", "0 ranks per node, 8 ranks"),
        ("--ranks 8 --offload-numel 1000", "--offload-numel is of the steps of --offload-opt"),
        ("--ranks 8 --process 1GB", "--process counts against --limit"),
        ("--ranks 8 --stage 1 --secondary node", "stage 1 does not shard parameters"),
        ("--ranks 8 --secondary 3", "secondary 3 does not divide 8 ranks"),
        ("--ranks 8 --params 0", "numel of a model: 0, expected a model that has"),
        ("--ranks 8 --params -1", "numel of a model: -1, expected 0 or more"),
        ("--ranks 8 --params nan", "numel of a model: nan"),
        ("--ranks 8 --params 1e400", "numel of a model: inf"),
        ("--ranks 8 --states -2", "states of a model: -2"),
        ("--ranks 8 --largest-unit 2e9", "a unit of 2e+09 and a root of 0 parameters"),
    ],
)
def test_refused(capsys, words, message):
    assert cli.main(["memory", "--params", "1e9", *words.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def placed(model, ranks, optimizer=None, params=None, stage=3, **options):
    path = "." if "nvme" in (optimizer, params) else None
    where = {"offload_optimizer": optimizer, "offload_params": params, "nvme_path": path}
    config = zero.Config(stage=stage, **where, **options)
    found = estimate(config, model, num_ranks=ranks, ranks_per_node=min(8, ranks))
    return offloaded(config, model, found, num_ranks=ranks), found


def test_everything_on_disk():
    """14 bytes a parameter there; the host has gradients and what is on its way."""
    model = Model(8e9, unit_numel=2e8, root_numel=5e8)
    found, without = placed(model, 64, "nvme", "nvme", offload_numel=1 << 20)
    assert found.disk == 14 * 8e9 / 64
    assert found.device == pytest.approx(without.whole_units + without.local_gradients)
    gradients = 4 * 8e9 / 64
    # Gradients of a block, three blocks of values and two states, twice the largest unit's shard.
    step = (4 + 3 * 12) * 2**20 + 2 * 2 * 5e8 / 64
    assert found.host == pytest.approx(gradients + step)
    assert found.memory == found.device + found.host


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_float32_gradients_in_the_step(stage):
    """What the step sees of float32 beside gradients of 16 bits: in no formula of the papers."""
    model = make(Tower, width=64, hidden=256, dtype=torch.bfloat16)
    config = zero.Config(stage=stage)
    numel = sum(p.numel() for p in model.parameters())

    def program(comm):
        sharded, optimizer = shard(comm, model, config)
        seen = []
        optimizer.register_step_pre_hook(
            lambda *_: seen.append(
                sum(t.grad.nbytes for g in optimizer.param_groups for t in g["params"])
            )
        )
        for step in range(2):
            loss_of(sharded, tokens(comm.rank, step)).backward()
            held = report(sharded, optimizer).held
            optimizer.step()
            optimizer.zero_grad()
        return held, seen[-1]

    found = estimate(config, Model(numel), num_ranks=2, ranks_per_node=2)
    held, seen = zip(*on("1x2", program), strict=True)
    assert sum(seen) / 2 == pytest.approx(found.step_gradients, rel=0.02)
    assert sum(held) / 2 + sum(seen) / 2 == pytest.approx(found.peak, rel=0.02)
    wide = estimate(config, Model(numel, itemsize=4), num_ranks=2, ranks_per_node=2)
    assert wide.step_gradients == 0


def test_what_zero_adds_stays_on_the_device():
    model = Model(8e9, unit_numel=2e8, root_numel=5e8)
    options = {"weights": "int8", "secondary": "node", "secondary_codec": "int8"}
    found, without = placed(model, 64, "nvme", "cpu", **options)
    stays = without.whole_units + without.local_gradients + without.codec_buffers
    assert without.codec_buffers > 0
    assert found.device == pytest.approx(stays + without.secondary)
    assert found.disk == 12 * 8e9 / 64


def test_zero_offload_on_one_device():
    """arXiv 2101.06840, table 1: of 16M bytes 2M stay. In the first step zero has 2M more."""
    found, without = placed(Model(1e9), 1, "cpu", stage=2, offload_numel=1)
    assert without.model_states == 16e9
    assert (found.device, found.disk) == (2e9, 0)
    assert found.host == pytest.approx(14e9 + 2e9)


def test_parameters_of_float32_have_masters_on_disk():
    found, without = placed(Model(1e9, itemsize=4), 4, "nvme", "nvme")
    assert without.masters == 0
    assert found.disk == (4 + 12) * 1e9 / 4


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("places", [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", None)])
def test_live_bytes_with_offload(places, itemsize, tmp_path):
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    model = make(Tower, width=256, hidden=1024, num_blocks=2, vocabulary=512, dtype=dtype)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    numel = sum(p.numel() for p in model.parameters())
    optimizer, params = places
    path = tmp_path if "nvme" in places else None
    config = zero.Config(
        offload_optimizer=optimizer, offload_params=params, nvme_path=path, offload_numel=1 << 15
    )
    sizes = Model(numel, block, numel - 2 * block, itemsize)

    def program(comm):
        sharded, steps_it = shard(comm, model, config)
        found = []
        for step in range(2):
            loss_of(sharded, tokens(comm.rank, step, vocabulary=512)).backward()
            found.append(report(sharded, steps_it))
            steps_it.step()
            steps_it.zero_grad()
        return found

    estimated = estimate(config, sizes, num_ranks=2, ranks_per_node=2)
    wanted = offloaded(config, sizes, estimated, num_ranks=2)
    outcomes = on("1x2", program)
    states = estimated.optimizer
    for first, second in outcomes:
        assert second.disk == pytest.approx(wanted.disk, rel=0.02)
        temporary = estimated.whole_units + estimated.local_gradients
        in_memory = first.held + (states if optimizer == "cpu" else 0)
        transfers = _transfers(config, sizes, 2)
        assert in_memory == pytest.approx(wanted.memory - temporary - transfers, rel=0.02)
        assert second.transfers <= 1.02 * transfers + 2**16


def test_the_command_with_offload(capsys):
    words = "memory --params 1e12 --ranks 512 --offload-optimizer nvme --offload-params cpu"
    assert cli.main(words.split()) == 0
    _, below = capsys.readouterr().out.split("With offload:")
    assert "stage 0" not in below
    assert row(below, "disk") == ["23.4"] * 3  # 12 bytes
    assert row(below, "host")[2] == "11.8"  # 2 bytes, 4 of gradients, blocks
    assert cli.main([*words.split(), "--stage", "1"]) == 2
    assert "possible in stage 3" in capsys.readouterr().err


def test_a_limit(capsys):
    words = ["memory", "--params", "400e6", "--ranks", "2", "--stage", "3", "--limit", "1.5GiB"]
    assert cli.main(words) == 1
    said = capsys.readouterr().err
    assert "a rank needs 4.00 GB in stage 3, and activations; the limit is 1.61 GB" in said
    assert said.count("\n") == 1
    nvme = ["--offload-optimizer", "nvme", "--offload-params", "nvme"]
    assert cli.main([*words, *nvme]) == 0
    assert "within 1.61 GB, but for activations: stage 3 (0.884 GB)" in capsys.readouterr().out
    assert cli.main([*words, *nvme, "--process", "800MB"]) == 1
    assert cli.main(["memory", "--params", "1e8", "--ranks", "4", "--limit", "0.9GB"]) == 0
    found = capsys.readouterr().out
    assert "stage 1 (0.800 GB), 2 (0.650 GB), 3 (0.500 GB)" in found
    with pytest.raises(SystemExit):
        cli.main([*words[:-1], "much"])
    assert "'much' is no size: write 1.5GiB, 24GB or 2e9" in capsys.readouterr().err


LIVE = [
    *(zero.Config(stage=stage) for stage in range(4)),
    zero.Config(secondary="node"),
    zero.Config(secondary=1, weights="int8", secondary_codec="int8"),
    zero.Config(secondary="persistent"),
    zero.Config(stage=2, weights="int8"),
    zero.Config(grads=("int8", "int4"), grads_feedback=True),
    zero.Config(accumulate="node"),
    zero.Config.safe4(),
]


@pytest.mark.parametrize(("index", "itemsize"), one_in(4, range(len(LIVE)), [2, 4]))
def test_live_bytes_are_within_two_percent(index, itemsize):
    config = dataclasses.replace(LIVE[index], min_numel=0)
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    model = make(Tower, width=256, hidden=1024, num_blocks=2, vocabulary=512, dtype=dtype)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    numel = sum(p.numel() for p in model.parameters())
    sizes = Model(numel, block, numel - 2 * block, itemsize)

    def program(comm):
        sharded, optimizer = shard(comm, model, config)
        for step in range(3):
            loss_of(sharded, tokens(comm.rank, step, vocabulary=512)).backward()
            found = report(sharded, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return found

    wanted = estimate(config, sizes, num_ranks=SIZES["2x2"], ranks_per_node=2)
    outcomes = on("2x2", program)
    mean = sum(found.held for found in outcomes) / len(outcomes)
    assert mean == pytest.approx(wanted.held, rel=0.02)
    for found in outcomes:
        assert found.lent == 0
        assert found.free <= found.peak
        assert found.peak <= 1.02 * (wanted.whole_units + wanted.local_gradients) + 4096
        assert f"{found.held / 1e6:,.3f} MB" in str(found)
        assert found.states.secondary == pytest.approx(wanted.secondary, rel=0.02)
        assert found.residuals == pytest.approx(wanted.residuals, rel=0.02)
