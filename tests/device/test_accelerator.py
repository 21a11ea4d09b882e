"""The accelerator of the tests is one, see accelerator_checks.py."""

import pytest


@pytest.mark.slow
def test_it_is_one(launch):
    run = launch("-m", "pytest", "-q", "tests/device/accelerator_checks.py")
    assert run.returncode == 0, run.stdout
