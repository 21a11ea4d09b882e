"""The native kernels' tests once more, on a module built with address and undefined sanitizers."""

import os
import subprocess
import sys
import sysconfig

import pytest

from tests.codecs.build import ROOT, needs_compiler, run_cmake

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


def runtime_of(sanitizer):
    name = f"lib{sanitizer}.so"
    path = subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
    if path == name:
        pytest.skip(f"the compiler has no {name}")
    return path


@pytest.mark.sanitizer
@pytest.mark.timeout(900)
@needs_compiler
def test_native_kernels_under_sanitizers(tmp_path):
    run_cmake(tmp_path, f"-DZC_SANITIZE={SANITIZERS}", target="_native")
    module = tmp_path / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime_of('asan')} {runtime_of('ubsan')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT),
    }
    tests = [ROOT / "tests" / "codecs" / f"test_{name}.py" for name in ("native", "sizes")]
    command = [sys.executable, "-c", PROGRAM, module, *tests, "-q", "-m", "not slow"]
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
