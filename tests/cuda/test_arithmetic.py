"""The functions that differ on a device: their siblings for the host, and their PTX."""

import pytest

from tests.cuda import arithmetic, emulator, machine_code
from zcomm.codecs import compile as compiler

CASES = arithmetic.cases()


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    if emulator.why_not:
        pytest.skip(emulator.why_not)
    folder = tmp_path_factory.mktemp("arithmetic")
    names = map(arithmetic.instance, CASES)
    return emulator.EmulatedDevice(emulator.build(folder, source=arithmetic.SOURCE, names=names))


@pytest.mark.parametrize("name", CASES)
def test_on_the_host(device, name):
    *inputs, expected = CASES[name]

    def launch(*arguments):
        device.launch(arithmetic.instance(name), *arguments)

    written = arithmetic.outcome(device, launch, inputs)
    assert arithmetic.same(name, written, expected).all()


@pytest.mark.skipif(bool(compiler.why_not()), reason=f"no NVRTC: {compiler.why_not()}")
def test_all_of_them_are_ptx_written_by_hand():
    names = list(map(arithmetic.instance, CASES))
    ptx = compiler.compiled("sm_90", names, source=arithmetic.SOURCE.read_text()).ptx
    by_hand, by_compiler = machine_code.floating_point(ptx)
    assert by_hand == machine_code.BY_HAND
    assert by_compiler == set()
