"""The one-way rule: who may import whom, and what an import of ours must not bring along."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "topology": {"topology"},
    "zcomm": {"zcomm", "topology"},
    "zero": {"zero", "zcomm", "topology"},
    "benchmarks": {"benchmarks", "zero", "zcomm", "topology"},
}
OURS = {*ALLOWED, "tests", "examples"}
HEAVY = ("torch", "cupy", "mpi4py")


def imported_packages(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and top-level package of each absolute import, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, str(node.module).split(".")[0]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package):
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in (ROOT / package).rglob("*.py")
        for line, name in imported_packages(path.read_text())
        if name in OURS - ALLOWED[package]
    ]
    assert found == []


def test_the_reader_of_imports_sees_every_form():
    source = "import zero.shard, os\ndef f():\n    from zcomm.plan import Plan\nfrom . import x\n"
    assert list(imported_packages(source)) == [(1, "zero"), (1, "os"), (3, "zcomm")]


@pytest.mark.parametrize("module", ["zcomm", "topology", "zcomm.environment", "zcomm.cli"])
def test_import_brings_none_of_the_heavy_packages(module):
    program = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"
