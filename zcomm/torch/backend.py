# mypy: disable-error-code="override,assignment"
"""The torch.distributed backend "zcomm": a process group whose operations are a communicator's.

torch calls a process group by two ways: ``torch.distributed`` calls the methods of this class, C++
(DDP, functional collectives) calls the same ones through a shell around it. A method that is not
written here would run torch's own, which finds no backend or blocks while it holds Python's lock.
The names of torch 2.11 and 2.12 stand beside those of 2.13.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zcomm.communicator import Communicator
from zcomm.errors import CollectiveTimeout, ZcommError
from zcomm.hops import CodecSpec
from zcomm.torch import operations
from zcomm.torch.identity import Identity
from zcomm.torch.links import Link, connect
from zcomm.torch.options import Options, check
from zcomm.torch.saved import Savings
from zcomm.torch.tensors import reduction
from zcomm.torch.together import Together
from zcomm.torch.works import Handle, Queue

Method = TypeVar("Method", bound=Callable[..., Any])
Tensors = Sequence[torch.Tensor]


def create(opts: Any, options: Any) -> ZcommGroup:
    """Make the process group that torch asks for, see ``Backend.register_backend``."""
    return ZcommGroup(opts, check(options))


def eager(method: Method) -> Method:
    """Keep torch.compile out of a method: it is run, not traced."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # importing it takes a second
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return call  # type: ignore[return-value]


