"""Backend zcomm without MPI: the lines of docs/backend.md, and all its tests, under torchrun."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, child_environment

BIN = Path(sys.executable).parent


def environment() -> dict[str, str]:
    inherited = child_environment()
    return inherited | {"PATH": os.pathsep.join([str(BIN), inherited.get("PATH", "")])}


@pytest.mark.slow
def test_the_lines_of_the_documentation(tmp_path):
    document = (ROOT / "docs" / "backend.md").read_text()
    lines = re.search(r"^```bash\n(cat > try\.py .*?)^```", document, re.S | re.M)[1]
    assert len(lines.splitlines()) == 10
    run = subprocess.run(
        ["bash", "-e", "-c", lines],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in (0, 1):
        found = re.search(rf"{rank} \{{'all_reduce': Saving\(calls=1, (.*?)\)\}}", run.stdout)
        exact, wire = map(int, re.findall(r"nbytes=(\d+)", found[1]))
        assert exact == 512 * 512 * 4
        assert 0.25 * exact < wire < 0.27 * exact
    assert "communicates over gloo" in run.stderr


MEET = """
import sys
import torch, torch.distributed as dist
import zcomm.torch
rank, folder, *ports = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
for how in (
    {"init_method": f"file://{folder}/meeting"},
    {"init_method": f"tcp://127.0.0.1:{ports[0]}"},
    {"store": dist.FileStore(f"{folder}/store", 2)},
    {"store": dist.TCPStore("127.0.0.1", ports[1], 2, rank == 0)},
):
    dist.init_process_group("zcomm", rank=rank, world_size=2, **how)
    x = torch.tensor([1.0 + rank])
    dist.all_reduce(x)
    dist.destroy_process_group()
    print(next(iter(how)), x.item(), flush=True)
"""


@pytest.mark.slow
def test_any_init_method_or_store_without_a_launcher(tmp_path):
    here = ("127.0.0.1", 0)
    with socket.create_server(here) as one, socket.create_server(here) as other:
        ports = [str(server.getsockname()[1]) for server in (one, other)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEET, str(rank), str(tmp_path), *ports],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            said, errors = rank.communicate(timeout=100)
            assert rank.returncode == 0, errors[-3000:]
            assert said.split("\n") == ["init_method 3.0"] * 2 + ["store 3.0"] * 2 + [""]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_operation(ranks):
    command = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "-m", "pytest"]
    tests = ["--with-mpi", "-m", "mpi", "-x", "-q", "-p", "no:cacheprovider"]
    files = ["tests/torch/test_collectives.py", "tests/torch/test_works.py"]
    run = subprocess.run(
        [*command, *tests, *files],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert len(re.findall(r"\d+ passed", run.stdout)) == ranks


@pytest.mark.suite
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(8))
def test_the_suite_of_torch_itself(part):
    pytest.importorskip("expecttest")
    command = [sys.executable, "-m", "tests.torch.suite", "--slice", f"{part}/8"]
    run = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=880
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert re.search(r"zcomm: \d+ tests .* passed", run.stdout)
