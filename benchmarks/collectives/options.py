"""The command line of the collective benchmark: flags of the NCCL tests, and zcomm's own.

A wrong flag is a ``UsageError`` with one line for the user; nothing here prints or exits, because
every rank parses and only one of them may speak.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.collectives.cases import DATA_TYPES, OPERATIONS, REDUCTIONS
from benchmarks.launch import Parser, UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
DEFAULT_SIZE = "32M"
DEFAULT_STEP = "1M"


@dataclass(frozen=True)
class Options:
    """What the user asked for, checked. ``codec``: one, or one per level, innermost first."""

    operations: tuple[str, ...]
    minimum: int
    maximum: int
    factor: int | None
    step: int
    iterations: int
    warmup: int
    check: int
    dtypes: tuple[str, ...]
    reductions: tuple[str, ...]
    root: int
    codec: str | tuple[str, ...] | None
    algorithm: str
    topology: str
    json: Path | None
    seed: int


def size_nbytes(text: str) -> int:
    """Return the bytes that a size such as ``8``, ``64K`` or ``1.5M`` means (units of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size; write bytes, or 64K, 1.5M, 2G")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def at_least(minimum: int) -> type:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is less than {minimum}")
        return value

    return integer  # type: ignore[return-value]


def codec_names(text: str) -> str | tuple[str, ...]:
    """Split ``int8`` or ``int8,int4:block=64`` into one codec, or one per level.

    Options of a codec are separated by commas too: a part with ``=`` and no ``:`` belongs to the
    codec before it.
    """
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part)
    if not all(names):
        raise argparse.ArgumentTypeError(f"'{text}' names an empty codec")
    return names[0] if len(names) == 1 else tuple(names)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its help is the reference of the flags."""
    parser = Parser(
        prog="python -m benchmarks.collectives",
        description="Bandwidth, bytes and errors of collectives, in the table of the NCCL tests.",
    )
    add = parser.add_argument
    add("operation", choices=(*OPERATIONS, "all"))
    add("-b", "--minbytes", type=size_nbytes, default=DEFAULT_SIZE, help="smallest buffer (32M)")
    add("-e", "--maxbytes", type=size_nbytes, default=DEFAULT_SIZE, help="largest buffer (32M)")
    add("-f", "--stepfactor", type=at_least(2), help="multiply the size by this")
    add("-i", "--stepbytes", type=size_nbytes, help="or add this to the size (1M)")
    add("-n", "--iters", type=at_least(1), default=20, help="timed iterations (20)")
    add("-w", "--warmup_iters", type=at_least(0), default=1, help="untimed iterations (1)")
    add("-c", "--check", type=at_least(0), default=1, help="rounds of checks, 0 for none (1)")
    add("-d", "--datatype", choices=(*DATA_TYPES, "all"), default="float")
    add("-o", "--op", choices=(*REDUCTIONS, "all"), default="sum")
    add("-r", "--root", type=at_least(0), default=0, help="root of a broadcast (0)")
    add("-J", "--json", type=Path, metavar="FILE", help="write JSON lines to a new file")
    add(
        "--codec",
        type=codec_names,
        help="such as int8, or one per level, innermost first: int8,int4",
    )
    add("--algorithm", default="auto", help="auto, flat, hierarchical")
    add(
        "--topology",
        default="auto",
        help="such as 2x4 (outermost first), or a file; auto discovers",
    )
    add("--seed", type=int, default=0, help="of the data that checks use (0)")
    return parser


def parse(arguments: list[str]) -> Options:
    """Return the options of a command line.

    Raises:
        UsageError: in one line, what is wrong with it.
    """
    given = build_parser().parse_args(arguments)
    if given.stepfactor and given.stepbytes is not None:
        raise UsageError(
            f"-f {given.stepfactor} multiplies and -i {given.stepbytes} adds: give one of them"
        )
    step = size_nbytes(DEFAULT_STEP) if given.stepbytes is None else given.stepbytes
    if step == 0 or (given.stepfactor and given.minbytes == 0):
        raise UsageError("this sweep would never end: -i 0, or -f from -b 0")
    if given.minbytes > given.maxbytes:
        raise UsageError(f"-b {given.minbytes} is more than -e {given.maxbytes}")
    options = Options(
        operations=tuple(OPERATIONS) if given.operation == "all" else (given.operation,),
        minimum=given.minbytes,
        maximum=given.maxbytes,
        factor=given.stepfactor,
        step=step,
        iterations=given.iters,
        warmup=given.warmup_iters,
        check=given.check,
        dtypes=tuple(DATA_TYPES) if given.datatype == "all" else (given.datatype,),
        reductions=tuple(REDUCTIONS) if given.op == "all" else (given.op,),
        root=given.root,
        codec=given.codec,
        algorithm=given.algorithm,
        topology=given.topology,
        json=given.json,
        seed=given.seed,
    )
    _refuse_what_no_codec_can(options)
    return options


def _refuse_what_no_codec_can(options: Options) -> None:
    """Raise where no row asked for can use the codec; among others, such rows are exact."""
    if options.codec is None:
        return
    codec = options.codec if isinstance(options.codec, str) else ",".join(options.codec)
    if not any(OPERATIONS[name].takes_codec for name in options.operations):
        possible = ", ".join(name for name, item in OPERATIONS.items() if item.takes_codec)
        raise UsageError(
            f"{options.operations[0]} takes no codec ('{codec}'); these do: {possible}"
        )
    if not any(DATA_TYPES[name].floating for name in options.dtypes):
        raise UsageError(f"codec '{codec}' needs floating point, not {options.dtypes[0]}")
    if not {"sum", "avg"} & set(options.reductions) and options.operations != ("all_gather",):
        raise UsageError(f"codec '{codec}' works with sum and avg, not {options.reductions[0]}")
