"""From the caller's arrays to *items*: checked shapes and dtypes, views, layouts.

An item also knows what to copy back where the caller's array could not be written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from zcomm.arrays import (
    FLOATING,
    HALF,
    Memory,
    View,
    address,
    assign,
    cast,
    contiguous,
    copied,
    dtype_name,
    empty,
    is_contiguous,
    is_torch,
    overlap,
    view,
    zeros,
)
from zcomm.kinds import kind_of
from zcomm.layout import Layout

INTEGER_OPS = ("and", "or", "xor")
OPS = ("sum", "avg", "min", "max", "product", *INTEGER_OPS)


@dataclass(frozen=True)
class Item:
    """One array of a call: its shard and its full form, which of their segments belong to whom.

    ``copies`` are (target, source) pairs to assign after the operation, where the caller's array
    could not be written in place.
    """

    shard: View
    full: View
    layout: Layout
    copies: tuple[tuple[Any, Any], ...] = ()

    def deliver(self) -> None:
        """Copy results to where the caller wants them."""
        for target, source in self.copies:
            assign(target, source)

    @property
    def memories(self) -> tuple[Memory, ...]:
        """Where the operation reads and writes."""
        return self.shard.memory, self.full.memory

    @property
    def arrays(self) -> list[Any]:
        """Whose memory the operation reads and writes."""
        copied = [array for pair in self.copies for array in pair]
        return [self.shard.array, self.full.array, *copied]


def as_list(x: Any) -> list[Any]:
    """Return the arrays of an argument that is one array or several."""
    return list(x) if isinstance(x, list | tuple) else [x]


def gather_items(shard: Any, out: Any, rank: int, size: int) -> tuple[list[Item], Any]:
    """Return the items of an all_gather of even shards, and what the call returns.

    A shard may lie anywhere in ``out``; where it is not in its own place it is copied first.
    """
    items, results = [], []
    for one, place in zip(as_list(shard), _places(shard, out), strict=True):
        dtype = dtype_name(one)
        value = contiguous(one)
        shape = (size,) if value.ndim == 0 else (size * value.shape[0], *value.shape[1:])
        result, target = _output(value, place, shape, dtype)
        source, full = view(value), view(target)
        if not _apart(source, full, rank):
            source = view(copied(value))
        layout = Layout.even(dtype, source.numel * size, size)
        items.append(Item(source, full, layout, _copy_back(result, target)))
        results.append(result)
    return items, results if isinstance(shard, list | tuple) else results[0]


def reduce_items(full: Any, out: Any, rank: int, size: int) -> tuple[list[Item], Any]:
    """Return the items of a reduce_scatter into even shards, and what the call returns.

    ``out`` may lie anywhere in the input; where it is not the own shard the input is copied first.
    """
    items, results = [], []
    for one, place in zip(as_list(full), _places(full, out), strict=True):
        dtype = dtype_name(one)
        value = contiguous(one)
        source = view(value)
        result, target = _output(
            value, place, _shard_shape(tuple(value.shape), source.numel, size), dtype
        )
        shard = view(target)
        if not _apart(shard, source, rank):
            source = view(copied(value))
        layout = Layout.even(dtype, source.numel, size)
        items.append(Item(shard, source, layout, _copy_back(result, target)))
        results.append(result)
    return items, results if isinstance(full, list | tuple) else results[0]


def layout_items(
    shards: Sequence[Any], fulls: Sequence[Any], layouts: Sequence[Layout], rank: int, size: int
) -> list[Item]:
    """Return the items of arrays whose layouts the caller gives.

    Raises:
        ValueError: when the lists differ in length, or an array does not fit its layout.
    """
    if not len(shards) == len(fulls) == len(layouts):
        raise ValueError(
            f"{len(shards)} shards, {len(fulls)} fulls and {len(layouts)} layouts: as many of each"
        )
    items = []
    for shard, full, layout in zip(shards, fulls, layouts, strict=True):
        item = Item(view(shard), view(full), layout)
        _check_fit(item, rank, size)
        items.append(item)
    return items


def _check_fit(item: Item, rank: int, size: int) -> None:
    shard, full, layout = item.shard, item.full, item.layout
    if len(layout.shards) != size:
        raise ValueError(
            f"layout of {len(layout.shards)} shards: the communicator has {size} ranks"
        )
    possible = (layout.dtype, "float32") if layout.dtype in HALF else (layout.dtype,)
    if shard.dtype not in possible or full.dtype not in possible:
        raise ValueError(
            f"shard of {shard.dtype} and full array of {full.dtype}: the layout is "
            f"{layout.dtype}, possible are {', '.join(possible)}"
        )
    if shard.numel < layout.shard_numel(rank) or full.numel < layout.extent:
        raise ValueError(
            f"shard of {shard.numel} elements and full array of {full.numel}: "
            f"the layout needs {layout.shard_numel(rank)} and {layout.extent}"
        )


def narrow_gather(item: Item) -> Item:
    """Let a float64 item of a quantised gather travel as float32: codecs read no wider type."""
    if item.layout.dtype != "float64":
        return item
    shard, full = item.shard.array, item.full.array
    narrow = zeros(full, full.shape, "float32")
    layout = Layout("float32", item.layout.shards)
    return Item(view(cast(shard, "float32")), view(narrow), layout, ((full, narrow), *item.copies))


def narrow_reduce(item: Item) -> Item:
    """Let a float64 item of a quantised reduction travel as float32."""
    if item.layout.dtype != "float64":
        return item
    shard, full = item.shard.array, item.full.array
    narrow = zeros(shard, shard.shape, "float32")
    layout = Layout("float32", item.layout.shards)
    return Item(view(narrow), view(cast(full, "float32")), layout, ((shard, narrow), *item.copies))


def check_op(op: str, dtypes: Sequence[str]) -> None:
    """Check that every dtype has the reduction.

    Raises:
        ValueError: for an unknown op, or one that a dtype has not.
    """
    if op not in OPS:
        raise ValueError(f"op {op!r} is unknown; possible: {', '.join(OPS)}")
    for dtype in dtypes:
        fractional = dtype in FLOATING or dtype.startswith("complex")
        if op == "avg" and not fractional:
            raise ValueError(
                f"avg of {dtype} has no exact result; possible: sum, and a division of your own"
            )
        if op in INTEGER_OPS and fractional:
            raise ValueError(
                f"{op} works on bits, not on {dtype}; possible: sum, avg, min, max, product"
            )
        if dtype == "bool" and op not in INTEGER_OPS:
            raise ValueError(f"{op} of bool: possible are {', '.join(INTEGER_OPS)}")
        if dtype.startswith("complex") and op in ("min", "max"):
            raise ValueError(
                f"{op} of {dtype}: complex numbers have no order; possible: sum, avg, product"
            )


def all_to_all_item(send: Any, out: Any, size: int) -> tuple[Item, Any]:
    """Return the item of an all_to_all (``full`` to ``shard``), and what the call returns."""
    source_dtype = dtype_name(send)
    if send.ndim == 0 or send.shape[0] % size:
        raise ValueError(
            f"all_to_all of shape {tuple(send.shape)}: dimension 0 must be a multiple of the "
            f"{size} ranks"
        )
    value = contiguous(send)
    source = view(value)
    result, target = _output(value, out, tuple(value.shape), source_dtype)
    layout = Layout.even(source_dtype, source.numel, 1)
    if overlap(source.memory, view(target).memory):
        source = view(copied(value))
    return Item(view(target), source, layout, _copy_back(result, target)), result


def in_place(x: Any) -> Item:
    """Return the item of an array that is reduced in place; its layout is cut by the caller."""
    dtype = dtype_name(x)
    value = contiguous(x)
    whole = view(value)
    return Item(whole, whole, Layout.even(dtype, whole.numel, 1), _copy_back(x, value))


def check_written(x: Any) -> None:
    """Check, before anything is sent, that an array can be written.

    Raises:
        TypeError: it is no array, or a sparse one.
        ValueError: it is read-only, or several of its elements are one (an expanded tensor).
    """
    dtype_name(x)  # refuses what is no dense array
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"array of shape {x.shape} is read-only: it cannot be written")
    if is_torch(x) and any(
        n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True)
    ):
        raise ValueError(
            f"tensor of shape {tuple(x.shape)} and stride {x.stride()}: several of its elements "
            "are one, so it cannot be written"
        )


def all_in_place(x: Any) -> list[Item]:
    """Return the items of arrays that are reduced in place.

    Raises:
        ValueError: two of them have elements in common, or one cannot be written.
    """
    for one in as_list(x):
        check_written(one)
    items = [in_place(one) for one in as_list(x)]
    order = sorted(range(len(items)), key=lambda number: address(items[number].full.memory))
    for first, second in pairwise(order):
        if overlap(items[first].full.memory, items[second].full.memory):
            raise ValueError(
                f"items {min(first, second)} and {max(first, second)} share memory: "
                "each would be reduced into the other"
            )
    return items


def narrow_in_place(item: Item) -> Item:
    """Let a float64 item of a quantised all_reduce travel as float32."""
    if item.layout.dtype != "float64":
        return item
    wide = item.full.array
    narrow = cast(wide, "float32")
    return replace(in_place(narrow), copies=((wide, narrow), *item.copies))


def _apart(shard: View, full: View, rank: int) -> bool:
    """Tell whether a shard lies outside the full array, or is a rank's in it."""
    here = address(full.memory) + rank * shard.memory.size
    same = address(shard.memory) == here and shard.dtype == full.dtype
    return same or not overlap(shard.memory, full.memory)


