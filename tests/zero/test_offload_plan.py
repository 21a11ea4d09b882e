"""``zcomm plan-offload``: seconds by hand, and which setting it takes."""

import argparse

import pytest

import zero
from zcomm import cli
from zero.estimate import Model
from zero.offload_command import PLAN_OFFLOAD
from zero.offload_plan import Machine, choice, plan, plans
from zero.offload_probe import probe_disk, probe_send, probe_update
from zero.sizes import gigabytes, rate_nbytes, size_nbytes

MODEL = Model(1e9, 1e8, 1e8)
RATES = {"read": 2e9, "mixed": 1e9, "update": 5e8, "send": 4e9}
MACHINE = Machine(memory=4e9, disk=100e9, ranks=2, **RATES)


def planned(optimizer, params, machine=MACHINE, compute=3.0, **options):
    path = "." if "nvme" in (optimizer, params) else None
    where = {"offload_optimizer": optimizer, "offload_params": params, "nvme_path": path}
    config = zero.Config(**where, **options)
    return plan(config, MODEL, machine, num_ranks=4, compute=compute)


def test_seconds_by_hand():
    """A quarter of the parameters a rank, two ranks a disk."""
    none = planned(None, None)
    sent = 3 * (2e9 - 0.5e9) / 4e9
    assert none.computing == pytest.approx(3 + sent)
    assert none.stepping == pytest.approx(2.5e8 / 5e8)
    assert none.moved == 0
    both = planned("nvme", "nvme")
    # Read twice: 0.5 GB a rank, 2 ranks, 2 GB/s.
    assert both.computing == pytest.approx(max(3 + sent, 1.0))
    assert planned("nvme", "nvme", compute=0).computing == pytest.approx(sent)
    slow = Machine(4e9, 100e9, 2, **(RATES | {"read": 1e8}))
    assert planned("nvme", "nvme", slow).computing == pytest.approx(20)
    assert planned("nvme", "nvme", slow, prefetch=0).computing == pytest.approx(20 + 3 + sent)
    # Masters and two states of float32 read and written, parameters written.
    assert both.stepping == pytest.approx(2 * (2 * 12 * 2.5e8 + 0.5e9) / 1e9)
    assert both.first == pytest.approx(2 * (16 * 2.5e8 + 0.5e9) / 1e9)
    assert both.moved == pytest.approx(1e9 + 6e9 + 0.5e9)
    assert both.seconds == both.computing + both.stepping


def test_the_fastest_that_fits():
    def choose(memory, disk=100e9):
        machine = Machine(memory, disk, 2, **RATES)
        return choice(plans(zero.Config(), MODEL, machine, num_ranks=4, compute=1))

    assert choose(6e9) == "none"
    assert choose(5e9) == choose(3e9) == "optimizer nvme"
    assert choose(2.5e9) == "optimizer, params nvme"
    assert choose(1e9) is None
    assert choose(3e9, disk=6e9) == "optimizer nvme"
    assert choose(3e9, disk=5e9) is None
    stage_1 = plans(zero.Config(stage=1), MODEL, MACHINE, num_ranks=4, compute=1)
    stage_0 = plans(zero.Config(stage=0), MODEL, MACHINE, num_ranks=4, compute=1)
    assert stage_0["none"].stepping == pytest.approx(1e9 / 5e8)  # every rank steps everything
    assert list(stage_1) == ["none", "optimizer cpu", "optimizer nvme"]


GIVEN = {
    "params": "1e9",
    "ranks": "4",
    "ranks-per-node": "2",
    "largest-unit": "1e8",
    "root-unit": "1e8",
    "disk": "100GB",
    "read": "2GB/s",
    "mixed": "1GB/s",
    "update": "5e8",
    "send": "4GB/s",
    "compute": "3",
}
WORDS = [word for name, value in GIVEN.items() for word in (f"--{name}", value)]


def run(*words):
    return cli.run("plan-offload", PLAN_OFFLOAD, words)


def test_the_command(capsys):
    assert run(*WORDS, "--ram", "3GB") == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.strip().startswith("optimizer nvme")]
    assert line.split()[2:] == ["2.78", "3.00", "yes", "6.00", "4.12", "12", "16.1"]
    assert "A prediction, not a measurement" in out
    assert "the fastest that fits: optimizer nvme" in out
    assert run(*WORDS, "--ram", "1GB") == 1
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ram", "1GB", "--process", "2GB"], "--process 2.00 GB of --ram 1.00 GB leaves nothing"),
        (["--ram", "1GB", "--compute", "-1"], "--compute -1: expected 0 or more"),
        (["--ram", "1GB", "--ranks-per-node", "0"], "--ranks-per-node 0: expected 1"),
        (["--ram", "1GB", "--update", "0"], "update of a machine: 0, expected more than 0"),
        (["--ram", "1GB", "--ranks-per-node", "3"], "3 ranks per node, 4 ranks"),
    ],
)
def test_refused(capsys, words, message):
    assert run(*WORDS, *words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_without_a_folder_or_rates(capsys):
    assert run("--params", "1e9", "--ranks", "2", "--ram", "1GB", "--disk", "1GB") == 2
    assert "give --path, a folder to measure" in capsys.readouterr().err


def test_probes(tmp_path):
    """What is measured is more than nothing, and leaves nothing."""
    rates = probe_disk(tmp_path, nbytes=1 << 25)
    assert min(rates.write, rates.read, rates.mixed, rates.free) > 1e6
    assert list(tmp_path.iterdir()) == []
    assert min(probe_update(2), probe_send(2)) > 1e6


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1.5GiB", 1.5 * 2**30), ("24gb", 24e9), ("2e9", 2e9), (".5 GiB", 2**29), ("64k", 64e3)],
)
def test_sizes(text, nbytes):
    assert size_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1GX", "nan", "1e999", "0", ".GB", "1GB/s"])
def test_no_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size: write"):
        size_nbytes(text)


@pytest.mark.parametrize("text", ["2.1 GB/s", "2.1GB", "2.1G", "2.1e9", "2100MB/s"])
def test_rates(text):
    assert rate_nbytes(text) == 2.1e9


@pytest.mark.parametrize("text", ["10Gb/s", "10gb/s", "10Gbit/s", "0GB/s", "GB/s", "1GB/h"])
def test_no_rates(text):
    """Networks are sold by the bit: what may mean those is no rate in bytes."""
    with pytest.raises(argparse.ArgumentTypeError, match="no rate in bytes per second"):
        rate_nbytes(text)


def test_printed():
    assert [gigabytes(n) for n in (120e9, 41.25e9, 1.875e9, 2**20)] == [
        "120",
        "41.3",
        "1.88",
        "0.001",
    ]
