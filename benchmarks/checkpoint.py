"""How fast is ``zero.save``, and how long does it hold the training?

    mpirun -n 2 python -m benchmarks.checkpoint [--params 32M] [-n 5] [--folder PATH]

In turns, on a folder of the disk that is to be measured:

- **plain**: every rank writes as many bytes as its part of the checkpoint has into one file, and
  fsyncs it: what the disk can do.
- **copy**: every rank copies them in memory: the least that a training is held.
- **save**: ``zero.save``, which also copies, checksums, renames, and agrees with all ranks.
- **async**: ``zero.save(async_op=True)`` until it returns, which is how long training is held, and
  until ``wait()`` has returned.

Seconds are from a barrier to the end on the slowest rank, medians over the turns. Everything that
was written is removed. The exit code is 1 when a checkpoint does not load.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import zero
from benchmarks import launch
from benchmarks.collectives.options import size_nbytes
from zcomm import Communicator, ZcommError

WIDTH = 1024
CHUNK_NBYTES = 1 << 24


@dataclass(frozen=True)
class Options:
    """What to measure; see ``--help``."""

    params: int
    turns: int
    folder: Path
    topology: str


@dataclass(frozen=True)
class Turn:
    """Seconds of one turn, of the slowest rank."""

    plain: float
    copy: float
    save: float
    held: float
    behind: float


def parse(arguments: list[str]) -> Options:
    """Read the command line."""
    parser = launch.Parser(
        prog="python -m benchmarks.checkpoint", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--params", type=size_nbytes, default=size_nbytes("32M"), help="of the model (32M)")
    add("-n", dest="turns", type=int, default=5, help="turns (5)")
    add("--folder", type=Path, default=Path("build/checkpoint"), help="(build/checkpoint)")
    add("--topology", default="auto")
    given = parser.parse_args(arguments)
    if given.turns < 1:
        raise launch.UsageError(f"-n {given.turns}: at least 1")
    if given.params < WIDTH**2:
        raise launch.UsageError(f"--params {given.params}: at least {WIDTH**2}")
    return Options(**vars(given))


def run(options: Options, comm: Communicator) -> int:
    """Measure and print; return the exit code."""
    say = print if comm.rank == 0 else lambda *_, **__: None
    launch.on_root(comm, lambda: _prepare(options.folder))
    model, optimizer = _trained(comm, options.params // WIDTH**2)
    zero.save(options.folder / "save", model, optimizer)
    total, own = _sizes(comm, options.folder / "save")
    data = torch.randint(0, 256, (own,), dtype=torch.uint8)
    say(f"# {comm.topology.describe()}, {total / 1e6:.0f} MB in {comm.size} files; s of each turn")
    say("#  plain   copy   save   held behind")
    turns = []
    for _ in range(options.turns):
        turn = _turn(comm, options.folder, data, model, optimizer)
        turns.append(turn)
        say(
            f"{turn.plain:8.3f} {turn.copy:6.3f} {turn.save:6.3f} {turn.held:6.3f}"
            f" {turn.behind:6.3f}",
            flush=True,
        )
    for line in _summary(turns, total):
        say(line)
    code = _loads(options.folder / "save", model, optimizer)
    comm.barrier()
    launch.on_root(comm, lambda: shutil.rmtree(options.folder))
    return code


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=False)
    except OSError as error:
        raise launch.UsageError(f"--folder {folder}: {error.strerror}; give a new one") from None


def _trained(comm: Communicator, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a bfloat16 model after one step: masters and Adam's states, 12 bytes a parameter."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    zero.shard(model, optimizer, zero.Config(), comm=comm)
    model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _sizes(comm: Communicator, folder: Path) -> tuple[int, int]:
    """Return bytes of the files of all ranks, and of this one's."""
    (own,) = folder.glob(f"data-*/rank-{comm.rank:05d}.safetensors")
    sizes = comm.all_gather_values(np.array([own.stat().st_size]))
    return int(sizes.sum()), int(sizes[comm.rank, 0])


def _turn(
    comm: Communicator,
    folder: Path,
    data: torch.Tensor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Turn:
    file = folder / f"plain-{comm.rank}"
    plain = _seconds(comm, lambda: _write(file, data))
    file.unlink()
    copy = _seconds(comm, lambda: data.clone())
    save = _seconds(comm, lambda: zero.save(folder / "save", model, optimizer))
    comm.barrier()
    start = time.perf_counter()
    saving = zero.save(folder / "save", model, optimizer, async_op=True)
    held = time.perf_counter() - start
    saving.wait()
    behind = time.perf_counter() - start
    held, behind = comm.all_gather_values(np.array([held, behind])).max(axis=0)
    return Turn(plain, copy, save, float(held), float(behind))


def _write(path: Path, data: torch.Tensor) -> None:
    with path.open("wb") as file:
        for part in data.split(CHUNK_NBYTES):
            file.write(memoryview(part.numpy()))
        file.flush()
        os.fsync(file.fileno())


def _seconds(comm: Communicator, function: Callable[[], object]) -> float:
    comm.barrier()
    start = time.perf_counter()
    function()
    seconds = time.perf_counter() - start
    return float(comm.all_gather_values(np.array([seconds])).max())


def _summary(turns: list[Turn], nbytes: int) -> list[str]:
    def median(name: str) -> float:
        return statistics.median(getattr(turn, name) for turn in turns)

    plain = median("plain")
    lines = [
        f"# {name:<6} {median(name):7.3f} s {nbytes / median(name) / 1e6:8.0f} MB/s"
        f"  {median(name) / plain:5.2f} of plain"
        for name in ("plain", "save", "behind", "held", "copy")
    ]
    return ["# medians", *lines]


def _loads(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    try:
        zero.load(path, model, optimizer)
    except ZcommError as error:
        print(f"# WRONG: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(launch.main("benchmarks.checkpoint", parse, run))
