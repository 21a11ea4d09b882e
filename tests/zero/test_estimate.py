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
from zero.offload_estimate import Offload, offloaded


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
        ("--ranks 8 --stage 1 --secondary node", "stage 1 does not shard parameters"),
        ("--ranks 8 --secondary 3", "secondary 3 does not divide 8 ranks"),
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


def placed(offload, stage, model, ranks, **config):
    config = zero.Config(stage=stage, **config)
    found = estimate(config, model, num_ranks=ranks, ranks_per_node=min(8, ranks))
    return offloaded(offload, config, model, found, num_ranks=ranks), found


def test_zero_offload_on_one_device():
    """arXiv 2101.06840, table 1: of 16M bytes 2M stay, an eighth; the host has the other 14M."""
    found, without = placed(Offload("cpu"), 2, Model(1e9), 1)
    assert without.model_states == 16e9
    assert (found.device, found.host, found.disk) == (2e9, 14e9, 0)
    # Section 4.2: N ranks share the host's part, no matter how many there are.
    found, _ = placed(Offload("cpu"), 2, Model(1e9), 16)
    assert (found.device, found.host * 16) == (2e9, 14e9)


# arXiv 2104.07857, figure 2a: layers, hidden size (K is 1024), model states in TB of 2**40.
@pytest.mark.parametrize(
    ("layers", "hidden", "terabytes"),
    [
        (80, 10, "1.83"),
        (100, 20, "9.16"),
        (128, 25, "18.31"),
        (195, 64, "182.81"),
        (315, 160, "1845.70"),
    ],
)
@pytest.mark.parametrize("places", [("cpu", "cpu"), ("nvme", "nvme"), ("nvme", "cpu")])
def test_zero_infinity(layers, hidden, terabytes, places):
    model = Model(12 * layers * (1024 * hidden) ** 2)
    found, _ = placed(Offload(*places), 3, model, 512)
    assert f"{512 * (found.host + found.disk) / 2**40:.2f}" == terabytes
    assert found.device == 0
    assert found.host * 512 == pytest.approx(
        {("cpu", "cpu"): 20, ("nvme", "nvme"): 0, ("nvme", "cpu"): 2}[places] * model.numel
    )


def test_what_zero_adds_stays_on_the_device():
    model = Model(8e9, unit_numel=2e8, root_numel=5e8)
    options = {"weights": "int8", "secondary": "node", "secondary_codec": "int8"}
    found, without = placed(Offload("nvme", "cpu"), 3, model, 64, **options)
    stays = without.whole_units + without.local_gradients + without.codec_buffers
    assert without.codec_buffers > 0
    assert found.device == pytest.approx(stays + without.secondary)
    found, without = placed(Offload("cpu"), 3, model, 64)
    assert found.device == pytest.approx(without.peak - 14 * 8e9 / 64)


def test_the_command_says_what_is_of_the_papers_and_not_here_yet(capsys):
    words = "memory --params 1e12 --ranks 512 --offload-optimizer nvme --offload-params cpu"
    assert cli.main(words.split()) == 0
    text = capsys.readouterr().out
    assert "zero itself cannot offload yet" in text
    _, below = text.split("Offload as")
    assert "stage 3" in below
    assert "stage 2 " not in below.split("offload yet")[1]
    assert row(below, "host") == ["3.91"]  # 2 bytes
    assert row(below, "disk") == ["35.2"]  # 18 bytes
    assert cli.main([*words.split(), "--stage", "1"]) == 2
    assert "in stage 1: the papers have" in capsys.readouterr().err
    assert cli.main([*words.split(), "--stage", "3", "--itemsize", "4"]) == 2
    assert "parameters of 16 bits" in capsys.readouterr().err


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
