"""``python -m benchmarks.quality``: see docs/quality.md."""

from __future__ import annotations

import sys

from benchmarks.quality.program import main

if __name__ == "__main__":
    sys.exit(main())
