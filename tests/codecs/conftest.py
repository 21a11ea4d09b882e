"""The kernels under test: the reference, and the native ones one instruction set at a time."""

import contextlib

import pytest

from zcomm.codecs import kernels, native, reference

INSTRUCTION_SETS = ("avx512", "avx2", "baseline")


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def native_kernels(request):
    """The native kernels, held to one instruction set."""
    with held_to(request.param) as chosen:
        yield chosen


@pytest.fixture(scope="module", params=("numpy", *INSTRUCTION_SETS))
def any_kernels(request):
    """Every implementation of the kernels that this machine can run."""
    if request.param == "numpy":
        yield reference
        return
    with held_to(request.param) as chosen:
        yield chosen


@contextlib.contextmanager
def held_to(instruction_set):
    if instruction_set not in native.instruction_sets():
        pytest.skip(f"this CPU has no {instruction_set}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZCOMM_CODEC_BACKEND", "native")
        patch.setenv("ZCOMM_CPU", instruction_set)
        chosen = kernels()
        assert native.instruction_set() == instruction_set
        yield chosen
    native.select("")
