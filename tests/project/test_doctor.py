"""zcomm doctor and its command line, run as a user runs them: as children."""

import json
import os
import platform
from argparse import ArgumentParser
from importlib.metadata import EntryPoint, version

import pytest

import zcomm
from topology import cost, from_shape
from zcomm import cli, doctor, tuning
from zcomm.tuning import Curve, Key

DOCTOR = ("-m", "zcomm.cli", "doctor")
REQUIRED = ("torch", "numpy", "rich", "mpi4py")
# Stands in for a machine where packages are not installed, or cannot load their libraries. It is
# quick where torch is one of them.
HIDE = """
import sys
hidden = {hidden}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in hidden:
            raise hidden[name]
sys.meta_path.insert(0, Finder())
from zcomm.cli import main
sys.exit(main(["doctor", "--json"]))
"""


def hide(**errors):
    """Return a program that runs doctor where importing a module (dots are __) is an error."""
    entries = [f"{name.replace('__', '.')!r}: {error}" for name, error in errors.items()]
    return HIDE.format(hidden="{" + ", ".join(entries) + "}")


def absent(name):
    return f"ModuleNotFoundError('No {name}', name={name!r})"


def findings(run):
    assert "Traceback" not in run.stderr
    assert run.stdout, (run.returncode, run.stderr)
    report = json.loads(run.stdout)
    return report["ok"], {finding.pop("name"): finding for finding in report["findings"]}


def test_names_versions_and_is_content(launch):
    run = launch(*DOCTOR, "--json")
    ok, found = findings(run)
    assert (run.returncode, ok) == (0, True)
    assert found["zcomm"]["value"].startswith(zcomm.__version__ + " ")
    assert found["Python"]["value"].startswith(platform.python_version() + " ")
    for name in REQUIRED:
        assert found[name] == {"value": found[name]["value"], "status": "ok", "remedy": ""}
        assert found[name]["value"].startswith(version(name))
    assert "MPI job" not in found


def test_text_has_a_line_for_each_finding(launch):
    run = launch(*DOCTOR, env={"ZCOMM_TOPOLOGY": "2x2"})
    lines = run.stdout.splitlines()
    for name in (
        "zcomm",
        *REQUIRED,
        "MPI library",
        "mpirun",
        "native kernels",
        "CUDA",
        "ZCOMM_TOPOLOGY",
    ):
        assert len([line for line in lines if line.startswith(name + "  ")]) == 1
    assert lines[-1] == "nothing required is missing"


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("mpi4py", absent("mpi4py")),
        ("mpi4py__MPI", "ImportError('libmpi.so: no such file')"),
        ("mpi4py__MPI", "RuntimeError('cannot load MPI library')"),
    ],
)
def test_required_and_missing_is_an_error_with_what_brings_it(launch, module, error):
    run = launch("-c", hide(torch=absent("torch"), **{module: error}))
    ok, found = findings(run)
    assert (run.returncode, ok) == (1, False)
    assert (found["torch"]["status"], found["torch"]["remedy"]) == ("missing", "pip install zcomm")
    assert found["MPI library"]["status"] == "missing"
    assert "zcomm[mpi]" in found["MPI library"]["remedy"]


def test_optional_and_absent_is_no_error(launch):
    names = ("cupy", "pynvml", "matplotlib", "zcomm._native")
    run = launch("-c", hide(**{name.replace(".", "__"): absent(name) for name in names}))
    ok, found = findings(run)
    assert (run.returncode, ok) == (0, True)
    for name, remedy in (
        ("cupy", "zcomm[cuda12]"),
        ("pynvml", "zcomm[cuda12]"),
        ("matplotlib", "zcomm[bench]"),
        ("native kernels", "C++ compiler"),
    ):
        assert found[name]["status"] == "absent"
        assert remedy in found[name]["remedy"]


