"""The CUDA kernels, compiled for the CPU once per session, for the stand-ins of devices here."""

import pytest

from tests.cuda.conftest import library
from tests.cuda.emulator import EmulatedDevice

__all__ = ["emulator", "library"]


@pytest.fixture
def emulator(library):
    return EmulatedDevice(library)
