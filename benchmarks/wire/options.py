"""The command line: sizes and types as in ``benchmarks.collectives``, and which variants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.collectives.cases import DATA_TYPES, sweep
from benchmarks.collectives.options import at_least, codec_names, size_nbytes
from benchmarks.launch import Parser, UsageError

Spec = str | tuple[str, ...] | None
"""A codec, one per level (innermost first), or None for none."""

PEERS = ("gloo", "mpi")
TYPES = tuple(name for name, dtype in DATA_TYPES.items() if dtype.floating)
# What each operation is usually given; the issue of this benchmark names the same.
CODECS: dict[str, tuple[Spec, ...]] = {
    "all_gather": (None, "int8"),
    "reduce_scatter": (None, "int4"),
    "all_reduce": (None, "int8"),
}


@dataclass(frozen=True)
class Options:
    """What the user asked for, checked. ``codecs`` of None: those usual for the operation."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    codecs: tuple[Spec, ...] | None
    algorithms: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int
    seconds: float
    check: bool
    topology: str
    json: Path | None

    def codecs_of(self, operation: str) -> tuple[Spec, ...]:
        """Return the codecs of an operation's variants, None for the exact one."""
        return CODECS[operation] if self.codecs is None else self.codecs


def build_parser() -> Parser:
    """Return the parser; its help is the reference of the flags."""
    parser = Parser(
        prog="python -m benchmarks.wire",
        description="Single calls of collectives beside gloo, MPI and the floor of the link.",
    )
    add = parser.add_argument
    add("operations", nargs="+", choices=tuple(CODECS), metavar="OPERATION")
    add("-b", "--minbytes", type=size_nbytes, default="8M", help="smallest buffer (8M)")
    add("-e", "--maxbytes", type=size_nbytes, help="largest buffer (the smallest)")
    add("-f", "--stepfactor", type=at_least(2), default=4, help="from one size to the next (4)")
    add("-d", "--datatype", choices=TYPES, default="bfloat16")
    add("-n", "--rounds", type=at_least(1), default=9, help="calls of each variant (9)")
    add("--seconds", type=float, default=0.0, help="more rounds while a size took less (0)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="check results (1)")
    add("--codec", nargs="+", type=codec_names, help="such as: none int8 int4,int4")
    add("--algorithm", nargs="+", default=["auto"], help="auto flat hierarchical (auto)")
    add("--peers", nargs="+", choices=(*PEERS, "none"), default=PEERS, help="gloo mpi, or none")
    add("--topology", default="auto", help="such as 2x2; auto discovers")
    add("-J", "--json", type=Path, metavar="FILE", help="write JSON lines to a new file")
    return parser


def parse(arguments: list[str]) -> Options:
    """Return the options of a command line.

    Raises:
        UsageError: in one line, what is wrong with it.
    """
    given = build_parser().parse_args(arguments)
    largest = given.minbytes if given.maxbytes is None else given.maxbytes
    if given.minbytes == 0 or largest < given.minbytes:
        raise UsageError(f"-b {given.minbytes} -e {largest}: sizes go upwards from at least 1")
    if given.seconds < 0:
        raise UsageError(f"--seconds {given.seconds}: give 0 or more")
    if "none" in given.peers and len(given.peers) > 1:
        raise UsageError("--peers none stands alone")
    peers = tuple(dict.fromkeys(given.peers)) if "none" not in given.peers else ()
    codecs = None
    if given.codec is not None:
        codecs = tuple(None if codec == "none" else codec for codec in given.codec)
    return Options(
        operations=tuple(dict.fromkeys(given.operations)),
        sizes=tuple(sweep(given.minbytes, largest, factor=given.stepfactor, step=0)),
        dtype=given.datatype,
        codecs=codecs,
        algorithms=tuple(dict.fromkeys(given.algorithm)),
        peers=peers,
        rounds=given.rounds,
        seconds=given.seconds,
        check=bool(given.check),
        topology=given.topology,
        json=given.json,
    )
