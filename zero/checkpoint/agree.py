"""One rank's error becomes an error on all ranks, in words; nobody waits for one that left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from zcomm import Communicator
from zcomm.errors import CheckpointError, OffloadError
from zero.offload.drive import Faults
from zero.offload.told import told

_NBYTES = 1024


@contextmanager
def together(comm: Communicator, faults: Faults | None = None) -> Iterator[None]:
    """Run a part that is no collective itself, and raise on all ranks if it raises on one.

    Raises:
        CheckpointError: on the other ranks, with the first failed rank's number and message.
        OffloadError: on the other ranks, where that is what a rank raised; ``faults`` remember it.
    """
    with told(comm, faults):
        try:
            yield
        except OffloadError:
            raise
        except Exception as error:
            _exchange(comm, f"{error}" or type(error).__name__)
            raise
        for rank, text in enumerate(_exchange(comm, "")):
            if text:
                raise CheckpointError(f"rank {rank}: {text}")


def _exchange(comm: Communicator, text: str) -> list[str]:
    row = np.zeros(1, np.int64)
    row[0] = bool(text)
    if not comm.all_gather_values(row).any():
        return []
    data = text.encode()[:_NBYTES]
    rows = comm.all_gather_values(np.frombuffer(data.ljust(_NBYTES, b"\0"), np.uint8))
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


def same_number(comm: Communicator, number: int) -> int:
    """Return rank 0's number on all ranks; below 2^63."""
    return int(comm.all_gather_values(np.array([number], np.int64))[0, 0])
