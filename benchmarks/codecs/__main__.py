"""``python -m benchmarks.codecs``: see docs/benchmarks.md."""

from __future__ import annotations

import sys

from benchmarks.codecs.program import main

if __name__ == "__main__":
    sys.exit(main())
