"""What is built and installed: one version, exactly three packages, reasons for the rest."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import zcomm
from zcomm.codecs import compile

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements):
    return {re.split(r"[<>=!~ \[]", requirement)[0] for requirement in requirements}


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name: pin for name, _, pin in (line.partition("==") for line in lines) if pin}


def wanted():
    return names(PROJECT["dependencies"]).union(
        *map(names, PROJECT["optional-dependencies"].values())
    )


def test_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", zcomm.__version__)
    assert f"## [{zcomm.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_installed_version_is_that_of_the_sources():
    try:
        installed = metadata.version("zcomm")
    except metadata.PackageNotFoundError:
        pytest.skip("zcomm runs from its sources and is not installed")
    assert installed == zcomm.__version__


def test_every_dependency_has_a_reason_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    table = readme.partition("## Dependencies")[2]
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in re.findall(r"^\|.*\|$", table, re.M)
    ]
    explained = {name for row in rows[2:] if row[2] for name in re.findall(r"[\w-]+", row[0])}
    build = names(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
    assert (wanted() | build) - explained == set()


def test_extras_are_the_documented_ones():
    assert set(PROJECT["optional-dependencies"]) == {
        "mpi",
        "openmpi",
        "cuda12",
        "cuda13",
        "cuda-test",
        "bench",
        "peers",
        "test",
    }


def test_what_make_installs_is_pinned_within_the_ranges():
    specifiers = pytest.importorskip("packaging.requirements")
    chosen = [*PROJECT["dependencies"]]
    chosen += [
        requirement
        for extra in ("mpi", "bench", "test", "cuda-test")
        for requirement in PROJECT["optional-dependencies"][extra]
    ]
    pinned = pins()
    for text in chosen:
        requirement = specifiers.Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name]), text


def test_links_in_documents_lead_to_files():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    broken = [
        f"{document.name}: {target}"
        for document in documents
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert broken == []


def build_wheel(folder):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        ROOT,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_holds_exactly_the_three_packages_and_the_native_module(tmp_path):
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
        entry_points = next(n for n in inside if n.endswith("entry_points.txt"))
        scripts = archive.read(entry_points).decode()
    top = {name.split("/")[0] for name in inside}
    info = f"zcomm-{zcomm.__version__}.dist-info"
    assert top == {"topology", "zcomm", "zero", info}
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ("topology", "zcomm", "zero")
        for path in (ROOT / package).rglob("*.py")
    }
    assert sources - set(inside) == set()
    assert {f"{package}/py.typed" for package in ("topology", "zcomm", "zero")} <= set(inside)
    assert [name for name in inside if re.fullmatch(r"zcomm/_native[^/]*\.so", name)] != []
    compiled_at_run_time = {f"zcomm/csrc/{name}" for name in (compile.SOURCE, *compile.HEADERS)}
    shipped = {name for name in inside if name.endswith((".cpp", ".cu", ".h", ".o", ".pyc"))}
    assert shipped == compiled_at_run_time
    assert f"{info}/licenses/LICENSE" in inside
    assert "zcomm = zcomm.cli:main" in scripts
