"""How a benchmark starts and ends under mpirun: one rank speaks, all leave with one exit code.

A *usage error* is the user's to mend: one line on stderr and exit code 2. Any other exception is
left to zcomm, which ends all ranks with its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol, TypeVar

import numpy as np

import zcomm
from zcomm import Communicator, ZcommError, environment, launcher

T = TypeVar("T")


class UsageError(ValueError):
    """A request that cannot be met as it stands. The message is one line for the user."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises :class:`UsageError` instead of printing and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class Options(Protocol):
    """What every benchmark's options have: a topology as ``zcomm.init`` reads it."""

    @property
    def topology(self) -> str: ...


AnyOptions = TypeVar("AnyOptions", bound=Options)


def main(
    program: str,
    parse: Callable[[list[str]], AnyOptions],
    run: Callable[[AnyOptions, Communicator], int],
    arguments: list[str] | None = None,
) -> int:
    """Parse, connect all ranks, run, disconnect; return the exit code.

    Every size travels as the codec says, small ones too: the communicator has ``min_numel=0``.
    """
    rank = 0
    try:
        rank = launcher.world().rank
        with _one_voice(rank):
            options = parse(sys.argv[1:] if arguments is None else arguments)
        comm = zcomm.init(topology=options.topology, min_numel=0)
        _quieten()
    except (ValueError, ZcommError) as error:
        return _complain(program, rank, error)
    try:
        code = run(options, comm)
    except UsageError as error:
        code = _complain(program, rank, error)
    comm.close()
    return code


def on_root(comm: Communicator, function: Callable[[], T]) -> T | None:
    """Call a function on rank 0 only and return its result there, None elsewhere. Collective.

    Raises:
        UsageError: on all ranks, when the function raised one.
    """
    result, error = None, None
    if comm.rank == 0:
        try:
            result = function()
        except UsageError as raised:
            error = raised
    failed = comm.all_gather_values(np.array([error is not None], np.int64))
    if failed[0, 0]:
        raise error or UsageError("rank 0 refused")
    return result


def _quieten() -> None:
    """Leave out what zcomm tells at level info, unless it was asked for: tables say it too."""
    if not environment.text("ZCOMM_LOG"):
        logging.getLogger("zcomm").setLevel(logging.WARNING)


@contextlib.contextmanager
def _one_voice(rank: int) -> Iterator[None]:
    """Keep the help of all ranks but the first from being printed."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(sys.stdout if rank == 0 else nowhere),
    ):
        yield


def _complain(program: str, rank: int, error: Exception) -> int:
    if rank == 0:
        print(f"{program}: {error}", file=sys.stderr, flush=True)
    return 2
