"""A rank that cannot do its part of an operation says so in its place, and all ranks raise.

It shakes hands with the words of its error instead of those of the operation. The others find that
descriptions differ, as in any mismatch, exchange them, and raise the error in the place of
``CollectiveMismatch``. Nothing else was sent, so that all ranks may go on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from zcomm.errors import OffloadError

_MARK = "cannot take part: "
_LONGEST = 1000
"""Characters of a text and of a path: both together must fit a description."""


def words_of(error: OffloadError) -> str:
    """Return what a rank says instead of the description of an operation."""
    path = error.path[:_LONGEST]
    return _MARK + json.dumps([str(error)[:_LONGEST], path, error.offset], ensure_ascii=False)


def refused(texts: Sequence[str], ranks: Sequence[int]) -> OffloadError | None:
    """Return the error of the first rank that could not take part, by their texts and numbers."""
    for rank, said in zip(ranks, texts, strict=True):
        if said.startswith(_MARK):
            (text, path, offset), _ = json.JSONDecoder().raw_decode(said[len(_MARK) :])
            error = OffloadError(f"rank {rank}: {text}", path=path, offset=offset)
            error.resumable = True
            return error
    return None
