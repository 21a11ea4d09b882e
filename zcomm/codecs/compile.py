"""CUDA kernels from their source to machine code, with NVRTC, once per machine.

Compiling needs CuPy and NVRTC but neither a driver nor a device; only ``load`` does. The result of
each instance is kept in a file of the user's cache (``$XDG_CACHE_HOME``, else ``~/.cache``), named
after everything that it depends on. Of the processes that need the same one, the first compiles and
the others wait for its file. Do not assume CuPy's own flags: none of them is used, and no bit would
depend on them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from zcomm.errors import CodecError

SOURCE = "kernels.cu"
HEADERS = ("codec.h", "cuda_lanes.h", "cuda_rows.h", "cuda_encode.h", "cuda_decode.h")
FLAGS = ("-std=c++17", "--device-as-default-execution-space")


@dataclass(frozen=True)
class Compiled:
    """Machine code, what its functions are called in it, the PTX and the compiler's messages."""

    cubin: bytes
    lowered: dict[str, str]
    ptx: str
    log: str


def compiled(
    arch: str, names: Sequence[str], flags: Sequence[str] = (), source: str | None = None
) -> Compiled:
    """Compile instances for an architecture such as ``sm_90``.

    ``flags`` are added to those of this module; ``source`` takes the place of the kernels.

    Raises:
        CodecError: NVRTC does not know the architecture, or refuses the source.
    """
    nvrtc = _nvrtc()
    headers = tuple(_source(name).encode() for name in HEADERS)
    program = nvrtc.createProgram(
        source or _source(SOURCE), SOURCE, headers, tuple(name.encode() for name in HEADERS)
    )
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        nvrtc.compileProgram(program, (*FLAGS, f"-arch={arch}", *flags))
        return Compiled(
            cubin=nvrtc.getCUBIN(program) + b"\0",  # CuPy cuts the last byte
            lowered={name: nvrtc.getLoweredName(program, name) for name in names},
            ptx=nvrtc.getPTX(program).decode(),
            log=nvrtc.getProgramLog(program),
        )
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise CodecError(
            f"NVRTC cannot compile {', '.join(names)} for {arch}: {error}\n{log}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def cubin(arch: str, names: Sequence[str]) -> tuple[bytes, dict[str, str]]:
    """Return machine code of instances, and the name of each in it; compile it where it is new.

    Raises:
        CodecError: as ``compiled``.
    """
    folder = _cache()
    path = folder / f"{_key(arch, names)}.cubin"
    with contextlib.suppress(FileNotFoundError):
        return _read(path)
    with _alone(folder, path.stem):
        with contextlib.suppress(FileNotFoundError):
            return _read(path)  # another process has compiled it meanwhile
        done = compiled(arch, names)
        _write(path, done)
    return done.cubin, done.lowered


def load(cupy: Any, arch: str, kernel: str) -> dict[str, Any]:
    """Return the functions of the current device that belong to an instance, by name.

    Raises:
        CodecError: as ``compiled``.
    """
    code, lowered = cubin(arch, [kernel])
    module = cupy.cuda.function.Module()
    module.load(code)
    return {name: module.get_function(symbol) for name, symbol in lowered.items()}


def why_not() -> str:
    """Say why nothing can be compiled here; empty where it can."""
    try:
        nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
        nvrtc.getVersion()
    except Exception as error:  # what finds libraries for CuPy raises errors of its own
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _nvrtc() -> Any:
    reason = why_not()
    if reason:
        raise CodecError(
            "CUDA kernels are compiled with CuPy and NVRTC, which cannot be loaded:"
            f" pip install 'zcomm[cuda13]' ({reason})"
        )
    return importlib.import_module("cupy_backends.cuda.libs.nvrtc")


def _version() -> tuple[int, int]:
    version: tuple[int, int] = _nvrtc().getVersion()
    return version


def _source(name: str) -> str:
    return (resources.files("zcomm") / "csrc" / name).read_text()


def _key(arch: str, names: Sequence[str]) -> str:
    parts = [*map(_source, (SOURCE, *HEADERS)), *FLAGS, arch, str(_version()), *names]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _cache() -> Path:
    """Return a folder for machine code: the user's cache, or one that lasts for this process."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "zcomm" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        logging.getLogger("zcomm").warning(
            "CUDA kernels are compiled in every run: %s cannot be written (%s)", folder, error
        )
        return Path(tempfile.mkdtemp(prefix="zcomm-kernels-"))


@contextlib.contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Wait until no other process is inside with the same name."""
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> tuple[bytes, dict[str, str]]:
    """Read what ``_write`` wrote: one line of JSON, then machine code."""
    line, _, code = path.read_bytes().partition(b"\n")
    return code, json.loads(line)


def _write(path: Path, done: Compiled) -> None:
    """Write a file that exists as a whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(json.dumps(done.lowered).encode() + b"\n" + done.cubin)
    os.replace(file.name, path)
