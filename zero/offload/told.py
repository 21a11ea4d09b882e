"""What one rank's disk does to a step, a load or a sharding, all ranks raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zcomm import Communicator
from zcomm.errors import OffloadError
from zero.offload.drive import Faults


@contextmanager
def told(comm: Communicator, faults: Faults | None = None) -> Iterator[None]:
    """Run a part in which the disk of this rank may fail; then the others raise its error, too.

    They do in their next operation of ``comm``: in this part, or behind it, where :func:`agreed`
    is one if there is no other. ``faults`` remember the error, on all ranks.
    """
    try:
        yield
    except OffloadError as error:
        if faults is not None:
            faults.note(error)
        if not error.resumable:
            comm.refuse(error)
        raise


def agreed(comm: Communicator) -> None:
    """Return when all ranks are here; raises the error of one whose disk failed."""
    comm.barrier()
