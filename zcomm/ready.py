"""Calls made ready: what a call of one signature needs is worked out once and kept.

A *signature* is the operation, its options, and the type, dtype and shape of its array. A small
call that is kept copies the array into the own payload, trades, and copies or reduces payloads into
the result: a few microseconds less than the same through items, views and plans. A large one sends
its header at once and has its plan at hand. What travels and what comes out are those of
:mod:`zcomm.collectives.small` and of the large algorithms, so that ranks may differ in which way
they take: a call is made ready for contiguous arrays in host memory, of NumPy and torch.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zcomm.arrays import ITEMSIZE, View, dtype_name
from zcomm.codecs import kernels
from zcomm.collectives import all_gather, reduce_scatter
from zcomm.collectives.small import Table, fits, reduces, whole
from zcomm.collectives.wire import Reduction, nested_reduce
from zcomm.plan import AllReduce, Plan, WireFormat
from zcomm.seeds import Draws

Call = Callable[..., Any]

NO_DRAWS = Draws(0)
"""For plans that draw nothing."""

MOST = 1024
"""Signatures that are kept; all are forgotten when there are more."""


class _Ready(NamedTuple):
    """A call; the large ones, which work on the caller's memory, want arrays that lie apart."""

    fits: Callable[[Any], bool]
    call: Call
    address: Callable[[Any], int] | None = None

    def takes(self, x: Any, out: Any) -> bool:
        """Tell whether the call is right for these arrays, wherever they lie."""
        if not self.fits(x):
            return False
        if out is None:
            return True
        return self.fits(out) and (self.address is None or self._apart(x, out))

    def _apart(self, x: Any, out: Any) -> bool:
        assert self.address is not None
        start, other = self.address(x), self.address(out)
        return bool(start + x.nbytes <= other or other + out.nbytes <= start)


