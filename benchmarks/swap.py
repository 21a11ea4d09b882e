"""How fast do tensors go to a disk and back, beside fio with the same requests?

    python -m benchmarks.swap --path DIR [--size 1G] [-n 5]
    mpirun -n 2 python -m benchmarks.swap --path DIR

Each rank has a file of its own, ours and fio's, of ``--size`` bytes in the folder. Both were
written before, so that every request finds its blocks. Three patterns, ours and fio in turns:

- **write**, **read**: the whole file, in order.
- **step**: what an optimizer does: while tensor k is in memory, k+1 is read and k-1 is written;
  every tensor is read once and written once. fio: reads and writes mixed half and half.

Block size, requests in flight and O_DIRECT are the same in both. Ours make a checksum of every
block and verify it; fio does not. Time is from a barrier to the end on the slowest rank; fio's is
what it reports, without its start. Memory is new in every turn: where the pages lie can decide a
turn. A row holds bytes of all ranks, the pattern, GB/s (10^9) of ours and of fio, medians over the
turns, their ratio, and the least and largest of both. The exit code is 1 when a tensor is wrong.

What nobody should conclude from it: a virtual disk may be the memory of the machine below.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import launch
from benchmarks.collectives.options import at_least, size_nbytes
from zcomm import Communicator
from zero.offload import Extent, OffloadError, Pending, Swap
from zero.offload.memory import allocated

PATTERNS = ("write", "read", "step")
_FIO = {"write": "write", "read": "read", "step": "rw"}


@dataclass(frozen=True)
class Options:
    """What to measure; see ``--help``."""

    path: Path
    size: int
    tensor: int
    block: int
    depth: int
    turns: int
    engine: str
    unaligned: bool
    json: Path | None
    topology: str


@dataclass(frozen=True)
class Row:
    """GB/s of each turn; ``fio`` is empty where it is not installed."""

    nbytes: int
    pattern: str
    ours: list[float]
    fio: list[float]

    def __str__(self) -> str:
        ours = statistics.median(self.ours)
        text = f"{self.nbytes:>12} {self.pattern:<6} {ours:7.3f}"
        spread = f"  {min(self.ours):.2f}-{max(self.ours):.2f}"
        if not self.fio:
            return f"{text} {'N/A':>7} {'N/A':>6}{spread}"
        fio = statistics.median(self.fio)
        return (
            f"{text} {fio:7.3f} {ours / fio:6.2f}{spread}  {min(self.fio):.2f}-{max(self.fio):.2f}"
        )


def parse(arguments: list[str]) -> Options:
    """Read the command line."""
    parser = launch.Parser(prog="python -m benchmarks.swap", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--path", type=Path, default=Path(), help="a folder on the disk (the current one)")
    add("--size", type=size_nbytes, default=size_nbytes("1G"), help="of a rank's file (1G)")
    add("--tensor", type=size_nbytes, default=size_nbytes("64M"), help="of one tensor (64M)")
    add("--block", type=size_nbytes, default=size_nbytes("8M"), help="of one request (8M)")
    add("--depth", type=at_least(1), default=4, help="requests in flight (4)")
    add("-n", dest="turns", type=at_least(1), default=5, help="turns (5)")
    add("--engine", default="libaio", help="of fio (libaio)")
    add("--unaligned", action="store_true", help="memory that must be copied: any tensor's")
    add("-J", "--json", type=Path, metavar="FILE", help="write JSON lines to a file")
    add("--topology", default="auto")
    given = parser.parse_args(arguments)
    if given.tensor < 1 or given.size % given.tensor or given.size // given.tensor < 3:
        raise launch.UsageError(
            f"--size {given.size} --tensor {given.tensor}: the size must be that of three tensors"
            " or more"
        )
    if given.block % 4096 or given.tensor % given.block:
        raise launch.UsageError(
            f"--block {given.block}: a multiple of 4096 that divides --tensor {given.tensor}"
        )
    return Options(**vars(given))


class Ours:
    """The file of this rank, as tensors."""

    def __init__(self, options: Options, rank: int) -> None:
        self.swap = Swap(
            options.path, rank=rank, buffer_nbytes=options.block, num_threads=options.depth
        )
        self._options = options
        count = options.size // options.tensor
        self.extents = [self.swap.allocate(f"tensor {k}", options.tensor) for k in range(count)]
        self._data = torch.randint(0, 256, (options.tensor,), dtype=torch.uint8)
        self._memory: list[Tensor] = []

    def renew(self) -> None:
        """Take new memory, with the data in it."""
        shift = 64 if self._options.unaligned else 0
        self._memory = [allocated(self._options.tensor + shift)[shift:] for _ in range(3)]
        for memory in self._memory:
            memory.copy_(self._data)

    def run(self, pattern: str) -> None:
        """Move all tensors once, in the step twice."""
        if pattern == "step":
            self._step()
            return
        call = self.swap.write if pattern == "write" else self.swap.read
        self._in_turns(call)

    def _in_turns(self, call: Callable[[Extent, Tensor], Pending]) -> None:
        pending: list[Pending | None] = [None] * len(self._memory)
        for k, extent in enumerate(self.extents):
            place = k % len(pending)
            _wait(pending[place])
            pending[place] = call(extent, self._memory[place])
        for one in pending:
            _wait(one)

    def _step(self) -> None:
        swap, extents, memory = self.swap, self.extents, self._memory
        reading = swap.read(extents[0], memory[0])
        writing: list[Pending | None] = [None] * len(memory)
        for k, extent in enumerate(extents):
            reading.wait()
            if k + 1 < len(extents):
                place = (k + 1) % len(memory)
                _wait(writing[place])
                reading = swap.read(extents[k + 1], memory[place])
            writing[k % len(memory)] = swap.write(extent, memory[k % len(memory)])
        for one in writing:
            _wait(one)

    def is_right(self) -> bool:
        """Tell whether every tensor comes back as it was."""
        for extent in self.extents:
            self.swap.read(extent, self._memory[0].zero_()).wait()
            if not torch.equal(self._memory[0], self._data):
                return False
        return True


def _wait(pending: Pending | None) -> None:
    if pending is not None:
        pending.wait()


class Fio:
    """The file of this rank, as fio's."""

    def __init__(self, options: Options, direct: bool) -> None:
        self.file = options.path / f"fio-{os.getpid()}.tmp"
        self._size = options.size
        self._words = [
            "fio",
            "--name=swap",
            f"--filename={self.file}",
            f"--size={options.size}",
            f"--bs={options.block}",
            f"--iodepth={options.depth}",
            f"--ioengine={options.engine}",
            f"--direct={int(direct)}",
            "--overwrite=1",
            "--fallocate=none",
            "--output-format=json",
        ]

    def run(self, pattern: str) -> float:
        """Move the file once, in the step twice; return the seconds that fio reports."""
        nbytes = _nbytes(pattern, self._size)
        words = [*self._words, f"--rw={_FIO[pattern]}", f"--io_size={nbytes}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise launch.UsageError(f"fio failed: {(done.stderr or done.stdout).strip()}")
        # Notes of fio may come before the JSON.
        (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        if moved != nbytes:
            raise launch.UsageError(f"fio moved {moved} bytes, not {nbytes}")
        return float(max(job["read"]["runtime"], job["write"]["runtime"], 1)) / 1e3

    def close(self) -> None:
        """Remove the file."""
        self.file.unlink(missing_ok=True)


def _nbytes(pattern: str, size: int) -> int:
    return 2 * size if pattern == "step" else size


def run(options: Options, comm: Communicator) -> int:
    """Measure and print; return the exit code."""
    say = print if comm.rank == 0 else lambda *_, **__: None
    try:
        ours = Ours(options, comm.rank)
    except OffloadError as error:
        raise launch.UsageError(f"--path {options.path}: {error}") from None
    has_fio = _all(comm, shutil.which("fio") is not None)
    for line in _heading(options, comm, ours.swap.direct, has_fio):
        say(line)
    fio = Fio(options, ours.swap.direct) if has_fio else None
    try:
        rows = _measured(options, comm, ours, fio)
    finally:
        if fio is not None:
            fio.close()
    for row in rows:
        say(row, flush=True)
    right = _all(comm, ours.is_right())
    ours.swap.close()
    say("# every tensor came back as it was" if right else "# WRONG: a tensor changed", flush=True)
    if options.json is not None:
        launch.on_root(comm, lambda: _write_json(options, comm, rows))
    return 0 if right else 1


def _heading(options: Options, comm: Communicator, direct: bool, has_fio: bool) -> list[str]:
    memory = "any memory (copied)" if options.unaligned else "aligned memory"
    cache = "O_DIRECT" if direct else "no O_DIRECT here: through the page cache"
    lines = [
        f"# {comm.topology.describe()}, {options.size >> 20} MiB a rank in tensors of"
        f" {options.tensor >> 20} MiB, requests of {options.block >> 10} KiB, {options.depth} in"
        f" flight, {cache}, {memory}",
        "# GB/s of all ranks, medians of"
        f" {options.turns} turns; fio: {options.engine if has_fio else 'not installed'}",
        "#      bytes what      ours     fio  ratio  ours from-to  fio from-to",
    ]
    if not has_fio:
        lines.insert(2, "# fio is missing (Debian: apt-get install fio): nothing to compare with")
    return lines


def _measured(options: Options, comm: Communicator, ours: Ours, fio: Fio | None) -> list[Row]:
    rows = [Row(comm.size * _nbytes(p, options.size), p, [], []) for p in PATTERNS]
    ours.renew()
    ours.run("write")
    if fio is not None:
        fio.run("write")
    for turn in range(options.turns):
        ours.renew()
        for row in rows:
            sides = [lambda row=row: row.ours.append(row.nbytes / _ours(comm, ours, row) / 1e9)]
            if fio is not None:
                sides.append(
                    lambda row=row: row.fio.append(row.nbytes / _fio(comm, fio, row) / 1e9)
                )
            for side in sides[:: -1 if turn % 2 else 1]:
                side()
    return rows


def _ours(comm: Communicator, ours: Ours, row: Row) -> float:
    comm.barrier()
    start = time.perf_counter()
    ours.run(row.pattern)
    return _slowest(comm, time.perf_counter() - start)


def _fio(comm: Communicator, fio: Fio, row: Row) -> float:
    comm.barrier()
    return _slowest(comm, fio.run(row.pattern))


def _slowest(comm: Communicator, seconds: float) -> float:
    return float(comm.all_gather_values(np.array([seconds])).max())


def _all(comm: Communicator, fact: bool) -> bool:
    return bool(comm.all_gather_values(np.array([fact], np.int64)).all())


def _write_json(options: Options, comm: Communicator, rows: list[Row]) -> None:
    settings = {**asdict(options), "path": str(options.path), "json": str(options.json)}
    items = [{"kind": "settings", "ranks": comm.size, **settings}]
    items += [{"kind": "row", **asdict(row)} for row in rows]
    try:
        Path(str(options.json)).write_text(
            "".join(json.dumps(item) + "\n" for item in items), encoding="utf-8"
        )
    except OSError as error:
        raise launch.UsageError(f"--json {options.json}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(launch.main("benchmarks.swap", parse, run))
