"""The backend under mpirun: one default group for all tests of a run."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def world() -> Iterator[int]:
    """Make the default group of backend zcomm; return its size."""
    import torch.distributed as dist

    import zcomm.torch  # noqa: F401

    dist.init_process_group("zcomm")
    yield dist.get_world_size()
    dist.destroy_process_group()
