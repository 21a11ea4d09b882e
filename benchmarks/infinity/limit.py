"""A limit of the memory of a process that the kernel enforces, or a watchdog where it cannot.

``python -m benchmarks.infinity.limit LIMIT GROUP... -- PROGRAM`` enters the group of its rank and
becomes PROGRAM, which has all of its memory inside of the limit from the start.

Words defined here: a *group* is a control group (cgroup) of the kernel, of version 1 or 2, which
kills what exceeds its limit when there is no page cache left to give up. A *watchdog* is a process
that looks at the resident size of another one every few milliseconds, and kills it.

A reader must not assume that a group's peak is memory that the program needs: page cache counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_POLL_SECONDS = 0.002
WATCHDOG = "-"
"""Stands for the path of a group where there are none."""


@dataclass(frozen=True)
class Group:
    """A control group for one process.

    Attributes:
        path: of its folder.
        version: 1 or 2.
    """

    path: Path
    version: int

    @property
    def setting(self) -> str:
        """The file that holds the limit."""
        return "memory.max" if self.version == 2 else "memory.limit_in_bytes"

    @property
    def charged(self) -> int:
        """The most bytes that were counted against the limit."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        return int((self.path / name).read_text())

    @property
    def num_killed(self) -> int:
        """How often the kernel killed a process of the group."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        pairs = (line.split() for line in (self.path / name).read_text().splitlines())
        return int(dict(pairs).get("oom_kill", 0))


@contextlib.contextmanager
def groups(count: int, nbytes: int) -> Iterator[list[Group]]:
    """Make groups that limit memory, without swap; none where the kernel or its rights refuse."""
    made: list[Group] = []
    try:
        for number in range(count):
            group = _made(f"zcomm-infinity-{os.getpid()}-{number}", nbytes)
            if group is None:
                break
            made.append(group)
        yield made if len(made) == count else []
    finally:
        for group in made:
            _remove(group.path)


def _made(name: str, nbytes: int) -> Group | None:
    for parent, version in _parents():
        path = parent / name
        group = Group(path, version)
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            (path / group.setting).write_text(str(nbytes))
            swap = "memory.swap.max" if version == 2 else "memory.memsw.limit_in_bytes"
            if (path / swap).exists():
                (path / swap).write_text("0" if version == 2 else str(nbytes))
            _ = group.charged, group.num_killed
        except OSError:
            _remove(path)
            continue
        return group
    return None


def _parents() -> Iterator[tuple[Path, int]]:
    """Yield folders that a group may be made in: below our own, beside it, at the root."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, version = _ROOT / "memory", 1
        elif number == "0" and (_ROOT / "cgroup.controllers").exists():
            base, version = _ROOT, 2
        else:
            continue
        folder = base / own.lstrip("/")
        for parent in dict.fromkeys((folder, folder.parent, base)):
            if parent.is_dir():
                yield parent, version


def _remove(path: Path) -> None:
    """Remove a group; the kernel may still be ending what was in it."""
    for _ in range(100):
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return


def resident_nbytes(process: int | str = "self", *, most: bool = True) -> int:
    """Return what a process has in memory, or had at most."""
    name = "VmHWM:" if most else "VmRSS:"
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def watch(process: int, nbytes: int) -> None:
    """Kill a process when its resident size is above a limit; return when it has ended."""
    while True:
        try:
            resident = resident_nbytes(process, most=False)
        except OSError:
            return
        if resident > nbytes:
            print(f"watchdog: {resident} bytes resident, limit {nbytes}", file=sys.stderr)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            return
        if os.getppid() != process:
            return
        time.sleep(_POLL_SECONDS)


def enter(group: str, nbytes: int) -> None:
    """Put this process under a limit: into a group, or in front of a watchdog."""
    if group != WATCHDOG:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
        return
    process = os.getpid()
    if os.fork() == 0:
        os.closerange(3, 256)  # the launcher waits for what the ranks hold open
        watch(process, nbytes)
        os._exit(0)


def main(arguments: list[str]) -> None:
    """Enter the group of this rank and become the program behind ``--``."""
    from zcomm import launcher

    place = arguments.index("--")
    nbytes, *named = arguments[:place]
    enter(named[launcher.started_rank()], int(nbytes))
    program = arguments[place + 1 :]
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
