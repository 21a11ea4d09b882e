"""The emulator's library, built once for all processes of a test run, and a device on it."""

import fcntl
import os

import pytest

from tests.cuda import emulator
from tests.cuda.emulator import EmulatedDevice
from tests.cuda.on_device import OnDevice


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The path of the emulator's library, without sanitizers."""
    if emulator.why_not:
        pytest.skip(emulator.why_not)
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # all workers' own folders are in it
    with (folder / "emulator.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = folder / "emulator.so"
        return built if built.exists() else emulator.build(folder)


@pytest.fixture
def device(library):
    """An emulated device."""
    return EmulatedDevice(library)


@pytest.fixture
def kernels(device):
    """Its kernels, for host memory."""
    return OnDevice(device)
