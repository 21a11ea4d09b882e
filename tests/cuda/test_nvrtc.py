"""Every instance of the kernels, compiled by NVRTC for every architecture: no driver, no device."""

import importlib

import pytest

from tests.cuda import machine_code, table
from zcomm.codecs import compile as compiler
from zcomm.codecs import instances

pytestmark = pytest.mark.skipif(bool(compiler.why_not()), reason=f"no NVRTC: {compiler.why_not()}")

FEW = (
    "zc::encode<float, zc::INT8, 256, zc::NEAREST, false>",
    "zc::encode<zc::bf16, zc::INT4, 0, zc::NEAREST, false>",
    "zc::decode<zc::fp16, zc::INT8, false>",
    "zc::decode_reduce<float, zc::INT4, false>",
    "zc::decode_reduce_encode<zc::INT8, zc::INT4, 128, zc::STOCHASTIC, false, false>",
    "zc::reduce_casts<zc::fp16, zc::bf16>",
)
# What a card may do otherwise when told so; CuPy, for one, always passes -ftz=true.
OTHER_ARITHMETIC = ("-ftz=true", "-fmad=true", "-prec-div=false", "-prec-sqrt=false")


def check(arch, names):
    bad = {}
    for name in names:
        done = machine_code.compiled(arch, name)
        found = machine_code.figures(name, done)
        print(table.row(arch, name, found))
        if found.spilled_nbytes or found.warnings:
            bad[name] = found
        by_hand, by_compiler = machine_code.floating_point(done.ptx)
        assert by_compiler == set(), name
        assert by_hand <= machine_code.BY_HAND, name
        assert done.ptx.count(".ftz") == done.ptx.count("rcp.approx.ftz.f32"), name
    assert bad == {}


@pytest.mark.parametrize("arch", machine_code.ARCHS[::3])
@pytest.mark.parametrize("name", FEW)
def test_few(arch, name):
    check(arch, [name])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", machine_code.ARCHS)
def test_all(arch):
    check(arch, instances.every())


@pytest.mark.parametrize("name", FEW)
def test_no_flag_changes_the_arithmetic(name):
    plain = compiler.compiled("sm_90", [name]).ptx
    assert compiler.compiled("sm_90", [name], OTHER_ARITHMETIC).ptx == plain


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_flag_changes_the_arithmetic_of_any():
    for name in instances.every():
        plain = compiler.compiled("sm_90", [name]).ptx
        assert compiler.compiled("sm_90", [name], OTHER_ARITHMETIC).ptx == plain, name


def test_arithmetic_of_the_compiler_is_seen():
    """A multiplication and an addition in plain C++ become a flushing FMA, and are reported."""
    nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    source = "__global__ void f(float* x) { x[0] = x[1] * x[2] + x[3]; x[4] = x[5] < x[6]; }"
    program = nvrtc.createProgram(source, "f.cu", (), ())
    nvrtc.compileProgram(program, ("-arch=sm_90", "-ftz=true"))
    by_hand, by_compiler = machine_code.floating_point(nvrtc.getPTX(program).decode())
    assert by_hand == set()
    assert by_compiler == {"fma.rn.ftz.f32", "setp.lt.ftz.f32"}
