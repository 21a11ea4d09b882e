"""``mpirun -n 4 python -m benchmarks.training``: see docs/benchmarks.md."""

from __future__ import annotations

import sys

from benchmarks import launch
from benchmarks.training.run import parse, run

if __name__ == "__main__":
    sys.exit(launch.main("benchmarks.training", parse, run))