class Shelf:
    """The calls that one communicator has ready."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._ready: dict[Any, _Ready] = {}

    def find(self, x: Any, how: tuple[Any, ...], out: Any = None) -> Call | None:
        """Return the call for these arrays and options; None: there is none yet, or none ever."""
        try:
            ready = self._ready.get(_signature(x, how, out))
        except (AttributeError, TypeError):  # a list of arrays, or an option that is one
            return None
        if ready is None or not ready.takes(x, out):
            return None
        return ready.call

    def keep_all_reduce(
        self, x: Any, how: tuple[Any, ...], words: str, plans: AllReduce, reduction: Reduction
    ) -> None:
        """Make ready the all_reduce of arrays like ``x``."""
        if reduces(plans) and len(plans.scatter.layouts) == 1:
            self._keep(x, how, partial(_all_reduce, self._table, words, plans, reduction))

    def keep_all_gather(
        self, x: Any, how: tuple[Any, ...], out: Any, words: str, plan: Plan
    ) -> None:
        """Make ready the all_gather of arrays like ``x`` into arrays like ``out``."""
        if not fits(plan) or plan.quantised or not _is_one_plain_item(x, plan):
            return
        if out is None or (type(out) is type(x) and out.dtype == x.dtype):
            self._keep(x, how, partial(_all_gather, self._table, words), out)

    def keep_broadcast(self, x: Any, how: tuple[Any, ...], words: str, root: int) -> None:
        """Make ready the broadcast of arrays like ``x``."""
        self._keep(x, how, partial(_broadcast, self._table, words, root))

    def keep_large_gather(
        self, x: Any, how: tuple[Any, ...], out: Any, words: str, plan: Plan
    ) -> None:
        """Make ready the all_gather, in pieces, of arrays like ``x`` into arrays like ``out``."""
        if _is_plain_pair(x, out) and _is_one_plain_item(x, plan):
            dtype = dtype_name(x if out is None else out)
            kept = self._table, words, plan, dtype
            self._keep(x, how, partial(_large_gather, *kept), out, large=True)

    def keep_large_reduction(
        self, x: Any, how: tuple[Any, ...], out: Any, words: str, plan: Plan, reduction: Reduction
    ) -> None:
        """Make ready the reduce_scatter, in pieces, of arrays like ``x`` into arrays like ``out``.

        Without ``out`` there is none: the shape of the result is worked out at every call.
        """
        if out is not None and _is_plain_pair(x, out) and _is_one_plain_item(x, plan):
            kept = self._table, words, plan, reduction, dtype_name(out)
            self._keep(x, how, partial(_large_reduction, *kept), out, large=True)

    def _keep(
        self,
        x: Any,
        how: tuple[Any, ...],
        make: Callable[[_Port], Call],
        out: Any = None,
        *,
        large: bool = False,
    ) -> None:
        if type(x) is np.ndarray:
            port: _Port = _NumpyPort(x)
        elif _is_plain_tensor(x):
            port = _TorchPort(x)
        else:
            return
        if port.nbytes == 0 or not port.fits(x):
            return
        signature = _signature(x, how, out)
        try:
            hash(signature)
        except TypeError:  # an option that is a list
            return
        if len(self._ready) >= MOST:
            self._ready.clear()
        self._ready[signature] = _Ready(port.fits, make(port), port.address if large else None)


def _signature(x: Any, how: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
    if out is None:
        return how, type(x), x.dtype, x.shape
    return how, type(x), x.dtype, x.shape, type(out), out.dtype, out.shape


def _is_plain_pair(x: Any, out: Any) -> bool:
    return out is None or type(out) is type(x)


def _is_one_plain_item(x: Any, plan: Plan) -> bool:
    """Tell whether a plan moves one array in its own dtype, and draws nothing."""
    if isinstance(x, list | tuple) or len(plan.layouts) != 1 or plan.draws:
        return False
    return plan.layouts[0].dtype == dtype_name(x)


def _is_plain_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(x) in (torch.Tensor, torch.nn.Parameter)


class _NumpyPort:
    """Ways in and out of NumPy arrays of one dtype and shape."""

    def __init__(self, x: npt.NDArray[Any]) -> None:
        self.nbytes = x.nbytes
        self._dtype = x.dtype
        self._shape = x.shape

    @staticmethod
    def fits(x: npt.NDArray[Any]) -> bool:
        """Tell whether the elements lie one after the other, and may be written."""
        return x.flags.carray

    @staticmethod
    def address(x: npt.NDArray[Any]) -> int:
        """Return where the elements begin."""
        return int(x.ctypes.data)

    def viewer(self, dtype: str, numel: int) -> Callable[[npt.NDArray[Any]], View]:
        """Return what makes views of contiguous arrays of a dtype."""
        return lambda x: View(x.reshape(-1).view(np.uint8), dtype)

    def empty(self, rows: int) -> npt.NDArray[Any]:
        """Allocate as much as ``rows`` of these arrays, one after the other."""
        return np.empty(_stacked(self._shape, rows), self._dtype)

    def reader(self, memory: npt.NDArray[np.uint8]) -> Call:
        """Return what copies an array into ``memory``."""
        typed = self._typed(memory)

        def read(x: npt.NDArray[Any]) -> None:
            typed[...] = x

        return read

    def writer(self, memory: npt.NDArray[np.uint8]) -> Call:
        """Return what copies ``memory`` into an array."""
        typed = self._typed(memory)

        def write(x: npt.NDArray[Any]) -> None:
            x[...] = typed

        return write

    def gatherer(self, rows: npt.NDArray[np.uint8]) -> Call:
        """Return what makes one array of all ``rows``."""
        typed = self._typed(rows, len(rows))
        shape = _stacked(self._shape, len(rows))

        def gather(out: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
            made = np.empty(shape, self._dtype) if out is None else out
            made.reshape(typed.shape)[...] = typed
            return made

        return gather

    def _typed(self, memory: npt.NDArray[np.uint8], *rows: int) -> npt.NDArray[Any]:
        # Rows are apart by more than they hold, so the elements of each are cut out first.
        return memory[..., : self.nbytes].view(self._dtype).reshape((*rows, *self._shape))


class _TorchPort:
    """Ways in and out of torch tensors of one dtype and shape, by address."""

    def __init__(self, x: Any) -> None:
        self.nbytes = x.numel() * x.element_size()
        self._dtype = x.dtype
        self._shape = tuple(x.shape)
        self._bytes = ctypes.c_ubyte * self.nbytes
        self._last: tuple[int, npt.NDArray[np.uint8]] = 0, np.empty(0, np.uint8)

    def _memory(self, x: Any) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor, for as long as it lives: a call reads and writes them.

        The last ones are kept, by their address: calls tend to come with the same tensor again.
        """
        address = x.data_ptr()
        kept, memory = self._last
        if kept != address:
            memory = np.frombuffer(self._bytes.from_address(address), np.uint8)
            self._last = address, memory
        return memory

    @staticmethod
    def fits(x: Any) -> bool:
        """Tell whether the elements lie one after the other, in host memory."""
        return bool(x.is_cpu and x.is_contiguous() and not x.is_neg())

    @staticmethod
    def address(x: Any) -> int:
        """Return where the elements begin."""
        return int(x.data_ptr())

    def viewer(self, dtype: str, numel: int) -> Callable[[Any], View]:
        """Return what makes views of contiguous tensors of a dtype and so many elements.

        By address: each operation of torch takes long where the caches hold something else. The
        memory keeps the tensor alive.
        """
        kind = ctypes.c_ubyte * (numel * ITEMSIZE[dtype])

        def view(x: Any) -> View:
            memory: Any = kind.from_address(x.data_ptr())
            memory.owner = x
            return View(np.frombuffer(memory, np.uint8), dtype)

        return view

    def empty(self, rows: int) -> Any:
        """Allocate as much as ``rows`` of these tensors, one after the other."""
        return sys.modules["torch"].empty(
            _stacked(self._shape, rows), dtype=self._dtype, device="cpu"
        )

    def reader(self, memory: npt.NDArray[np.uint8]) -> Call:
        """Return what copies a tensor into ``memory``."""
        target, find = memory[: self.nbytes], self._memory

        def read(x: Any) -> None:
            target[...] = find(x)

        return read

    def writer(self, memory: npt.NDArray[np.uint8]) -> Call:
        """Return what copies ``memory`` into a tensor."""
        source, find = memory[: self.nbytes], self._memory

        def write(x: Any) -> None:
            find(x)[...] = source

        return write

    def gatherer(self, rows: npt.NDArray[np.uint8]) -> Call:
        """Return what makes one tensor of all ``rows``."""
        torch, shape, nbytes = sys.modules["torch"], _stacked(self._shape, len(rows)), self.nbytes
        addresses = [row.ctypes.data for row in rows]

        def gather(out: Any) -> Any:
            made = torch.empty(shape, dtype=self._dtype, device="cpu") if out is None else out
            start = made.data_ptr()
            for number, address in enumerate(addresses):
                ctypes.memmove(start + number * nbytes, address, nbytes)
            return made

        return gather


