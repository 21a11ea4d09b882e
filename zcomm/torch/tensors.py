"""What torch gives to an operation, made into what a communicator takes: reductions, dtypes, lists.

Moving bytes needs no arithmetic, so that every dtype of torch can be moved: one that zcomm does not
know travels as bytes. Sums of booleans are what they are in torch's other backends: a logical or.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zcomm.arrays import ITEMSIZE
from zcomm.layout import Layout, Segment

_OPS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.BAND, "and"),
    (dist.ReduceOp.BOR, "or"),
    (dist.ReduceOp.BXOR, "xor"),
)
_OF_BOOL = {"sum": "or", "max": "or", "product": "and", "min": "and"}


def reduction(op: Any, dtype: torch.dtype) -> tuple[str, float | None]:
    """Return zcomm's name of a ``ReduceOp``, and the factor of a PREMUL_SUM.

    Raises:
        ValueError: torch has the reduction, zcomm has not.
    """
    if op == dist.ReduceOp.PREMUL_SUM:
        return "sum", _factor(op)
    for known, name in _OPS:
        if op == known:
            return (_OF_BOOL.get(name, name) if dtype == torch.bool else name), None
    raise ValueError(f"ReduceOp {op}: possible are {', '.join(str(known) for known, _ in _OPS)}")


def _factor(op: Any) -> float:
    """Return the factor of a PREMUL_SUM, which torch tells only who pickles the ReduceOp."""
    return float(op.__getstate__()[1])


def moved(x: torch.Tensor) -> torch.Tensor:
    """Return a view of a dense tensor in a dtype that zcomm sends.

    Raises:
        TypeError: a sparse or quantised tensor.
    """
    if x.layout is not torch.strided or x.is_quantized:
        raise TypeError(f"tensor of layout {x.layout}, dtype {x.dtype}: possible are dense ones")
    x = x.detach()
    if str(x.dtype).removeprefix("torch.") in ITEMSIZE:
        return x
    return torch.view_as_real(x) if x.is_complex() else x.view(torch.uint8)


def flat(x: torch.Tensor) -> torch.Tensor:
    """Return the elements as one dimension: the same memory where they are contiguous."""
    return moved(x).reshape(-1)


class Target:
    """A one-dimensional contiguous tensor to be written, for one of any strides."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = moved(x)
        direct = self._x.is_contiguous() and not self._x.is_conj() and not self._x.is_neg()
        self.flat = self._x.view(-1) if direct else self._x.resolve_conj().resolve_neg().reshape(-1)
        self._direct = direct

    def deliver(self) -> None:
        """Copy the elements to where they belong, unless they are there."""
        if not self._direct:
            self._x.copy_(self.flat.view(self._x.shape))


def uneven(dtype: str, numels: Sequence[int]) -> Layout:
    """Return the layout of shards of these lengths, one after the other."""
    shards, start = [], 0
    for numel in numels:
        shards.append((Segment(start, numel),))
        start += numel
    return Layout(dtype, tuple(shards))


def name_of(x: torch.Tensor) -> str:
    """Return the dtype of a tensor as zcomm writes it."""
    return str(x.dtype).removeprefix("torch.")


def require_numel(operation: str, what: str, given: int, expected: int, how: str) -> None:
    """Check a number of elements.

    Raises:
        ValueError: it is another one; both are in the message.
    """
    if given != expected:
        raise ValueError(f"{operation}: {what} of {given} elements, expected {expected} ({how})")


def require_same_dtype(operation: str, *tensors: torch.Tensor) -> None:
    """Check that tensors have one dtype.

    Raises:
        TypeError: they have several.
    """
    dtypes = sorted({name_of(x) for x in tensors})
    if len(dtypes) > 1:
        raise TypeError(f"{operation}: tensors of {' and '.join(dtypes)}, expected one dtype")