@pytest.mark.slow
def test_under_mpirun_rank_0_tells_size_and_topology(launch):
    run = launch(*DOCTOR, "--json", num_ranks=4, env={"ZCOMM_TOPOLOGY": "2x2"})
    ok, found = findings(run)
    assert (run.returncode, ok) == (0, True)
    assert found["MPI job"]["value"] == "4 ranks"
    assert "2 x 2" in found["topology"]["value"]
    cores = len(os.sched_getaffinity(0))
    if cores < 4:  # a topology that plays two nodes makes no cores
        assert found["faster: cores"]["value"] == f"4 ranks of this host share {cores}"


def test_under_mpirun_rank_0_tells_what_auto_takes_and_why(launch, tmp_path):
    """Without a table by the model; with one that says that flat is faster for int8, by that."""
    env = {"ZCOMM_TOPOLOGY": "2x2", "ZCOMM_TUNING": str(tmp_path)}
    _, found = findings(launch(*DOCTOR, "--json", num_ranks=4, env=env))
    assert found["algorithm at 1 GiB"]["value"] == "exact: hierarchical; int8: hierarchical"
    assert "assumed" in found["algorithm from"]["value"]
    assert "zcomm tune" in found["algorithm from"]["remedy"]
    # Two shards of 16 MiB leave each node, by a link that is taken to have 119 MB/s.
    faster = found["faster: all_gather"]
    assert faster["value"] == "64 MiB take 282 ms (assumed), most of it on the network"
    assert faster["remedy"].startswith("with a codec: int8 ")
    world = from_shape((2, 2))
    curves = {
        Key("all_gather", "*:int8"): Curve((1, 2**31), (1.0, 1.0)),
        Key("all_gather", "1:int8,0:int8"): Curve((1, 2**31), (2.0, 2.0)),
    }
    known = tuning.Tuning(
        world, "mpi", cost.assumed([("node", 2), ("network", 4)]), curves, "measured"
    )
    path = tmp_path / f"{world.digest()[:16]}-mpi.json"
    tuning.write(path, tuning.to_json(known, {"date": "2026-11-30"}))
    _, found = findings(launch(*DOCTOR, "--json", num_ranks=4, env=env))
    exact, int8 = found["algorithm at 64 MiB"]["value"].split("; ")
    assert exact == "exact: hierarchical"
    assert int8.startswith("int8: all_gather flat, reduce_scatter hierarchical")
    assert str(path) in found["algorithm from"]["value"]
    assert "2026-11-30" in found["algorithm from"]["value"]


def test_launcher_of_another_mpi_is_found_out(launch):
    run = launch("-c", hide(torch=absent("torch")), env={"OMPI_COMM_WORLD_SIZE": "4"})
    _, found = findings(run)
    assert run.returncode == 1
    assert found["MPI job"]["status"] == "missing"
    assert "OMPI_COMM_WORLD_SIZE=4" in found["MPI job"]["value"]


def test_settings_without_effect_or_sense_are_named(launch):
    settings = {"ZCOMM_TIMEOUTS": "5", "ZCOMM_CPU": "sse9", "ZCOMM_TOPOLOGY": "2x7"}
    run = launch("-c", hide(torch=absent("torch")), env=settings, num_ranks=2)
    _, found = findings(run)
    assert found["ZCOMM_TIMEOUTS"]["value"] == "5 (no such variable, no effect)"
    assert "ZCOMM_CPU='sse9'" in found["native kernels"]["value"]
    assert "'2x7'" in found["topology"]["value"]


class Greeting:
    help = "say a word"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("word")

    def run(self, arguments) -> int:
        if arguments.word == "fail":
            raise ValueError("this word is not possible")
        print(arguments.word)
        return 7


@pytest.fixture
def registered(monkeypatch):
    """Two commands of other packages: one that works, and one that cannot be imported."""
    entries = [
        EntryPoint("greet", f"{__name__}:GREETING", cli.GROUP),
        EntryPoint("broken", "no_such_module_of_anybody:COMMAND", cli.GROUP),
    ]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries if group == cli.GROUP else [])


GREETING = Greeting()


def test_command_of_another_package_gets_its_arguments(registered, capsys):
    assert cli.main(["greet", "hello"]) == 7
    assert capsys.readouterr().out == "hello\n"


def test_error_of_a_command_is_one_line(registered, capsys):
    assert cli.main(["greet", "fail"]) == 2
    assert capsys.readouterr().err == "zcomm greet: this word is not possible\n"


