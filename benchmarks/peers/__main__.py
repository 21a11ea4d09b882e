"""``python -m benchmarks.peers``: see docs/benchmarks.md."""

from __future__ import annotations

import sys

from benchmarks.peers.driver import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
