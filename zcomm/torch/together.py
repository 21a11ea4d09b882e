"""Several operations under one handle: what was issued in a coalescing block of torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zcomm.torch.works import NO_LIMIT


class Together(dist.Work):
    """Ended when all have."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for all; raises what the first that failed raises."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Tell whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Tell whether all have ended well."""
        return all(work.is_success() for work in self._works)

    def result(self) -> list[Any]:
        """Return what all have written."""
        return [x for work in self._works for x in work.result()]

    def get_future(self) -> Any:
        """Return a future of what all have written."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(
            lambda done: [x for each in done.value() for x in each.value()]
        )