class ZcommGroup(Identity):
    """A process group of backend "zcomm"."""

    def __init__(self, opts: Any, options: Options) -> None:
        super().__init__(opts)
        self.options = options
        self._link: Link | None = connect(opts, options.min_numel)
        self._queue = Queue()
        self._coalesced: list[dist.Work] | None = None
        self.savings = Savings(self._name)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the group, for its traffic and topology."""
        return self._open().communicator

    def _open(self) -> Link:
        if self._link is None:
            raise ZcommError(f"process group {self._name} was destroyed")
        return self._link

    def shutdown(self) -> None:
        """Finish what was issued and leave the group; of the default group, all together."""
        if self._link is not None:
            self._queue.close()
            link, self._link = self._link, None
            link.close()

    def abort(self) -> None:
        """Leave the group."""
        self.shutdown()

    # How an operation is issued

    def _issue(
        self,
        words: str,
        execute: Callable[[Communicator], None],
        results: Sequence[Any],
        tensors: Tensors,
        opts: Any = None,
    ) -> Handle:
        link = self._open()
        handle = self._queue.issue(
            words,
            lambda: execute(link.communicator),
            results,
            tensors,
            seconds=self._seconds(opts),
            async_op=getattr(opts, "asyncOp", True),
        )
        if self._coalesced is not None:
            self._coalesced.append(handle)
        return handle

    def _seconds(self, opts: Any) -> float:
        given = getattr(opts, "timeout", None)
        chosen = given if given is not None and given > timedelta(0) else self._timeout
        return chosen.total_seconds()

    def _codec(self, operation: str, tensors: Tensors, op: str = "sum") -> CodecSpec:
        return self.options.codec(operation, [x.dtype for x in tensors], op)

    # Reductions

    @eager
    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce each tensor over all ranks, in place."""
        if any(x.is_sparse for x in tensors):
            return self._allreduce_sparse(tensors, opts)
        op, factor = reduction(_op(opts), tensors[0].dtype)
        codec = self._codec("all_reduce", tensors, op)

        def execute(comm: Communicator) -> None:
            operations.all_reduce(comm, tensors, op, factor, codec)
            self.savings.count(comm, "all_reduce", tensors, codec)

        return self._issue(f"all_reduce {op}", execute, tensors, tensors, opts)

    allreduce_coalesced = allreduce

    def _allreduce_sparse(self, tensors: Tensors, opts: Any) -> dist.Work:
        op, _ = reduction(_op(opts), tensors[0].dtype)
        if op != "sum":
            raise ValueError(f"all_reduce {op} of sparse tensors: possible is sum")

        def execute(comm: Communicator) -> None:
            for x in tensors:
                operations.all_reduce_sparse(comm, x)

        return self._issue("all_reduce of sparse tensors", execute, tensors, [], opts)

    @eager
    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Reduce over all ranks, into the root's tensor."""
        op, factor = reduction(opts.reduceOp, tensors[0].dtype)
        how = tensors[0], opts.rootRank, op, factor
        execute = partial(_call, operations.reduce, *how)
        return self._issue(f"reduce {op}", execute, tensors, tensors, opts)

    @eager
    def reduce_scatter(self, outs: Tensors, ins: Sequence[Tensors], opts: Any = None) -> dist.Work:
        """Reduce the i-th tensor of each list into rank i's output."""
        op, factor = reduction(_op(opts), outs[0].dtype)
        codec = self._codec("reduce_scatter", outs, op)

        def execute(comm: Communicator) -> None:
            for out, tensors in zip(outs, ins, strict=True):
                operations.reduce_scatter_list(comm, out, tensors, op, factor, codec)
                self.savings.count(comm, "reduce_scatter", tensors, codec)

        given = [*outs, *(x for tensors in ins for x in tensors)]
        return self._issue(f"reduce_scatter {op}", execute, outs, given, opts)

    @eager
    def reduce_scatter_single(
        self, out: torch.Tensor, full: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Reduce one tensor of all ranks' parts, and keep the own."""
        return self._reduce_scatter([out], [full], opts)

    @eager
    def reduce_scatter_single_coalesced(
        self, outs: Tensors, ins: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do :meth:`reduce_scatter_single` for several pairs, in one message."""
        return self._reduce_scatter(outs, ins, opts)

    def _reduce_scatter(self, outs: Tensors, ins: Tensors, opts: Any) -> dist.Work:
        op, factor = reduction(_op(opts), outs[0].dtype)
        codec = self._codec("reduce_scatter", outs, op)

        def execute(comm: Communicator) -> None:
            operations.reduce_scatter_single(comm, outs, ins, op, factor, codec)
            self.savings.count(comm, "reduce_scatter", ins, codec)

        return self._issue(f"reduce_scatter {op}", execute, outs, [*outs, *ins], opts)

    # Copies

    @eager
    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Copy the root's tensor to all ranks."""
        root = opts.rootRank

        def execute(comm: Communicator) -> None:
            for x in tensors:
                operations.broadcast(comm, x, root)

        return self._issue(f"broadcast from {root}", execute, tensors, tensors, opts)

    @eager
    def allgather(self, outs: Sequence[Tensors], ins: Tensors, opts: Any = None) -> dist.Work:
        """Gather one tensor of every rank, of any sizes, into a list."""
        codec = self._codec("all_gather", ins)

        def execute(comm: Communicator) -> None:
            for tensors, own in zip(outs, ins, strict=True):
                operations.all_gather_list(comm, tensors, own, codec)
                self.savings.count(comm, "all_gather", tensors, codec)

        given = [*ins, *(x for tensors in outs for x in tensors)]
        return self._issue("all_gather", execute, outs, given, opts)

    @eager
    def allgather_coalesced(
        self, outs: Sequence[Tensors], ins: Tensors, opts: Any = None
    ) -> dist.Work:
        """Gather a list of tensors of every rank: ``outs[r]`` are those of rank r."""
        columns = [[row[i] for row in outs] for i in range(len(ins))]
        return self.allgather(columns, ins, opts)

    @eager
    def all_gather_single(
        self, out: torch.Tensor, own: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Gather the tensors of all ranks into one."""
        return self._all_gather([out], [own], opts)

    @eager
    def all_gather_single_coalesced(
        self, outs: Tensors, ins: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do :meth:`all_gather_single` for several pairs, in one message."""
        return self._all_gather(outs, ins, opts)

    def _all_gather(self, outs: Tensors, ins: Tensors, opts: Any) -> dist.Work:
        codec = self._codec("all_gather", ins)

        def execute(comm: Communicator) -> None:
            operations.all_gather_single(comm, outs, ins, codec)
            self.savings.count(comm, "all_gather", outs, codec)

        return self._issue("all_gather_single", execute, outs, [*outs, *ins], opts)

    @eager
    def gather(self, outs: Sequence[Tensors], ins: Tensors, opts: Any) -> dist.Work:
        """Send one tensor of every rank to the root."""
        places = outs[0] if outs else []
        execute = partial(_call, operations.gather, places, ins[0], opts.rootRank)
        return self._issue("gather", execute, outs, [*places, *ins], opts)

    @eager
    def scatter(self, outs: Tensors, ins: Sequence[Tensors], opts: Any) -> dist.Work:
        """Send the root's i-th tensor to rank i."""
        parts = ins[0] if ins else []
        execute = partial(_call, operations.scatter, outs[0], parts, opts.rootRank)
        return self._issue("scatter", execute, outs, [*outs, *parts], opts)

    @eager
    def all_to_all_single(
        self,
        out: torch.Tensor,
        own: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send runs of the first dimension to the ranks."""
        execute = partial(_call, operations.all_to_all_single, out, own, out_splits, in_splits)
        return self._issue("all_to_all_single", execute, [out], [out, own], opts)

    @eager
    def alltoall(self, outs: Tensors, ins: Tensors, opts: Any = None) -> dist.Work:
        """Send the i-th tensor to rank i."""
        execute = partial(_call, operations.all_to_all_list, outs, ins)
        return self._issue("all_to_all", execute, outs, [*outs, *ins], opts)

    # Single messages, barriers

    @eager
    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work:
        """Start sending a tensor to one rank."""
        return self._message(self._open().messages.send, tensors, peer, tag)

    @eager
    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from one rank."""
        return self._message(self._open().messages.receive, tensors, peer, tag)

    @eager
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from whoever sends one."""
        return self._message(self._open().messages.receive, tensors, None, tag)

    def _message(
        self, start: Callable[..., dist.Work], tensors: Tensors, peer: int | None, tag: int
    ) -> dist.Work:
        if len(tensors) != 1:
            raise ValueError(f"{len(tensors)} tensors in one message, expected 1")
        if peer is not None and not 0 <= peer < self.size():
            raise ValueError(f"rank {peer} is not a peer; possible: 0 to {self.size() - 1}")
        work = start(tensors[0], peer, tag, self._timeout.total_seconds())
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    @eager
    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until all ranks have called, and whatever they issued before has ended."""
        return self._issue("barrier", Communicator.barrier, [], [], opts)

    @eager
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks have called, or say on every rank which have not.

        Raises:
            CollectiveTimeout: naming the ranks that have not come within ``timeout``.
        """
        seconds = (timeout or self._timeout).total_seconds()
        link = self._open()

        def execute() -> None:
            try:
                link.communicator.barrier()
            except CollectiveTimeout as error:
                raise CollectiveTimeout(f"monitored_barrier: {error}") from None

        issued = self._queue.issue(
            "monitored_barrier", execute, [], [], seconds=seconds, async_op=False
        )
        issued.wait()

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return Together(works)

    # The names of torch 2.11 and 2.12

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _call(function: Callable[..., None], *arguments: Any) -> None:
    """Call an operation whose communicator comes last."""
    function(arguments[-1], *arguments[:-1])
