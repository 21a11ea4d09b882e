"""Environment variables: the one table of them, and the one place that reads them.

A *setting* is a ``ZCOMM_`` variable that is present and not empty. Values are read at the call, not
at import, so a test or a launcher may set them late. Do not assume that a value was checked before
it is asked for: each reader says what is wrong with it.
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

PREFIX = "ZCOMM_"


@dataclass(frozen=True)
class Variable:
    """A variable that zcomm understands; ``default`` is the text used when it is not set."""

    name: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()


VARIABLES = (
    Variable(
        "ZCOMM_TOPOLOGY",
        "",
        'the topology, outermost level first ("2x4": 2 nodes of 4 ranks), or a file (our JSON, XML'
        " of NCCL, the matrix of `nvidia-smi topo -m`); it replaces what would be discovered, and a"
        " topology given in code replaces it",
    ),
    Variable(
        "ZCOMM_CHECK",
        "1",
        "1: ranks compare the arguments of every operation before it starts; 0: they do not",
    ),
    Variable(
        "ZCOMM_TIMEOUT",
        "600",
        "seconds that a rank waits for the others in one operation before CollectiveTimeout",
    ),
    Variable(
        "ZCOMM_CODEC_BACKEND",
        "",
        "which kernels encode and decode; when not set, for host arrays native where it was built,"
        " else numpy, and for device arrays cuda",
        choices=("numpy", "native", "cuda"),
    ),
    Variable(
        "ZCOMM_CPU",
        "",
        "the widest instruction set that the native kernels may use; when not set, all the CPU has",
        choices=("avx512", "avx2", "baseline"),
    ),
    Variable(
        "ZCOMM_MESSAGE_LIMIT",
        "1GiB",
        "bytes of the largest single message (MPI, gloo); larger ones are sent in parts",
    ),
    Variable(
        "ZCOMM_CMA",
        "auto",
        "whether ranks of a node read each other's large arrays where they lie (cross memory"
        " attach), if the system permits it; auto: in an all_gather only those on huge pages; else"
        " they use windows",
        choices=("auto", "always", "never"),
    ),
    Variable(
        "ZCOMM_CUDA_AWARE_MPI",
        "0",
        "1: MPI is given device memory; 0: device memory goes through pinned host memory",
    ),
    Variable(
        "ZCOMM_TUNING",
        "",
        "the folder of tuning files, which `zcomm tune` writes and `zcomm.init` reads on rank 0;"
        " when not set, zcomm/tuning in the user's cache folder; 0: none is read or written",
    ),
    Variable(
        "ZCOMM_LOG",
        "",
        "level of the logger zcomm; when not set, info on rank 0 and warning on the others",
        choices=("debug", "info", "warning", "error"),
    ),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}
_FLAGS = {"1": True, "true": True, "yes": True, "on": True}
_FLAGS |= {"0": False, "false": False, "no": False, "off": False}
_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def text(name: str) -> str:
    """Return the value of a variable, or its default.

    Raises:
        ValueError: the variable has a fixed set of values and this is none of them.
    """
    variable = _BY_NAME[name]
    value = os.environ.get(name, "").strip()
    if value and variable.choices and value.lower() not in variable.choices:
        raise ValueError(f"{name}={value!r}: possible are {', '.join(variable.choices)}")
    if variable.choices:
        value = value.lower()
    return value or variable.default


def flag(name: str) -> bool:
    """Return a variable that switches something on or off.

    Raises:
        ValueError: the value is neither 1, true, yes, on nor 0, false, no, off.
    """
    value = text(name)
    if value.lower() not in _FLAGS:
        raise ValueError(f"{name}={value!r}: possible are 1 and 0")
    return _FLAGS[value.lower()]


def seconds(name: str) -> float:
    """Return a duration in seconds, greater than zero.

    Raises:
        ValueError: the value is not a positive finite number.
    """
    value = text(name)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name}={value!r}: expected a number of seconds greater than 0")
    return number


def nbytes(name: str) -> int:
    """Return a size in bytes, at least 1, from a text such as ``4096``, ``64KiB`` or ``1GiB``.

    Raises:
        ValueError: the value is not a whole number with one of these units.
    """
    value = text(name)
    match = re.fullmatch(r"(\d+)\s*(|kib|mib|gib)", value.lower())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < 1:
        raise ValueError(f"{name}={value!r}: expected bytes, as in 4096, 64KiB, 16MiB or 1GiB")
    return size


def cache_folder() -> Path:
    """Return where files of zcomm lie that can be made again (``XDG_CACHE_HOME``)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification wants relative paths ignored.
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "zcomm"


def settings() -> dict[str, str]:
    """Return every setting of this process, unknown ones included, sorted by name."""
    found = {name: value.strip() for name, value in os.environ.items() if name.startswith(PREFIX)}
    return {name: found[name] for name in sorted(found) if found[name]}


def unknown() -> list[str]:
    """Return the names of settings that zcomm does not understand, sorted."""
    return [name for name in settings() if name not in _BY_NAME]
