"""The kernels on a real device: the table of cases, and each function that differs on a device."""

import pytest

from tests.codecs.cases import cases, differences, outcomes
from tests.cuda import arithmetic
from tests.cuda.on_device import OnDevice
from zcomm.codecs import compile as compiler
from zcomm.codecs import reference
from zcomm.errors import ZcommError

pytestmark = pytest.mark.gpu
CASES = arithmetic.cases()


@pytest.fixture(scope="module")
def device():
    from zcomm.cuda import cuda_device

    try:
        return cuda_device(0)
    except ZcommError as error:
        pytest.skip(str(error))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", ["smoke", "full"])
def test_cases(device, level):
    kernels = OnDevice(device)
    for case in cases(level):
        inputs = case.call.inputs()
        wanted = outcomes(reference, case.call, inputs)
        assert differences(kernels, case.call, wanted, inputs) == [], case


@pytest.mark.parametrize("flags", [(), ("-ftz=true",)], ids=["plain", "ftz"])
@pytest.mark.parametrize("name", CASES)
def test_arithmetic(device, name, flags):
    *inputs, expected = CASES[name]
    instance = arithmetic.instance(name)
    source = arithmetic.SOURCE.read_text()
    done = compiler.compiled(device.arch, [instance], flags, source)
    with device.selected():
        module = device.cupy.cuda.function.Module()
        module.load(done.cubin)
        function = module.get_function(done.lowered[instance])

        def launch(grid, threads, arguments):
            function((grid, 1, 1), (threads, 1, 1), arguments)
            device.cupy.cuda.runtime.deviceSynchronize()

        written = arithmetic.outcome(device, launch, inputs)
    assert arithmetic.same(name, written, expected).all()
