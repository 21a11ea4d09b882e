"""One launch: a peer's ranks on a cluster of their own, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.launch import UsageError
from benchmarks.peers.options import Options
from benchmarks.peers.rank import Report
from benchmarks.peers.registry import Peer
from benchmarks.peers.results import Failed

_GRACE_SECONDS = 10


def run(peer: Peer, options: Options, folder: Path) -> list[Report] | Failed:
    """Run a peer on a cluster and return the reports of its ranks, or why there are none.

    Raises:
        UsageError: there can be no cluster.
    """
    log = folder / f"{peer.name}.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command(peer, options, folder),
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = child.wait(options.patience)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
    last = _last_line(log)
    if code == 2 and last.startswith("benchmarks.cluster: "):
        raise UsageError(last.removeprefix("benchmarks.cluster: "))
    if code != 0:
        how = f"did not end within {options.patience:g} s" if code is None else f"exit code {code}"
        return Failed(f"{how}: {last}" if last else how)
    return [
        Report(**json.loads((folder / f"{peer.name}.{rank}.json").read_text(encoding="utf-8")))
        for rank in range(options.num_ranks)
    ]


def command(peer: Peer, options: Options, folder: Path) -> list[str]:
    """Return the command of a launch."""
    shape = ("--nodes", options.num_nodes, "--ranks-per-node", options.ranks_per_node)
    start = ("--torch",) if peer.torch else ()
    cluster = (*shape, "--rate", options.rate, *start)
    rank = ("benchmarks.peers.rank", peer.name, folder)
    words = (
        sys.executable,
        "-m",
        "benchmarks.cluster",
        *cluster,
        "--",
        sys.executable,
        "-m",
        *rank,
    )
    return [str(word) for word in words]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a cluster that still runs, after a signal or too long a time."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return said[-1] if said else ""
