"""The kernels under test, one instruction set at a time."""

import pytest

from zcomm.codecs import kernels, native

INSTRUCTION_SETS = ("avx512", "avx2", "baseline")


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def native_kernels(request):
    """The native kernels, held to one instruction set."""
    if request.param not in native.instruction_sets():
        pytest.skip(f"this CPU has no {request.param}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZCOMM_CODEC_BACKEND", "native")
        patch.setenv("ZCOMM_CPU", request.param)
        chosen = kernels()
        assert native.instruction_set() == request.param
        yield chosen
    native.select("")
