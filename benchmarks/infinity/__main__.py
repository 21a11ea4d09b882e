"""``python -m benchmarks.infinity``: see docs/offload.md."""

from __future__ import annotations

import sys

from benchmarks.infinity.driver import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
