"""The calls of the communicator that a case stands for, and the arrays that they work on.

Word: the *source* of a case is what a rank puts in; for operations in place it is also where the
result is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.collectives.cases import REDUCTIONS, Case, DataType
from benchmarks.collectives.inputs import Array
from zcomm import Communicator

Perform = Callable[[Communicator, Case, torch.Tensor, torch.Tensor | None], None]


def perform(comm: Communicator, case: Case, source: torch.Tensor, out: torch.Tensor | None) -> None:
    """Run the operation of ``case`` once. ``out`` is None for operations in place."""
    how: dict[str, Any] = {}
    if case.operation.takes_codec:
        how = {"codec": case.codec, "algorithm": case.algorithm}
    if case.op is not None:
        how["op"] = REDUCTIONS[case.op]
    if case.root is not None:
        how["root"] = case.root
    function = getattr(comm, case.operation.name)
    if case.operation.in_place:
        function(source, **how)
    else:
        function(source, out, **how)


def source_span(case: Case, rank: int) -> tuple[int, int]:
    """Return which elements of the whole buffer ``rank`` puts in: all, or its chunk to gather."""
    if case.operation.name == "all_gather":
        return rank * case.count, (rank + 1) * case.count
    return 0, case.numel


def output_numel(case: Case) -> int:
    """Return the elements of one rank's result."""
    return case.count if case.operation.name == "reduce_scatter" else case.numel


def to_tensor(values: Array, dtype: DataType) -> torch.Tensor:
    """Return values in their carrier type as a tensor of ``dtype``."""
    return torch.from_numpy(np.array(values, dtype.carrier)).to(dtype.torch)


def to_values(tensor: torch.Tensor, dtype: DataType) -> Array:
    """Return a tensor's values in the carrier type, which holds all of them exactly."""
    return (tensor.float() if dtype.name == "bfloat16" else tensor).numpy()


def poisoned(case: Case) -> torch.Tensor | None:
    """Return an output full of what no operation may leave there, or None for one in place."""
    if case.operation.in_place:
        return None
    poison = torch.nan if case.dtype.floating else torch.iinfo(case.dtype.torch).max
    return torch.full((output_numel(case),), poison, dtype=case.dtype.torch)