_Port = _NumpyPort | _TorchPort


def _stacked(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    return (rows * shape[0], *shape[1:]) if shape else (rows,)


def _all_reduce(
    table: Table, words: str, plans: AllReduce, reduction: Reduction, port: _Port
) -> Call:
    guard, nbytes, said = table.guard, port.nbytes, table.guard.said(words)
    result = np.empty(nbytes, np.uint8)
    read, write = port.reader(table.own), port.writer(result)
    reduce = _reducer(table, plans, reduction, result)
    tally = table.tally("all_reduce", nbytes, nbytes)

    def call(x: Any) -> Any:
        read(x)
        guard.begin(words, said, nbytes)
        tally.calls += 1
        guard.end(words)
        reduce()
        write(x)
        return x

    return call


def _reducer(
    table: Table, plans: AllReduce, reduction: Reduction, result: npt.NDArray[np.uint8]
) -> Callable[[], object]:
    """Return what reduces the payloads of all ranks into ``result``."""
    dtype, nesting = plans.scatter.layouts[0].dtype, plans.scatter.nesting
    parts = [table.row(rank)[: result.size] for rank in range(table.channel.size)]
    wire, place = WireFormat(dtype), whole(View(result, dtype))
    codec = reduction.carrier(wire)
    if codec is not None and all(len(level.groups) in (1, len(parts)) for level in nesting.levels):
        where = place.starts, place.lengths, result, dtype, reduction.divisor
        return kernels().prepare_reduce(codec, parts, *where)
    formats = wire, plans.scatter.partials[0]
    return partial(nested_reduce, nesting, formats, parts, place, reduction)


def _all_gather(table: Table, words: str, port: _Port) -> Call:
    guard, nbytes, said = table.guard, port.nbytes, table.guard.said(words)
    read, gather = port.reader(table.own), port.gatherer(table.guard.payloads)
    tally = table.tally("all_gather", nbytes, nbytes)

    def call(x: Any, out: Any) -> Any:
        read(x)
        guard.begin(words, said, nbytes)
        tally.calls += 1
        guard.end(words)
        return gather(out)

    return call


def _large_gather(table: Table, words: str, plan: Plan, out_dtype: str, port: _Port) -> Call:
    channel, guard, rows = table.channel, table.guard, plan.topology.size
    layout = plan.layouts[0]
    shard = port.viewer(layout.dtype, layout.shard_numel(channel.rank))
    full = port.viewer(out_dtype, layout.numel)
    execute = all_gather.kept(channel, plan, (layout.dtype, out_dtype))

    def call(x: Any, out: Any) -> Any:
        guard.open(words)
        made = port.empty(rows) if out is None else out
        execute((shard(x),), (full(made),), NO_DRAWS)
        guard.settle()
        return made

    return call


def _large_reduction(
    table: Table, words: str, plan: Plan, reduction: Reduction, out_dtype: str, port: _Port
) -> Call:
    channel, guard, layout = table.channel, table.guard, plan.layouts[0]
    full = port.viewer(layout.dtype, layout.numel)
    shard = port.viewer(out_dtype, layout.shard_numel(channel.rank))
    execute = reduce_scatter.kept(channel, plan, (layout.dtype, out_dtype), reduction)

    def call(x: Any, out: Any) -> Any:
        guard.open(words)
        execute((full(x),), (shard(out),), NO_DRAWS)
        guard.settle()
        return out

    return call


def _broadcast(table: Table, words: str, root: int, port: _Port) -> Call:
    guard, nbytes, said = table.guard, port.nbytes, table.guard.said(words)
    read, write = port.reader(table.own), port.writer(table.row(root))
    tally = table.tally("broadcast", nbytes, nbytes)

    def send(x: Any) -> Any:
        read(x)
        guard.begin(words, said, nbytes)
        tally.calls += 1
        guard.end(words)
        return x

    def receive(x: Any) -> Any:
        guard.begin(words, said, 0)
        guard.end(words)
        write(x)
        return x

    return send if table.channel.rank == root else receive
