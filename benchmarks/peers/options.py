"""The command line, and the job that all ranks of all peers get."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cluster.options import rate
from benchmarks.launch import Parser, UsageError
from benchmarks.peers.registry import PEERS
from benchmarks.training.model import Shape


@dataclass(frozen=True)
class Job:
    """The training, equal for all peers. Arithmetic is in bfloat16, masters are float32.

    Attributes:
        steps: that are measured, after ``warmup`` steps that are not.
        sequences: of ``shape.context`` tokens, a rank and step.
        seed: of weights and batches.
    """

    shape: Shape
    steps: int
    warmup: int
    sequences: int
    seed: int

    def dump(self, path: Path) -> None:
        """Write the job for the ranks to read."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read what :meth:`dump` wrote."""
        read = json.loads(path.read_text(encoding="utf-8"))
        return cls(**read | {"shape": Shape(**read["shape"])})


@dataclass(frozen=True)
class Options:
    """What the user asked for, checked."""

    job: Job
    peers: tuple[str, ...]
    num_nodes: int
    ranks_per_node: int
    rate: str
    data: Path | None
    json: Path | None
    patience: float

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its help is the reference of the flags."""
    parser = Parser(
        prog="python -m benchmarks.peers",
        description="Train one GPT by zero and by its peers on an emulated cluster, and compare.",
    )
    add = parser.add_argument
    add("--nodes", type=int, default=2, help="of the cluster (2)")
    add("--ranks-per-node", type=int, default=2, help="of every node (2)")
    add("--rate", default="200mbit", help="of every node's link, each way (200mbit); or none")
    add("--peers", nargs="+", default=list(PEERS), metavar="NAME", help=f"of {', '.join(PEERS)}")
    add("--steps", type=int, default=5, help="that are measured (5)")
    add("--warmup", type=int, default=2, help="steps before those (2)")
    add("--width", type=int, default=512, help="of the model, a multiple of 64 (512)")
    add("--depth", type=int, default=8, help="blocks of the model (8)")
    add("--tokens", type=int, default=128, help="of a sequence (128)")
    add("--sequences", type=int, default=1, help="of a rank and step (1)")
    add("--seed", type=int, default=0, help="of weights and batches (0)")
    add("--data", type=Path, help="a file or folder of text (standard library)")
    add("--patience", type=float, default=150, help="seconds that a peer may take (150)")
    add("-J", dest="json", type=Path, metavar="FILE", help="write JSON lines into a new file")
    return parser


def parse(arguments: list[str]) -> Options:
    """Return the options of a command line.

    Raises:
        UsageError: in one line, what is wrong with it.
    """
    given = build_parser().parse_args(arguments)
    for name, least in _LEAST.items():
        if getattr(given, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(given, name)}: at least {least}")
    if given.width % 64:
        raise UsageError(f"--width {given.width}: heads have 64 elements, give a multiple")
    unknown = [name for name in given.peers if name not in PEERS]
    if unknown:
        raise UsageError(f"--peers {' '.join(unknown)}: possible are {', '.join(PEERS)}")
    try:
        rate(given.rate)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--rate: {error}") from None
    shape = Shape(given.tokens, given.width, given.depth, given.width // 64, widen=False)
    return Options(
        job=Job(shape, given.steps, given.warmup, given.sequences, given.seed),
        peers=tuple(name for name in PEERS if name in given.peers),
        num_nodes=given.nodes,
        ranks_per_node=given.ranks_per_node,
        rate=given.rate,
        data=given.data,
        json=given.json,
        patience=given.patience,
    )


_LEAST = {
    "nodes": 1,
    "ranks_per_node": 1,
    "steps": 1,
    # Before it Adam has no moments and DDP no buckets, and pages are touched for the first time.
    "warmup": 1,
    "width": 64,
    "depth": 1,
    "tokens": 1,
    "sequences": 1,
    "seed": 0,
    "patience": 1,
}
