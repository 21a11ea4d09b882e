"""What the user asks for, and what does not go together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.codecs.cases import CASES
from benchmarks.launch import Parser, UsageError

INSTRUCTION_SETS = ("avx512", "avx2", "baseline")
NUMEL = {"cpu": 1 << 25, "cuda": 1 << 26, "quality": 1 << 20}
REPEATS = 7
TRAINING_STEPS = 20


@dataclass(frozen=True)
class Options:
    """``mode`` is cpu or cuda, whose speed is measured, or quality."""

    mode: str
    numel: int
    repeats: int
    kernel: str
    cpu: str
    picture: Path | None
    gradients: Path | None
    save_gradients: Path | None
    json: Path | None


def parse(arguments: list[str]) -> Options:
    """Return the options of a command line.

    Raises:
        UsageError: in one line, what is wrong with it.
    """
    given = _parser().parse_args(arguments)
    mode = given.device if given.quality is None else "quality"
    for flag, value, place in (
        ("--cpu", given.cpu, "cpu"),
        ("--gradients", given.gradients, "quality"),
        ("--save-gradients", given.save_gradients, "quality"),
    ):
        if value is not None and mode != place:
            raise UsageError(f"{flag} {value}: means something only {_WHERE[place]}")
    for flag, value in (("--kernel", given.kernel), ("--repeats", given.repeats)):
        if value is not None and mode == "quality":
            raise UsageError(f"{flag} {value}: means nothing with --quality")
    if mode == "quality" and given.device != "cpu":
        raise UsageError(f"--device {given.device}: --quality is the same on every device")
    if given.gradients and given.save_gradients:
        raise UsageError("--gradients and --save-gradients: give one, to read or to write")
    for flag, value in (("--numel", given.numel), ("--repeats", given.repeats)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: at least 1")
    return Options(
        mode=mode,
        numel=given.numel or NUMEL[mode],
        repeats=given.repeats or REPEATS,
        kernel=given.kernel or "all",
        cpu=given.cpu or "",
        picture=Path(given.quality) if given.quality else None,
        gradients=given.gradients,
        save_gradients=given.save_gradients,
        json=given.json,
    )


_WHERE = {"cpu": "with --device cpu", "quality": "with --quality"}


def _parser() -> Parser:
    parser = Parser(
        prog="python -m benchmarks.codecs",
        description="Speed of the codec kernels beside that of a copy, or the error of codecs.",
    )
    add = parser.add_argument
    add("-n", "--numel", type=int, help="elements of a message, or of a sample (by mode)")
    add("-r", "--repeats", type=int, help=f"timed rounds of a kernel ({REPEATS})")
    add("-k", "--kernel", choices=["all", *sorted({case.kernel for case in CASES})])
    add("-J", "--json", type=Path, help="write the results as JSON lines")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where kernels run (cpu)")
    add("--cpu", choices=INSTRUCTION_SETS, help="instruction set (the widest there is)")
    add(
        "--quality",
        nargs="?",
        const="",
        metavar="PICTURE",
        help="measure errors instead of speed; draw them to this PNG, PDF or SVG file",
    )
    add("--gradients", type=Path, help="read gradients from a file of --save-gradients")
    add(
        "--save-gradients",
        type=Path,
        help=f"keep the gradients of {TRAINING_STEPS} steps of the demo's training in a .npz file",
    )
    return parser
