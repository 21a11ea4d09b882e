"""The program: options, cases, tables, exit code.

0: everything is as defined; 1: a kernel and the NumPy reference differ in a byte of a sample, or an
error is beyond its computed bound; 2: what was asked for cannot be had, and one line says why.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from benchmarks.codecs import device, quality, speed
from benchmarks.codecs.cases import cpu_target, cuda_target
from benchmarks.codecs.options import Options, parse
from benchmarks.codecs.places import Host
from benchmarks.launch import UsageError
from zcomm import ZcommError
from zcomm.codecs import kernels


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        with _instruction_set(options.cpu):
            return _run(options)
    except (ValueError, ZcommError) as error:
        return _refuse(str(error))
    except MemoryError as error:
        return _refuse(f"--numel is too large: {' '.join(str(error).split())}")


def _refuse(reason: str) -> int:
    print(f"benchmarks.codecs: {reason}", file=sys.stderr, flush=True)
    return 2


def _run(options: Options) -> int:
    if options.mode == "quality":
        return quality.run(options)
    if options.mode == "cuda":
        with device.cuda() as place:
            return speed.run(place, cuda_target, options)
    return speed.run(Host(kernels()), cpu_target, options)


@contextlib.contextmanager
def _instruction_set(name: str) -> Iterator[None]:
    """Hold the native kernels to an instruction set, as the environment does."""
    before = os.environ.get("ZCOMM_CPU")
    if name:
        os.environ["ZCOMM_CPU"] = name
    try:
        if name and not hasattr(kernels(), "instruction_set"):
            raise UsageError(f"--cpu {name}: the NumPy kernels are in use, which have no choice")
        yield
    finally:
        os.environ.pop("ZCOMM_CPU", None)
        if before is not None:
            os.environ["ZCOMM_CPU"] = before
