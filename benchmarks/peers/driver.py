"""The program: one launch for each peer that can run here, then the table, ratios and verdicts.

Exit code: 1 when a peer failed or its losses are not those of the others; 2 and one line when what
was asked for cannot be.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

import numpy as np
from rich.console import Console

from benchmarks.launch import UsageError
from benchmarks.peers import launch, report
from benchmarks.peers.options import Options, parse
from benchmarks.peers.rank import BATCHES, JOB
from benchmarks.peers.registry import ALONE, PEERS, Peer
from benchmarks.peers.report import Outcome
from benchmarks.peers.results import Failed, Row, ends, judge, merge, ratios
from benchmarks.training import data
from benchmarks.training.model import GPT

_WIDTH = 132
"""Columns where the output is no terminal."""


def main(arguments: list[str]) -> int:
    """Run the benchmark; return the exit code."""
    # A cluster does not end with the program that started it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        options = parse(arguments)
        absent = {name: reason for name in options.peers if (reason := PEERS[name].absent())}
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            prepare(options, Path(folder))
            file = report.open_new(options.json)
            return Run(options, Path(folder), absent, file).all()
    except UsageError as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _stop(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def prepare(options: Options, folder: Path) -> None:
    """Write what the ranks of all peers read: the job, and the tokens of every step.

    Raises:
        UsageError: there is no text.
    """
    job = options.job
    job.dump(folder / JOB)
    num_tokens = job.shape.context
    text = data.read(options.data, at_least=num_tokens + 1)
    steps = []
    for step in range(job.warmup + job.steps):
        sequences = options.num_ranks * job.sequences
        batch = data.batch(
            text, seed=job.seed, step=step, num_sequences=sequences, num_tokens=num_tokens
        )
        steps.append(np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1))
    np.save(folder / BATCHES, np.stack(steps))


@dataclass
class Run:
    """The launches of one call of the program, and what came of them."""

    options: Options
    folder: Path
    absent: Mapping[str, str]
    file: TextIO | None
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        if not self._console.is_terminal:
            self._console.width = _WIDTH

    def all(self) -> int:
        """Launch every peer, report; return the exit code."""
        numel = sum(parameter.numel() for parameter in GPT(self.options.job.shape).parameters())
        present = [PEERS[name] for name in self.options.peers if name not in self.absent]
        versions = {peer.name: peer.version() for peer in present}
        for line in self._introduction(numel, versions):
            self._console.print(line)
        for name, reason in self.absent.items():
            self._console.print(f"# {PEERS[name].title}: absent: {reason}")
        report.write(self.file, report.header(self.options, numel, versions))
        for peer in (ALONE, *present):
            self._launch(peer)
        return self._report()

    def _launch(self, peer: Peer) -> None:
        found = launch.run(peer, self.options, self.folder)
        if isinstance(found, Failed):
            self.outcomes[peer.name] = found
            self._console.print(f"# {peer.title}: failed: {found.reason}")
            return
        job = self.options.job
        alone = self.outcomes.get(ALONE.name)
        tokens = self.options.num_ranks * job.sequences * job.shape.context
        row = merge(
            peer.name,
            found,
            tokens=tokens,
            alone_s=alone.compute_s if isinstance(alone, Row) else None,
        )
        self.outcomes[peer.name] = row
        self._console.print(f"# {peer.title}: {row.step_s:.3f} s a step")

    def _introduction(self, numel: int, versions: Mapping[str, str]) -> list[str]:
        options, job = self.options, self.options.job
        shape = f"{options.num_nodes} nodes x {options.ranks_per_node} ranks"
        machine = report.header(options, numel, versions)
        size = f"{job.sequences} x {job.shape.context} tokens a rank and step"
        known = set(versions.values())
        return [
            f"# {shape}, links of {options.rate}; {machine['machine']['cores']} cores of"
            f" {machine['machine']['cpu']}",
            f"# GPT of {numel:,} parameters, bfloat16 with float32 masters, AdamW; {size};"
            f" {job.warmup} + {job.steps} steps",
            f"# versions: {_join(machine['versions'])}; {', '.join(sorted(known))}",
        ]

    def _report(self) -> int:
        rows = {name: row for name, row in self.outcomes.items() if isinstance(row, Row)}
        compared, verdicts, ended = ratios(rows), judge(rows), ends(rows)
        title = f"One training by zero and its peers, links of {self.options.rate}"
        self._console.print(report.table(self.outcomes, self.absent, title))
        for ratio in compared:
            self._console.print(report.ratio_line(ratio))
        for verdict in verdicts:
            self._console.print(report.verdict_line(verdict))
        for end in ended:
            self._console.print(report.end_line(end))
        for item in report.rows(self.outcomes, self.absent):
            report.write(self.file, item)
        report.write(self.file, report.closing(compared, verdicts, ended))
        failed = len(rows) < len(self.outcomes)
        return 1 if failed or not all(each.holds for each in (*verdicts, *ended)) else 0


def _join(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)
