"""Builds of the native module apart from the one that is installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
needs_compiler = pytest.mark.skipif(
    not all(map(shutil.which, ("gcc", "cmake", "nm"))), reason="no gcc, cmake or nm"
)


def run_cmake(folder, *options, target):
    """Build a target of CMakeLists.txt in a folder."""
    nanobind = subprocess.check_output([sys.executable, "-m", "nanobind", "--cmake_dir"], text=True)
    found = (f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.strip()}")
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, *found, *options], check=True)
    subprocess.run(["cmake", "--build", folder, "--target", target], check=True)