def test_broken_command_is_one_line_and_does_not_harm_the_overview(registered, capsys):
    assert cli.main(["broken"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("zcomm broken: ")
    assert "no_such_module_of_anybody" in told
    assert told.count("\n") == 1
    assert cli.main([]) == 0
    overview = capsys.readouterr().out
    for text in ("doctor", "greet (say a word)", "no_such_module_of_anybody"):
        assert text in " ".join(overview.split())


def test_unknown_command_lists_the_known(registered, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["grete"])
    assert left.value.code == 2
    told = capsys.readouterr().err
    for text in ("grete", "doctor", "greet", "broken"):
        assert text in told


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"zcomm {zcomm.__version__}\n"


def test_settings_that_cannot_be_read_are_missing_something(launch):
    bad = {
        "ZCOMM_CHECK": ("maybe", "possible are 1 and 0"),
        "ZCOMM_TIMEOUT": ("-3", "greater than 0"),
        "ZCOMM_MESSAGE_LIMIT": ("1 pound", "expected bytes"),
        "ZCOMM_TOPOLOGY": ("2by2", "2by2"),
        "ZCOMM_LOG": ("loud", "possible are debug"),
    }
    environment = {name: value for name, (value, _) in bad.items()}
    run = launch(*DOCTOR, "--json", env=environment)
    _, found = findings(run)
    assert run.returncode == 1
    for name, (_, says) in bad.items():
        assert found[name]["status"] == "missing"
        assert says in found[name]["value"]
        assert found[name]["remedy"] == f"unset or correct {name}"


# Stands in for CuPy on a machine with two devices, a compiler and NCCL, or with none of them.
CUPY = """
import importlib.machinery, sys, types
def module(name, **contents):
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    made.__path__ = []
    vars(made).update(contents)
    sys.modules[name] = made
    return made
def fail(*_):
    raise RuntimeError("it is too old\\nby far")
there = {there}
runtime = types.SimpleNamespace(
    getDeviceCount=(lambda: 2) if there else fail,
    driverGetVersion=lambda: 13010,
    getDeviceProperties=lambda i: dict(name=b"Card"),
)
nccl = module("cupy.cuda.nccl", available=there, get_version=lambda: 22809)
cuda = module("cupy.cuda", runtime=runtime, nccl=nccl)
module("cupy", cuda=cuda, __version__="14.9")
nvrtc = module(
    "cupy_backends.cuda.libs.nvrtc",
    getVersion=(lambda: (13, 1)) if there else fail,
    getSupportedArchs=lambda: [75, 90, 120],
)
for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.libs"):
    module(name, nvrtc=nvrtc)
"""


def test_cuda_that_is_there_and_cuda_that_is_not(launch):
    run = launch("-c", CUPY.format(there=True) + hide(torch=absent("torch")))
    _, found = findings(run)
    assert found["cupy"]["value"] == "14.9"
    assert found["CUDA driver"]["value"] == "for CUDA 13.1, 2 x Card"
    assert found["NVRTC"]["value"] == "13.1, sm_75 to sm_120"
    assert found["NCCL"]["value"] == "2.28.9"
    run = launch("-c", CUPY.format(there=False) + hide(torch=absent("torch")))
    _, found = findings(run)
    for name, remedy in (("CUDA driver", "driver"), ("NVRTC", "zcomm[cuda13]"), ("NCCL", "nccl")):
        assert found[name]["status"] == "absent"
        assert remedy in found[name]["remedy"]
    assert found["CUDA driver"]["value"] == "RuntimeError: it is too old by far"


@pytest.mark.parametrize("setting", ["never", "always"])
def test_says_how_ranks_read_memory(monkeypatch, setting):
    pytest.importorskip("zcomm._native")
    monkeypatch.setenv("ZCOMM_CMA", setting)
    (finding,) = [one for one in doctor.examine() if one.name == "memory of ranks"]
    if setting == "never":
        assert finding.value.endswith("without process_vm_readv: ZCOMM_CMA=never")
    else:
        assert "process_vm_readv" in finding.value
        assert "never" not in finding.value
