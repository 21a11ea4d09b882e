"""What a process group of the backend does beyond moving bytes: nothing, unless asked for here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zcomm.bootstrap import DEFAULT_MIN_NUMEL
from zcomm.hops import CodecSpec

FLOATING = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Options:
    """Quantisation of one process group, given as ``pg_options``.

    Each codec is None, a name, a :class:`zcomm.Codec`, or one per level of the topology, innermost
    first, and applies to floating-point tensors of at least ``min_numel`` elements in all (what
    all_gather returns, what the others are given), to sums and averages only. Everything else in
    the group travels exactly.

    Example:
        >>> group = dist.new_group(backend="zcomm", pg_options=Options(all_gather="int8"))
    """

    all_gather: CodecSpec = None
    reduce_scatter: CodecSpec = None
    all_reduce: CodecSpec = None
    min_numel: int = DEFAULT_MIN_NUMEL

    def codec(self, operation: str, dtypes: list[torch.dtype], op: str = "sum") -> CodecSpec:
        """Return the codec of a call, None where it has to be exact."""
        if op not in ("sum", "avg") or not FLOATING.issuperset(dtypes):
            return None
        chosen: CodecSpec = getattr(self, operation)
        return chosen


def check(options: object) -> Options:
    """Return the options of a group.

    Raises:
        TypeError: they are another backend's.
    """
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise TypeError(
            f"pg_options of type {type(options).__qualname__}: backend zcomm takes "
            "zcomm.torch.Options"
        )
    return options
