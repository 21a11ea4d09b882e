"""What the user asks for, and what does not go together."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.codecs.cases import CASES
from benchmarks.launch import Parser, UsageError

INSTRUCTION_SETS = ("avx512", "avx2", "baseline")
NUMEL = {"cpu": 1 << 25, "cuda": 1 << 26, "quality": 1 << 20}
REPEATS = 7
TRAINING_STEPS = 20
NBYTES_PER_ELEMENT = {"cpu": 32, "cuda": 8, "quality": 64}
"""About what the host holds at once: messages and what they become, or errors in float64."""


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
    _refuse_misplaced(given, mode)
    for flag in ("numel", "repeats"):
        if (value := getattr(given, flag)) is not None and value < 1:
            raise UsageError(f"--{flag} {value}: at least 1")
    if given.numel:
        _check_memory(given.numel, mode)
    picture = Path(given.quality) if given.quality else None
    for flag, path in (
        ("--quality", picture),
        ("--json", given.json),
        ("--save-gradients", given.save_gradients),
    ):
        if path:
            _check_output(flag, path)
    return Options(
        mode=mode,
        numel=given.numel or NUMEL[mode],
        repeats=given.repeats or REPEATS,
        kernel=given.kernel or "all",
        cpu=given.cpu or "",
        picture=picture,
        gradients=given.gradients,
        save_gradients=given.save_gradients,
        json=given.json,
    )


def _check_memory(numel: int, mode: str) -> None:
    """Refuse a size that this machine cannot hold."""
    needed = numel * NBYTES_PER_ELEMENT[mode]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > total:
        raise UsageError(
            f"--numel {numel}: needs about {needed / 2**30:.4g} GiB, and this machine has"
            f" {total / 2**30:.4g}"
        )


def _check_output(flag: str, path: Path) -> None:
    """Refuse a file that could not be written when all is done."""
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"{flag} {path}: is a folder; give a file to write")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{flag} {path}: may not be written")


_ONLY_FOR = {
    "cpu": ("cpu",),
    "kernel": ("cpu", "cuda"),
    "repeats": ("cpu", "cuda"),
    "gradients": ("quality",),
    "save_gradients": ("quality",),
}


def _refuse_misplaced(given: argparse.Namespace, mode: str) -> None:
    """Refuse flags that would be without effect."""
    if mode == "quality" and given.device != "cpu":
        raise UsageError(f"--device {given.device}: --quality is the same on every device")
    for name, modes in _ONLY_FOR.items():
        if getattr(given, name) is not None and mode not in modes:
            flag, place = name.replace("_", "-"), " or ".join(map(_WITH.__getitem__, modes))
            raise UsageError(f"--{flag} {getattr(given, name)}: has a meaning only with {place}")
    if given.gradients and given.save_gradients:
        raise UsageError("--gradients and --save-gradients: give one, to read or to write")


_WITH = {"cpu": "--device cpu", "cuda": "--device cuda", "quality": "--quality"}


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
