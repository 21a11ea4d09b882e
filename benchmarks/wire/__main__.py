"""``mpirun -n 4 python -m benchmarks.wire OPERATION ...``: see docs/benchmarks.md."""

from __future__ import annotations

import os
import sys

# torch's store warns once a rank that it cannot name who connects. It asks when it is loaded.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from benchmarks import launch
from benchmarks.wire.options import parse
from benchmarks.wire.run import run

if __name__ == "__main__":
    sys.exit(launch.main("benchmarks.wire", parse, run))
