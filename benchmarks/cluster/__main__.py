"""``python -m benchmarks.cluster --nodes 2 --ranks-per-node 2 --rate 1gbit -- PROGRAM``.

Checks what the machine offers, starts the machine room and ends it on a signal. Exit code: the
program's; 2 and one line where there can be no cluster; 128 + n after signal n.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from types import FrameType
from typing import NoReturn

from benchmarks.cluster import network, start
from benchmarks.cluster.options import Options, parse
from benchmarks.launch import UsageError

_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
_GRACE_SECONDS = 5


class _Stopped(BaseException):
    """A signal, the argument, has asked for the end."""


def _stop(number: int, _: FrameType | None) -> NoReturn:
    raise _Stopped(number)


def main(arguments: list[str]) -> int:
    """Run a program on an emulated cluster; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        check(parse(arguments))
        return _run_room(arguments)
    except UsageError as error:
        print(f"benchmarks.cluster: {error}", file=sys.stderr)
        return 2
    except _Stopped as stopped:
        return 128 + int(stopped.args[0])


def check(options: Options) -> None:
    """Compare the machine with what a cluster needs.

    Raises:
        UsageError: in one line, what is missing.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise UsageError("an emulated cluster needs Linux and root, for network namespaces")
    for name, package in _TOOLS.items():
        if shutil.which(name) is None:
            raise UsageError(f"{name} is missing: apt-get install {package}")
    if not options.torch and start.find_hydra() is None:
        raise UsageError("mpiexec.hydra is missing: pip install 'zcomm[mpi]'")
    try:
        network.tool(*network.ALONE, "true")
    except UsageError as error:
        raise UsageError(f"no namespaces here: {error}") from None


def _run_room(arguments: list[str]) -> int:
    # A session of its own, so that Ctrl-C arrives here only. The room ends when its input does.
    room = subprocess.Popen(
        [*network.ALONE, sys.executable, "-m", "benchmarks.cluster.room", *arguments],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        return start.exit_code(room.wait())
    except _Stopped:
        _end(room)
        raise


def _end(room: subprocess.Popen[bytes]) -> None:
    """End the machine room and wait until all of its processes have ended."""
    assert room.stdin is not None
    room.stdin.close()
    try:
        room.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(room.pid, signal.SIGKILL)
        room.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
