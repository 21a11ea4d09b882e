"""The native kernels' tests once more, on a module built with address and undefined sanitizers."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SANITIZERS = "address,undefined"
PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("zcomm._native", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import zcomm
sys.modules["zcomm._native"] = zcomm._native = module
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def built(folder):
    """The native module, built with sanitizers."""
    nanobind = subprocess.check_output([sys.executable, "-m", "nanobind", "--cmake_dir"], text=True)
    options = [
        f"-DZC_SANITIZE={SANITIZERS}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind.strip()}",
    ]
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, *options], check=True)
    subprocess.run(["cmake", "--build", folder], check=True)
    return folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


def runtime_of(sanitizer):
    name = f"lib{sanitizer}.so"
    path = subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
    if path == name:
        pytest.skip(f"the compiler has no {name}")
    return path


@pytest.mark.sanitizer
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (shutil.which("gcc") and shutil.which("cmake")), reason="no gcc or no cmake"
)
def test_native_kernels_under_sanitizers(tmp_path):
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime_of('asan')} {runtime_of('ubsan')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT),
    }
    tests = [ROOT / "tests" / "codecs" / f"test_{name}.py" for name in ("native", "sizes")]
    command = [sys.executable, "-c", PROGRAM, built(tmp_path), *tests, "-q", "-m", "not slow"]
    child = subprocess.run(
        [*map(str, command), "-p", "no:cacheprovider", "--timeout=0"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-5000:]
