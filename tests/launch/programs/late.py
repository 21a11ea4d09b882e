"""A program whose rank 1 is late for each call, as its argument says how; the others wait a second.

Who waits is told the name of the call and of the rank. A small call of the late rank then still
ends, since all have sent their part, and calls that follow meet; a large one ends the job.
"""

import sys
import time

import numpy as np

import zcomm

CALLS = {
    "small": lambda comm: comm.all_reduce(np.ones(2)),
    "large": lambda comm: comm.all_gather(np.ones(70_000, np.float32), codec="int8"),
    "barrier": lambda comm: comm.barrier(),
}


def main(how: str) -> None:
    comm = zcomm.init(abort=how == "large")
    comm.barrier()
    start = time.monotonic()
    if comm.rank == 1:
        time.sleep(1.7)
    try:
        CALLS[how](comm)
    except zcomm.CollectiveTimeout as error:
        sys.stdout.write(f"rank {comm.rank} after {time.monotonic() - start:.1f} s: {error}\n")
        if how == "large":
            raise  # its data, which the late rank waits for, is never sent
    comm.barrier()
    sys.stdout.write(f"sum {comm.all_reduce(np.ones(1))[0]}\n")
    comm.close()


main(sys.argv[1])
