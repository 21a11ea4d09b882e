"""The native kernels' tests once more, on other builds of the module.

One build has address and undefined sanitizers; one has no vectors, as on processors that are not
x86.
"""

import os
import subprocess
import sys
import sysconfig

import pytest

from tests.codecs.build import ROOT, needs_compiler, run_cmake

SANITIZERS = "address,undefined"
TESTS = ("native", "sizes", "fp8", "stochastic", "hadamard", "flush")
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


def runtime_of(sanitizer):
    name = f"lib{sanitizer}.so"
    path = subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
    if path == name:
        pytest.skip(f"the compiler has no {name}")
    return path


def run_tests(folder, *options, select, **environment):
    """Build the native module in a folder and run the tests of it on that build."""
    run_cmake(folder, *options, target="_native")
    module = folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    tests = [ROOT / "tests" / "codecs" / f"test_{name}.py" for name in TESTS]
    command = [sys.executable, "-c", PROGRAM, module, *tests, "-q", "-m", "not slow", "-k", select]
    child = subprocess.run(
        [*map(str, command), "-p", "no:cacheprovider", "--timeout=0"],
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-5000:]


@pytest.mark.sanitizer
@pytest.mark.timeout(1800)
@needs_compiler
def test_native_kernels_under_sanitizers(tmp_path):
    run_tests(
        tmp_path,
        f"-DZC_SANITIZE={SANITIZERS}",
        select="not numpy and not threads",
        LD_PRELOAD=f"{runtime_of('asan')} {runtime_of('ubsan')}",
        ASAN_OPTIONS="detect_leaks=0",
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_compiler
def test_native_kernels_without_vectors(tmp_path):
    run_tests(tmp_path, "-DCMAKE_CXX_FLAGS=-DZC_SIMD=0", select="baseline")