def _places(given: Any, out: Any) -> list[Any]:
    inputs = as_list(given)
    if out is None:
        return [None] * len(inputs)
    places = as_list(out)
    if len(places) != len(inputs):
        raise ValueError(
            f"{len(inputs)} inputs and {len(places)} outputs: one output for each input"
        )
    return places


def _shard_shape(shape: tuple[int, ...], numel: int, size: int) -> tuple[int, ...]:
    if shape and shape[0] % size == 0:
        return (shape[0] // size, *shape[1:])
    if numel % size:
        raise ValueError(
            f"reduce_scatter of shape {shape} ({numel} elements): not divisible among {size} ranks"
        )
    return (numel // size,)


def _output(like: Any, out: Any, shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
    if out is None:
        out = empty(like, shape)
    if kind_of(out) is not kind_of(like):
        raise TypeError(
            f"out is a {type(out).__name__} for an input that is a {type(like).__name__}"
        )
    given = dtype_name(out)
    check_written(out)
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}: the result has shape {shape}")
    if given != dtype and not (dtype in HALF and given == "float32"):
        raise ValueError(
            f"out is {given}: the result is {dtype}" + (" or float32" if dtype in HALF else "")
        )
    return out, out if is_contiguous(out) else empty(out, shape)


def _copy_back(result: Any, target: Any) -> tuple[tuple[Any, Any], ...]:
    return () if target is result or _same_memory(target, result) else ((result, target),)


def _same_memory(a: Any, b: Any) -> bool:
    if is_torch(a):
        return bool(a.data_ptr() == b.data_ptr()) and is_contiguous(b)
    return a is b
