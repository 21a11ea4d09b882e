"""``mpirun -n 4 python -m benchmarks.wire OPERATION ...``: see docs/benchmarks.md."""

from __future__ import annotations

import sys

from benchmarks import launch
from benchmarks.wire.options import parse
from benchmarks.wire.run import run

if __name__ == "__main__":
    sys.exit(launch.main("benchmarks.wire", parse, run))
