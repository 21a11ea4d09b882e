"""All cases of the table, each on its own emulated cluster: ``python -m benchmarks.wire.tables``.

Every command is printed before it runs, so that one row can be repeated alone. Needs what
``benchmarks.cluster`` needs: Linux and root. The figures are this machine's as long as nothing else
runs on it; a case that was disturbed is repeated, and its quietest run is kept.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import start
from benchmarks.collectives.options import at_least
from benchmarks.launch import Parser, UsageError
from benchmarks.wire import summary

_BOTH = "reduce_scatter all_gather"


@dataclass(frozen=True)
class Table:
    """One case: ``cluster`` holds the flags of its cluster, None for this machine as it is."""

    title: str
    cluster: str | None
    flags: str
    num_ranks: int = 4

    def command(self) -> list[str]:
        """Return the words of the command, without what says where JSON goes."""
        program = [sys.executable, "-m", "benchmarks.wire", *self.flags.split()]
        if self.cluster is None:
            return [start.find_hydra() or "mpirun", "-n", str(self.num_ranks), *program]
        return [sys.executable, "-m", "benchmarks.cluster", *self.cluster.split(), "--", *program]

    def describe(self) -> str:
        """Return the command as a user types it."""
        words = ["python" if word == sys.executable else word for word in self.command()]
        return shlex.join("mpirun" if Path(w).name == "mpiexec.hydra" else w for w in words)


def _behind_links(rate: str, more: str = "", *, nodes: int = 2, ranks: int = 2) -> str:
    return f"--nodes {nodes} --ranks-per-node {ranks} --rate {rate}{more}"


TABLES = {
    "1gbit": Table("4 Mi elements", _behind_links("1gbit"), f"{_BOTH} -n 15"),
    "float32": Table("float32", _behind_links("1gbit"), f"{_BOTH} -d float -b 16M"),
    "200mbit": Table("a slow link", _behind_links("200mbit"), f"{_BOTH} -n 7"),
    "10gbit": Table(
        "where the processor limits", _behind_links("10gbit", " --cpu-bound"), f"{_BOTH} -n 25"
    ),
    "64MiB": Table("32 Mi elements", _behind_links("1gbit"), f"{_BOTH} -b 64M -n 7"),
    "1MiB": Table("512 Ki elements", _behind_links("1gbit"), f"{_BOTH} -b 1M -n 25"),
    "4x1": Table("4 nodes x 1 rank", _behind_links("1gbit", nodes=4, ranks=1), f"{_BOTH} -n 15"),
    "2x3": Table("2 nodes x 3 ranks", _behind_links("1gbit", ranks=3), f"{_BOTH} -b 9M -n 15"),
    "one-machine": Table(
        "4 ranks, 64 MiB", None, "all_gather reduce_scatter all_reduce -d float -b 64M -n 11"
    ),
    "one-machine-bf16": Table(
        "4 ranks, 64 MiB", None, "all_gather reduce_scatter all_reduce -b 64M -n 11 --codec none"
    ),
    "sizes": Table(
        "4 KiB to 16 MiB",
        _behind_links("1gbit"),
        f"{_BOTH} -b 4K -e 16M -n 7 --seconds 1 --algorithm auto flat",
    ),
    "256MiB-scatter": Table("the last size", _behind_links("1gbit"), "reduce_scatter -b 256M -n 3"),
    "256MiB-gather": Table("the last size", _behind_links("1gbit"), "all_gather -b 256M -n 3"),
}


@dataclass(frozen=True)
class Options:
    """Which cases, the folder of their JSON lines, and how often a disturbed one is tried.

    ``read``: tell what the folder holds, and run nothing.
    """

    names: tuple[str, ...]
    folder: Path | None
    tries: int
    only_list: bool
    read: bool


def parse(arguments: list[str]) -> Options:
    """Return the options of a command line.

    Raises:
        UsageError: in one line, what is wrong with it.
    """
    parser = Parser(
        prog="python -m benchmarks.wire.tables",
        description="Measure every case of the table, or those that are named.",
    )
    parser.add_argument("names", nargs="*", metavar="CASE", help=", ".join(TABLES))
    parser.add_argument("--list", action="store_true", help="print the commands and leave")
    parser.add_argument("--tries", type=at_least(1), default=2, help="of a disturbed case (2)")
    parser.add_argument("--read", action="store_true", help="tell what is in FOLDER, run nothing")
    parser.add_argument("-J", "--json", type=Path, metavar="FOLDER", help="keep JSON lines there")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in TABLES]
    if unknown:
        raise UsageError(f"{unknown[0]} is no case; there are {', '.join(TABLES)}")
    names = tuple(dict.fromkeys(given.names)) or tuple(TABLES)
    if given.read and given.json is None:
        raise UsageError("--read needs -J FOLDER")
    if given.json is not None and not given.read:
        for name in names:
            if (path := given.json / f"{name}.jsonl").exists():
                raise UsageError(f"-J {given.json}: {path} exists; no result is overwritten")
    return Options(names, given.json, given.tries, given.list, given.read)


def main(arguments: list[str]) -> int:
    """Run the cases; return 1 if one of them failed, else 0."""
    try:
        options = parse(arguments)
    except UsageError as error:
        print(f"benchmarks.wire.tables: {error}", file=sys.stderr)
        return 2
    if options.read:
        return _read_again(options)
    if options.only_list:
        for name in options.names:
            print(f"{name:<17} {TABLES[name].describe()}")
        return 0
    failed = []
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.names:
            path = _run(name, options.tries, Path(scratch))
            if path is None:
                failed.append(name)
                continue
            lines += summary.read(path)
            if options.folder is not None:
                options.folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, options.folder / f"{name}.jsonl")
    _tell(lines)
    if failed:
        print(f"# failed: {', '.join(failed)}")
    return 1 if failed else 0


def _read_again(options: Options) -> int:
    paths = [options.folder / f"{name}.jsonl" for name in options.names if options.folder]
    _tell([item for path in paths if path.exists() for item in summary.read(path)])
    return 0


def _tell(lines: Sequence[dict[str, Any]]) -> None:
    for line in (*summary.medians(lines), *summary.verdicts(lines)):
        print(line)


def _run(name: str, tries: int, scratch: Path) -> Path | None:
    """Run a case until it was not disturbed; return the lines of its quietest run."""
    table = TABLES[name]
    best: tuple[float, Path] | None = None
    for number in range(tries):
        path = scratch / f"{name}.{number}"
        print(f"\n# {name}: {table.title}\n# {table.describe()}", flush=True)
        if subprocess.call([*table.command(), "-J", str(path)]):
            return None
        noise = disturbance(summary.read(path))
        if best is None or noise < best[0]:
            best = noise, path
        if not any(line.get("noisy") for line in summary.read(path)):
            break
    return None if best is None else best[1]


def disturbance(lines: Sequence[dict[str, Any]]) -> float:
    """Return the largest part of CPU time that others took during a case."""
    return max((line.get("others") or 0.0 for line in lines if line["kind"] == "row"), default=0.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
