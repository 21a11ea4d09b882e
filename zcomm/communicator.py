"""The communicator: the object that users hold.

It turns arrays into views, arguments into a plan, and runs the plan's executor on the rank's stream
of operations. Sub-communicators (:meth:`Communicator.level`, :meth:`~Communicator.rail`,
:meth:`~Communicator.split`) are the same transport seen through a list of ranks; they share stream,
counters and level indices with their parent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from topology import Topology
from zcomm import arguments
from zcomm.arguments import Item
from zcomm.arrays import View, view
from zcomm.collectives import plain, small
from zcomm.collectives.all_gather import all_gather
from zcomm.collectives.all_reduce import all_reduce
from zcomm.collectives.channel import Channel, in_words
from zcomm.collectives.reduce_scatter import reduce_scatter
from zcomm.collectives.wire import Reduction
from zcomm.errors import OffloadError, ZcommError
from zcomm.guard import PAYLOAD_NBYTES, Guard, check_sizes
from zcomm.hops import CodecSpec
from zcomm.issue import Issuer
from zcomm.layout import Layout
from zcomm.plan import Plan
from zcomm.planner import Planner
from zcomm.ready import Shelf
from zcomm.seeds import Draws, check_seed
from zcomm.traffic import Clock, Traffic
from zcomm.transports.base import Transport
from zcomm.tuning import Tuning, assume
from zcomm.work import Stream, Work


class Communicator:
    """A group of ranks that communicate.

    Made by :func:`zcomm.init` or :func:`zcomm.run_local`. Every collective is called by all ranks
    of the group, in one order. Arrays may be torch tensors (CPU or CUDA), NumPy or CuPy arrays, of
    any shape and any number of elements; results are of the caller's kind and lie where its arrays
    do, all of one call in one place. With ``async_op=True`` an operation returns a
    :class:`~zcomm.work.Work` at once; leave its arrays alone until ``wait()``.

    ``codec`` is None, a name, a :class:`~zcomm.codecs.Codec`, or one per level of the topology,
    innermost first. ``algorithm`` is auto, flat, hierarchical or ordered, where auto takes what is
    faster for the size (:meth:`plans`), always the same for calls of one kind. Tensors of fewer
    than ``min_numel`` elements travel exactly.
    """

    def __init__(
        self,
        channel: Channel,
        stream: Stream,
        *,
        min_numel: int,
        tuning: Tuning | None = None,
        name: str = "world",
        owner: Transport | None = None,
        parent: Communicator | None = None,
    ) -> None:
        self.name = name
        self._owner = owner
        self._parent = parent
        self.min_numel = min_numel
        self._channel = channel
        self._stream = stream
        self._guard = Guard(channel, name)
        self._table = small.Table(channel, self._guard)
        self._shelf = Shelf(self._table)
        self._issuer = Issuer(stream, self._guard, channel)
        tuning = tuning or assume(channel.topology, channel.transport.name)
        self._planner = Planner(name, channel.rank, tuning)
        self._children: dict[tuple[str, int], Communicator] = {}
        self._splits = 0
        self._closed = False

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self._channel.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._channel.size

    @property
    def topology(self) -> Topology:
        """Who is near whom among these ranks."""
        return self._channel.topology

    @property
    def device(self) -> str:
        """Where the arrays of this rank belong, as torch names it: "cpu" or "cuda:0"."""
        return "cpu" if self._channel.device is None else self._channel.device.name

    @property
    def closed(self) -> bool:
        """Tell whether :meth:`close` was called, here or on what this is a part of."""
        return self._closed or (self._parent is not None and self._parent.closed)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent by this rank, all communicators of the process together."""
        return self._channel.traffic

    @property
    def clock(self) -> Clock:
        """Seconds spent encoding, communicating and decoding by this rank."""
        return self._channel.clock

    def level(self, level: int) -> Communicator:
        """Return the communicator of this rank's group at a level (the last is all)."""
        return self._child("level", level, self.topology.group(level, self.rank))

    def rail(self, level: int) -> Communicator:
        """Return the communicator of the ranks that differ only in their coordinate at a level."""
        return self._child("rail", level, self.topology.rail(level, self.rank))

    def split(self, color: int, key: int) -> Communicator:
        """Return the communicator of the ranks of the same ``color``, ordered by (key, rank)."""
        rows = self.all_gather_values(np.array([color, key], np.int64))
        ranks = [rank for rank in range(self.size) if rows[rank, 0] == color]
        ranks.sort(key=lambda rank: (int(rows[rank, 1]), rank))
        self._splits += 1
        return self._subgroup(f"{self.name}/split{self._splits}.{color}", tuple(ranks))

    def among(self, ranks: Sequence[int]) -> Communicator:
        """Return the communicator of some ranks, in this order; all of them call it.

        Nothing is sent, so that other ranks need not know; every call returns a new one.

        Raises:
            ValueError: ranks that are not of this group, or among which this one is not.
        """
        chosen = tuple(ranks)
        if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(self.size)):
            raise ValueError(f"ranks {chosen}: different ones of 0 to {self.size - 1}")
        if self.rank not in chosen:
            raise ValueError(f"rank {self.rank} is not among ranks {chosen}")
        return self._subgroup(f"{self.name}/{in_words(chosen)}", chosen)

    @property
    def tuning(self) -> Tuning:
        """What is known of the speed of this job; ``algorithm="auto"`` follows from it."""
        return self._planner.tuning

    def plans(
        self,
        operation: str,
        numel: int,
        dtype: str = "bfloat16",
        *,
        codec: CodecSpec = None,
        algorithm: str = "auto",
    ) -> tuple[Plan, ...]:
        """Return the plans that run for one tensor, one after the other; ``how`` says how.

        ``numel`` counts the whole tensor: what all_gather returns, what the others are given.
        ``min_numel`` is not looked at. An all_reduce may be two plans.

        Raises:
            ValueError: an operation other than all_gather, reduce_scatter and all_reduce; a number
                of elements that the ranks do not divide (all_reduce takes any).
        """
        return self._planner.executed(operation, (dtype, numel), codec, algorithm)

    def all_gather(
        self,
        shard: Any,
        out: Any = None,
        *,
        codec: CodecSpec = None,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Any:
        """Gather the shards of all ranks: (a, …) -> (W·a, …), a 0-d array -> (W,).

        ``shard`` may be a list: one message, each item in its own dtype, and a list comes back.
        ``out`` is written where given; it may be float32 for 16-bit shards.

        Raises:
            ValueError: shapes or codec that do not fit; the message holds both numbers.
            CollectiveMismatch: on all ranks, when they called different things.
        """
        how = "all_gather", codec, algorithm, self.min_numel
        ready = self._shelf.find(shard, how, out)
        if ready is not None:
            self._channel.calls.skip()
            return self._run_ready(ready, async_op, shard, out)
        items, result = arguments.gather_items(shard, out, self.rank, self.size)
        made, items = self._planned_gather(items, codec, algorithm, self.min_numel)
        words = self._planner.describe(made)
        if small.fits(made):
            self._shelf.keep_all_gather(shard, how, out, words, made)
        else:
            self._shelf.keep_large_gather(shard, how, out, words, made)
        return self._gather(made, items, result, words, async_op, self._draws())

    def reduce_scatter(
        self,
        full: Any,
        out: Any = None,
        *,
        op: str = "sum",
        codec: CodecSpec = None,
        algorithm: str = "auto",
        reduce_dtype: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce over all ranks and keep the own part: (a, …) -> (a/W, …).

        Where W divides the elements but not dimension 0, the result is 1-D.
        16-bit floating point is summed in float32; ``op="avg"`` divides once, at the end.
        ``reduce_dtype="float32"`` keeps partial sums of bfloat16 in float32 between levels.
        ``full`` and ``out`` may be lists, as in :meth:`all_gather`.

        Raises:
            ValueError: elements that W does not divide, an op or a codec that the dtype has not.
            CollectiveMismatch: on all ranks, when they called different things.
        """
        options = op, codec, algorithm, reduce_dtype, self.min_numel
        how = "reduce_scatter", *options
        ready = None if out is None else self._shelf.find(full, how, out)
        if ready is not None:
            self._channel.calls.skip()
            return self._run_ready(ready, async_op, full, out)
        items, result = arguments.reduce_items(full, out, self.rank, self.size)
        keep = partial(self._shelf.keep_large_reduction, full, how, out)
        return self._reduce(items, result, *options, async_op, "", self._draws(), keep)

    def all_reduce(
        self,
        x: Any,
        *,
        op: str = "sum",
        codec: CodecSpec = None,
        algorithm: str = "auto",
        reduce_dtype: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce over all ranks, in place, and return ``x``.

        ``op`` is sum, avg, min, max, product, and, or, xor.
        All ranks end with the same bits. The gather that follows the reduction uses the outermost
        codec. ``x`` may be a list: one message.

        Raises:
            ValueError: an op or a codec that the dtype does not allow.
            CollectiveMismatch: on all ranks, when they called different things.
        """
        how = "all_reduce", op, algorithm, reduce_dtype
        ready = self._shelf.find(x, how) if codec is None else None
        if ready is not None:
            self._channel.calls.skip()
            return self._run_ready(ready, async_op, x)
        items = arguments.all_in_place(x)
        arguments.check_op(op, [item.layout.dtype for item in items])
        codecs = self._planner.codecs("all_reduce", codec, _layouts(items), self.min_numel, op)
        if any(codecs):
            items = [arguments.narrow_in_place(item) for item in items]
        tensors = tuple((item.full.dtype, item.full.numel) for item in items)
        plans = self._planner.all_reduce(tensors, codecs, algorithm, op, reduce_dtype)
        self._planner.announce(plans.executed[0])
        reduction = Reduction(op, self.size if op == "avg" else 1)
        draws = self._draws()

        words = self._planner.describe(plans.scatter, op)
        fulls = [item.full for item in items]
        inline = None
        if small.reduces(plans):
            inline = partial(small.all_reduce, self._table, words, plans, fulls, reduction)
            if codec is None:
                self._shelf.keep_all_reduce(x, how, words, plans, reduction)
        execute = partial(all_reduce, self._channel, plans, fulls, reduction, draws)
        return self._issue(words, execute, items, x, async_op, inline)

    def all_to_all(self, send: Any, out: Any = None, *, async_op: bool = False) -> Any:
        """Send the i-th of W equal parts of dimension 0 to rank i: (W·a, …) -> (W·a, …).

        Raises:
            ValueError: when W does not divide dimension 0.
        """
        item, result = arguments.all_to_all_item(send, out, self.size)
        words = f"all_to_all {item.full.dtype}[{item.full.numel}]"
        execute = partial(plain.all_to_all, self._channel, item.full, item.shard)
        inline = None
        if self.size > 1 and item.full.memory.size // self.size <= PAYLOAD_NBYTES:
            inline = partial(small.all_to_all, self._table, words, item.full, item.shard)
        return self._issue(words, execute, [item], result, async_op, inline)

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """Copy the root's ``x`` to all ranks, in place; return ``x``."""
        how = "broadcast", root
        ready = self._shelf.find(x, how)
        if ready is not None:
            return self._run_ready(ready, async_op, x)
        self._check_peer(root)
        if self.rank != root:
            arguments.check_written(x)
        item = arguments.in_place(x)
        words = f"broadcast {item.full.dtype}[{item.full.numel}] root={root}"
        inline = None
        if self._guard.enabled and item.full.memory.size <= PAYLOAD_NBYTES:
            inline = partial(small.broadcast, self._table, words, item.full, root)
            self._shelf.keep_broadcast(x, how, words, root)
        execute = partial(plain.broadcast, self._channel, item.full, root)
        return self._issue(words, execute, [item], x, async_op, inline)

    def exchange(self, operation: str, sends: Mapping[int, Any], recvs: Mapping[int, Any]) -> None:
        """Send one array to each named rank, and receive one, which is contiguous, from each.

        Every rank calls it, with any ranks and sizes, itself and none included. ``operation`` names
        the call in the handshake, in which all ranks learn all sizes, and in the counters.

        Raises:
            ValueError: a rank that is not of the group, an array that cannot be written in place.
            CollectiveMismatch: on all ranks, when one sends other bytes than its peer receives.
        """
        self._check_open(operation)
        for peer in (*sends, *recvs):
            self._check_peer(peer)
        outgoing = {peer: arguments.in_place(x).full for peer, x in sends.items()}
        incoming = {peer: view(x) for peer, x in recvs.items()}
        if self._guard.enabled:
            rows = self._sizes(operation, outgoing, incoming)
            check_sizes(operation, rows[:, 0], rows[:, 1])
        arrays = [*outgoing.values(), *incoming.values()]
        execute = partial(plain.exchange, self._channel, operation, outgoing, incoming)
        self._issuer.together(execute, arrays)

    def _sizes(
        self, operation: str, sends: Mapping[int, View], recvs: Mapping[int, View]
    ) -> npt.NDArray[np.int64]:
        """Return (W, 2, W): the bytes that every rank sends to, and receives from, every other."""
        own = np.full((2, self.size), -1, np.int64)
        for row, messages in zip(own, (sends, recvs), strict=True):
            for peer, message in messages.items():
                row[peer] = message.memory.size
        return self.all_gather_values(own, operation)

    def send(self, x: Any, peer: int) -> None:
        """Send ``x`` to one rank, which calls :meth:`recv` with an array of the same size."""
        self._check_open("send")
        self._check_peer(peer, other=True)
        item = arguments.in_place(x)
        self._issuer.alone(lambda: plain.send(self._channel, item.full, peer), item.full)

    def recv(self, x: Any, peer: int) -> Any:
        """Receive into ``x``, which is contiguous, what one rank sends; return ``x``."""
        self._check_open("recv")
        self._check_peer(peer, other=True)
        arguments.check_written(x)
        target = view(x)
        self._issuer.alone(lambda: plain.recv(self._channel, target, peer), target)
        return x

    def barrier(self) -> None:
        """Return when all ranks have called."""
        self._check_open("barrier")
        self._issuer.call(self._barrier)

    def _barrier(self) -> None:
        self._guard.check("barrier")
        if not self._guard.enabled:
            plain.barrier(self._channel)

    def refuse(self, error: OffloadError) -> None:
        """Let all ranks raise an error of this one, in the operation that they issue next.

        Returns when they do; ``error.resumable`` says whether they did.
        """
        with contextlib.suppress(ZcommError):  # a job that is broken already
            self._issuer.call(self._guard.refuse, error)

    def enqueue(self, function: Callable[[], None], arrays: Sequence[Any] = ()) -> Work[None]:
        """Run work of this rank in its turn: after all that was issued, before what follows.

        It must call no operation of a communicator. Returns at once. ``arrays`` are those that it
        reads or writes: where they are on a device, what it enqueues there comes in turn as well.
        """
        self._check_open("enqueue")
        return self._issuer.enqueue(function, arrays)

    def all_gather_values(self, values: npt.NDArray[Any], label: str = "") -> npt.NDArray[Any]:
        """Return the control values of all ranks: a NumPy array (n,) -> (W, n).

        For norms, flags and digests: combine the rows in ascending order, and every rank has the
        same bits. ``label`` says in the handshake what they are.
        """
        rows: list[npt.NDArray[Any]] = []

        words = f"{label} values {values.dtype}{list(values.shape)}".lstrip()

        def execute() -> None:
            rows.append(plain.gather_values(self._channel, values))

        def inline() -> None:
            rows.append(small.gather_values(self._table, words, values))

        fits = self.size > 1 and values.nbytes <= PAYLOAD_NBYTES
        self._issue(words, execute, [], None, False, inline if fits else None)
        return rows[0]

    def gather_layout(
        self,
        shards: Sequence[Any],
        fulls: Sequence[Any],
        layouts: Sequence[Layout],
        *,
        codec: CodecSpec = None,
        algorithm: str = "auto",
        min_numel: int | None = None,
        label: str = "",
        seed: int | None = None,
        ready: Callable[[], None] | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gather shards that consist of segments into ``fulls``, where the layouts say.

        ``shards[i]`` holds this rank's segments of layout i, one after the other; it may be longer.
        All items travel in one message per peer and hop. ``label`` names in the handshake what is
        gathered, so that ranks that gather different things of one shape are told so. ``seed``,
        where given, is the one seed of all that this rank encodes with stochastic rounding: the
        same shard and seed give the same codes in every communicator. ``ready`` is called before
        ``shards`` are read, in the operation's turn; it may raise OffloadError, which all ranks
        raise then. Counted as all_gather. Returns ``fulls``.
        """
        draws = self._draws() if seed is None else Draws(check_seed(seed), fixed=True)
        items = arguments.layout_items(shards, fulls, layouts, self.rank, self.size)
        limit = self.min_numel if min_numel is None else min_numel
        made, items = self._planned_gather(items, codec, algorithm, limit)
        words = self._planner.describe(made, label=label)
        return self._gather(made, items, fulls, words, async_op, draws, ready)

    def reduce_layout(
        self,
        fulls: Sequence[Any],
        shards: Sequence[Any],
        layouts: Sequence[Layout],
        *,
        op: str = "avg",
        codec: CodecSpec = None,
        algorithm: str = "auto",
        reduce_dtype: str | None = None,
        min_numel: int | None = None,
        label: str = "",
        seed: int | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce ``fulls`` over all ranks; write this rank's segments, compact, to ``shards``.

        The reverse of :meth:`gather_layout`; ``shards`` may be float32 for 16-bit ``fulls``.
        ``seed``, where given, replaces the communicator's seed and the number of the call in the
        seeds of stochastic rounding. Counted as reduce_scatter. Returns ``shards``.
        """
        draws = self._draws() if seed is None else self._channel.calls.given(check_seed(seed))
        items = arguments.layout_items(shards, fulls, layouts, self.rank, self.size)
        limit = self.min_numel if min_numel is None else min_numel
        how = op, codec, algorithm, reduce_dtype, limit, async_op, label, draws
        return self._reduce(items, shards, *how)

    def reduction_algorithm(
        self,
        layouts: Sequence[Layout],
        *,
        codec: CodecSpec = None,
        reduce_dtype: str | None = None,
        op: str = "avg",
    ) -> str:
        """Return the ``algorithm`` that :meth:`reduce_layout` takes by itself, whatever the size.

        With a codec bits depend on it; named in a call it is the same in every run.
        """
        return self._planner.reduction_algorithm(layouts, codec, op, reduce_dtype)

    def close(self) -> None:
        """Finish what was issued and release the transport; all ranks call it.

        Sub-communicators end with it.
        """
        if self._owner is None:
            self._closed = True
        elif not self._closed:
            self.leave()
            self._owner.close()

    def discard(self) -> None:
        """Release the transport without a handshake; all ranks call it, and are known to be here.

        For a group in which an operation failed: its ranks may be at different calls.
        """
        self._closed = True
        if self._owner is not None:
            self._owner.close()

    def leave(self) -> None:
        """Take leave of the other ranks, which do the same, or all raise CollectiveMismatch.

        Also where an operation ended in its middle: headers travel apart from what it left behind.
        """
        if not self._closed:
            self._closed = True
            self._stream.call(partial(self._guard.check, "leaving the job", patient=True))
            self._stream.raise_unawaited()

    @property
    def was_left(self) -> bool:
        """Whether this rank began to leave in the middle of an operation: the others are in it."""
        return self._channel.health.left

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    def _planned_gather(
        self, items: list[Item], codec: CodecSpec, algorithm: str, min_numel: int
    ) -> tuple[Plan, list[Item]]:
        """Return the plan of an all_gather, and its items as they travel."""
        codecs = self._planner.codecs("all_gather", codec, _layouts(items), min_numel)
        if any(codecs):
            items = [arguments.narrow_gather(item) for item in items]
        made = self._planner.plan(
            "all_gather", [item.layout for item in items], codecs, algorithm, "sum", None
        )
        self._planner.announce(made)
        return made, items

    def _gather(
        self,
        made: Plan,
        items: list[Item],
        result: Any,
        words: str,
        async_op: bool,
        draws: Draws,
        ready: Callable[[], None] | None = None,
    ) -> Any:
        shards, fulls = [item.shard for item in items], [item.full for item in items]
        arrays = made, shards, fulls, draws
        inline = partial(small.all_gather, self._table, words, *arrays)
        execute = partial(all_gather, self._channel, *arrays)
        chosen = inline if small.fits(made) else None
        return self._issue(words, execute, items, result, async_op, chosen, ready)

    def _reduce(
        self,
        items: list[Item],
        result: Any,
        op: str,
        codec: CodecSpec,
        algorithm: str,
        reduce_dtype: str | None,
        min_numel: int,
        async_op: bool,
        label: str,
        draws: Draws,
        keep: Callable[[str, Plan, Reduction], None] | None = None,
    ) -> Any:
        arguments.check_op(op, [item.layout.dtype for item in items])
        codecs = self._planner.codecs("reduce_scatter", codec, _layouts(items), min_numel, op)
        if any(codecs):
            items = [arguments.narrow_reduce(item) for item in items]
        layouts = [item.layout for item in items]
        made = self._planner.plan("reduce_scatter", layouts, codecs, algorithm, op, reduce_dtype)
        self._planner.announce(made)
        reduction = Reduction(op, self.size if op == "avg" else 1)
        words = self._planner.describe(made, op, label)
        if keep is not None and not small.fits(made):
            keep(words, made, reduction)
        fulls, shards = [item.full for item in items], [item.shard for item in items]
        arrays = made, fulls, shards, reduction, draws
        inline = partial(small.reduce_scatter, self._table, words, *arrays)
        execute = partial(reduce_scatter, self._channel, *arrays)
        chosen = inline if small.fits(made) else None
        return self._issue(words, execute, items, result, async_op, chosen)

    def _issue(
        self,
        words: str,
        execute: Callable[[], None],
        items: list[Item],
        result: Any,
        async_op: bool,
        inline: Callable[[], None] | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Any:
        self._check_open(words)
        return self._issuer.issue(words, execute, items, result, async_op, inline, ready)

    def _run_ready(self, ready: Callable[..., Any], async_op: bool, *arrays: Any) -> Any:
        """Run a small call, see :mod:`zcomm.ready`."""
        if self.closed:
            self._check_open("this call")
        if async_op:
            return self._issuer.submit(partial(ready, *arrays))
        return self._issuer.call(ready, *arrays)

    def _draws(self) -> Draws:
        return self._channel.calls.draws()

    def _child(self, kind: str, level: int, ranks: tuple[int, ...]) -> Communicator:
        if (kind, level) not in self._children:
            self._children[kind, level] = self._subgroup(
                f"{self.name}/{kind}{level}.{min(ranks)}", ranks
            )
        return self._children[kind, level]

    def _subgroup(self, name: str, ranks: tuple[int, ...]) -> Communicator:
        channel = replace(
            self._channel,
            ranks=tuple(self._channel.ranks[rank] for rank in ranks),
            rank=ranks.index(self.rank),
            topology=self.topology.restrict(ranks),
        )
        return Communicator(
            channel,
            self._stream,
            min_numel=self.min_numel,
            tuning=self._planner.tuning.restrict(channel.topology),
            name=name,
            parent=self,
        )

    def _check_open(self, words: str) -> None:
        if self.closed:
            raise ZcommError(f"{words}: the communicator is closed")

    def _check_peer(self, rank: int, *, other: bool = False) -> None:
        if not 0 <= rank < self.size or (other and rank == self.rank):
            possible = f"0 to {self.size - 1}" + (f" but {self.rank}, this rank" if other else "")
            raise ValueError(f"rank {rank} is not a peer; possible: {possible}")


def _layouts(items: list[Item]) -> list[Layout]:
    return [item.layout for item in items]
