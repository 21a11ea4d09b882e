"""``mpirun -n 4 python -m benchmarks.collectives OPERATION``: see docs/benchmarks.md."""

from __future__ import annotations

import sys

from benchmarks import launch
from benchmarks.collectives.options import Options, parse
from benchmarks.collectives.record import open_new
from benchmarks.collectives.run import run, validate
from zcomm import Communicator


def _run(options: Options, comm: Communicator) -> int:
    validate(options, comm.topology)
    file = launch.on_root(comm, lambda: open_new(options))
    code = run(options, comm, file=file)
    if file is not None:
        file.close()
        print(f"# JSON lines: {options.json}")
    return code


if __name__ == "__main__":
    sys.exit(launch.main("benchmarks.collectives", parse, _run))
