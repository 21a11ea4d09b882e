"""The loops of one instruction set must not stand in for those of another when they are linked."""

import subprocess

import pytest

from tests.codecs.build import needs_compiler, run_cmake


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["zc_baseline", "zc_avx2", "zc_avx512"])
def test_loops_share_no_symbol(tmp_path, name):
    run_cmake(tmp_path, target=name)
    (loops,) = tmp_path.rglob("loops.cpp.o")
    symbols = subprocess.check_output(["nm", "-C", loops], text=True).splitlines()
    visible = [line.split(maxsplit=1)[-1] for line in symbols if line.split()[-2] in "BCDGRTVWuvw"]
    assert visible == [f"D {name}::table"]
