"""The limit of memory holds; the demonstration in small has the losses of a run in memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.infinity import limit
from benchmarks.infinity.driver import parse
from benchmarks.infinity.predict import sizes
from benchmarks.infinity.rank import Job
from benchmarks.launch import UsageError
from benchmarks.training.model import GPT, Shape

MIB = 2**20
USES = "import sys; x = bytearray(int(sys.argv[1]) << 20); x[::4096] = b'1' * len(x[::4096])"
SMALL = Shape(context=16, width=128, depth=3, heads=4)
FILES = ["free.json", "limited.json", "rates.json", "swap"]


def run(place, used_mib, nbytes):
    program = [sys.executable, "-c", USES, str(used_mib)]
    enter = [sys.executable, "-m", "benchmarks.infinity.limit", str(nbytes), place, "--"]
    return subprocess.run([*enter, *program], capture_output=True, text=True, check=False)


def test_the_kernel_kills_what_is_above_the_limit():
    with limit.groups(2, 100 * MIB) as groups:
        if not groups:
            pytest.skip("no control group can be made here")
        small, large = groups
        assert run(str(small.path), 20, 100 * MIB).returncode == 0
        assert run(str(large.path), 200, 100 * MIB).returncode == -signal.SIGKILL
        assert (small.num_killed, large.num_killed) == (0, 1)
        assert 20 * MIB < small.charged < 100 * MIB
        assert 90 * MIB < large.charged <= 100 * MIB
    assert not any(group.path.exists() for group in groups)


def test_no_group_where_the_kernel_refuses(monkeypatch, tmp_path):
    monkeypatch.setattr(limit, "_parents", lambda: [(tmp_path / "none", 1), (Path("/proc"), 2)])
    with limit.groups(2, 100 * MIB) as groups:
        assert groups == []


def test_files_of_version_2(tmp_path):
    (tmp_path / "memory.peak").write_text("4096\n")
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    group = limit.Group(tmp_path, 2)
    assert (group.setting, group.charged, group.num_killed) == ("memory.max", 4096, 2)


def test_the_watchdog():
    assert run(limit.WATCHDOG, 20, 100 * MIB).returncode == 0
    killed = run(limit.WATCHDOG, 200, 100 * MIB)
    assert killed.returncode == -signal.SIGKILL
    assert "bytes resident, limit 104857600" in killed.stderr


def test_resident():
    assert limit.resident_nbytes(os.getpid()) >= limit.resident_nbytes(most=False) > MIB


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--width 100", "--width 100: not a multiple of 64"),
        ("--steps 1", "--steps 1: at least 2"),
        ("--limit little", "'little' is no size"),
        ("--folder /proc/here", "--folder /proc/here: "),
    ],
)
def test_refused(words, message):
    with pytest.raises(UsageError, match=message):
        parse(words.split())


def test_a_job_travels(tmp_path):
    job = Job("limited", SMALL, 3, 1, str(tmp_path), 1 << 16, "x")
    assert Job.from_text(job.to_text()) == job
    assert (job.config.offload_params, job.config.nvme_path) == ("nvme", str(tmp_path))


def test_sizes():
    model = GPT(SMALL)
    found = sizes(SMALL)
    assert found.numel == sum(p.numel() for p in model.parameters())
    assert found.unit_numel == sum(p.numel() for p in model.blocks[0].parameters())
    assert found.root_numel == found.numel - 3 * found.unit_numel


def test_recomputing_changes_no_bit():
    tokens = torch.arange(32).view(2, 16)
    found = []
    for recompute in (False, True):
        model = GPT(Shape(**{**vars(SMALL), "recompute": recompute})).bfloat16()
        loss = model(tokens, tokens.roll(1, 1))
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forty_million_parameters_on_disk(launch, tmp_path):
    """More model states than memory; refused without offload, the same losses with it."""
    words = ["--width", 512, "--depth", 12, "--context", 64, "--limit", "512MiB"]
    run = launch("-m", "benchmarks.infinity", *words, "--folder", tmp_path, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    # 8 bytes a parameter, 2 of float32 gradients in the step, and 0.35 GB for the process
    assert "a rank needs 0.729 GB in stage 3" in run.stdout
    assert run.stdout.count("(exit code 1)") == run.stdout.count("(exit code 0)") == 1
    assert "the same losses, bit for bit" in run.stdout
    assert "predicted" in run.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == FILES
    assert not list((tmp_path / "swap").iterdir())
