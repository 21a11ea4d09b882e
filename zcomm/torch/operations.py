"""The collectives of torch, each as calls of a communicator. They run in the queue of their group.

Shapes are torch's: an operation on one tensor counts elements and ignores its shape, lists hold one
tensor per rank. Outputs may have any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zcomm.communicator import Communicator
from zcomm.hops import CodecSpec
from zcomm.layout import Layout, Segment
from zcomm.torch.tensors import (
    Target,
    flat,
    name_of,
    require_numel,
    require_same_dtype,
    uneven,
)

Tensors = Sequence[torch.Tensor]


def all_reduce(
    comm: Communicator, tensors: Tensors, op: str, factor: float | None, codec: CodecSpec
) -> None:
    """Reduce every tensor over all ranks, in place: one message."""
    targets = [Target(x) for x in tensors]
    if factor is not None:
        for target in targets:
            target.flat.mul_(factor)
    comm.all_reduce(_one_or_all([target.flat for target in targets]), op=op, codec=codec)
    for target in targets:
        target.deliver()


def reduce(comm: Communicator, x: torch.Tensor, root: int, op: str, factor: float | None) -> None:
    """Reduce over all ranks, into the root's tensor: each node sends the root one sum."""
    source = flat(x) if factor is None else flat(x) * factor
    everything, nothing = (Segment(0, source.numel()),), (Segment(0, 0),)
    shards = tuple(everything if rank == root else nothing for rank in range(comm.size))
    own = torch.empty(
        source.numel() if comm.rank == root else 0, dtype=source.dtype, device=source.device
    )
    comm.reduce_layout([source.contiguous()], [own], [Layout(name_of(source), shards)], op=op)
    if comm.rank == root:
        target = Target(x)
        target.flat.copy_(own)
        target.deliver()


def broadcast(comm: Communicator, x: torch.Tensor, root: int) -> None:
    """Copy the root's elements to all ranks."""
    target = Target(x)
    comm.broadcast(target.flat, root)
    target.deliver()


def all_gather_single(comm: Communicator, outs: Tensors, ins: Tensors, codec: CodecSpec) -> None:
    """Gather the elements of all ranks, for each pair of tensors; one message."""
    for out, own in zip(outs, ins, strict=True):
        require_same_dtype("all_gather_single", out, own)
        how = f"{comm.size} ranks with {own.numel()} each"
        require_numel("all_gather_single", "output", out.numel(), comm.size * own.numel(), how)
    targets = [Target(out) for out in outs]
    places = _one_or_all([target.flat for target in targets])
    comm.all_gather(_one_or_all([flat(own) for own in ins]), places, codec=codec)
    for target in targets:
        target.deliver()


def all_gather_list(comm: Communicator, outs: Tensors, own: torch.Tensor, codec: CodecSpec) -> None:
    """Gather one tensor of every rank, of any sizes; ``outs`` hold one tensor per rank."""
    _require_ranks("all_gather", "outputs", outs, comm.size)
    require_same_dtype("all_gather", own, *outs)
    mine = outs[comm.rank].numel()
    require_numel("all_gather", "input", own.numel(), mine, f"output {comm.rank} has as many")
    source = flat(own)
    scale = 1 if not own.numel() else source.numel() // own.numel()
    numels = [out.numel() * scale for out in outs]
    whole = torch.empty(sum(numels), dtype=source.dtype, device=source.device)
    if len(set(numels)) == 1:
        comm.all_gather(source, whole, codec=codec)
    else:
        comm.gather_layout(
            [source.contiguous()], [whole], [uneven(name_of(source), numels)], codec=codec
        )
    _split(whole, outs)


def reduce_scatter_single(
    comm: Communicator, outs: Tensors, ins: Tensors, op: str, factor: float | None, codec: CodecSpec
) -> None:
    """Reduce over all ranks and keep the own part, for each pair of tensors; one message."""
    for out, full in zip(outs, ins, strict=True):
        require_same_dtype("reduce_scatter_single", out, full)
        how = f"{comm.size} ranks with {out.numel()} each"
        require_numel("reduce_scatter_single", "input", full.numel(), comm.size * out.numel(), how)
    fulls = [flat(full) if factor is None else flat(full) * factor for full in ins]
    targets = [Target(out) for out in outs]
    places = _one_or_all([target.flat for target in targets])
    comm.reduce_scatter(_one_or_all(fulls), places, op=op, codec=codec)
    for target in targets:
        target.deliver()


def reduce_scatter_list(
    comm: Communicator,
    out: torch.Tensor,
    ins: Tensors,
    op: str,
    factor: float | None,
    codec: CodecSpec,
) -> None:
    """Reduce the i-th tensor of every rank into rank i's output; they may differ in size."""
    _require_ranks("reduce_scatter", "inputs", ins, comm.size)
    require_same_dtype("reduce_scatter", out, *ins)
    mine = ins[comm.rank].numel()
    require_numel("reduce_scatter", "output", out.numel(), mine, f"input {comm.rank} has as many")
    full = torch.cat([flat(x) for x in ins])
    if factor is not None:
        full.mul_(factor)
    target = Target(out)
    layout = uneven(name_of(full), [x.numel() for x in ins])
    comm.reduce_layout([full], [target.flat], [layout], op=op, codec=codec)
    target.deliver()


def gather(comm: Communicator, outs: Tensors, own: torch.Tensor, root: int) -> None:
    """Send one tensor of every rank to the root, whose ``outs`` hold one tensor per rank."""
    recvs: dict[int, Target] = {}
    if comm.rank == root:
        _require_ranks("gather", "outputs", outs, comm.size)
        require_same_dtype("gather", own, *outs)
        recvs = {rank: Target(out) for rank, out in enumerate(outs)}
    _exchange(comm, f"gather to {root}", {root: flat(own)}, recvs)


def scatter(comm: Communicator, out: torch.Tensor, ins: Tensors, root: int) -> None:
    """Send the root's i-th tensor to rank i."""
    sends: dict[int, torch.Tensor] = {}
    if comm.rank == root:
        _require_ranks("scatter", "inputs", ins, comm.size)
        require_same_dtype("scatter", out, *ins)
        sends = {rank: flat(x) for rank, x in enumerate(ins)}
    _exchange(comm, f"scatter from {root}", sends, {root: Target(out)})


def all_to_all_list(comm: Communicator, outs: Tensors, ins: Tensors) -> None:
    """Send the i-th input to rank i, and receive its tensor in the i-th output."""
    _require_ranks("all_to_all", "outputs", outs, comm.size)
    _require_ranks("all_to_all", "inputs", ins, comm.size)
    require_same_dtype("all_to_all", *outs, *ins)
    sends = {rank: flat(x) for rank, x in enumerate(ins)}
    _exchange(comm, "all_to_all", sends, {rank: Target(out) for rank, out in enumerate(outs)})


def all_to_all_single(
    comm: Communicator,
    out: torch.Tensor,
    own: torch.Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
) -> None:
    """Send runs of the first dimension to the ranks; without splits, equal ones."""
    require_same_dtype("all_to_all_single", out, own)
    if out_splits or in_splits:
        sends = _parts("input", own, in_splits, comm.size)
        recvs = _parts("output", out, out_splits, comm.size)
        _exchange(
            comm,
            "all_to_all",
            {r: flat(x) for r, x in enumerate(sends)},
            {r: Target(x) for r, x in enumerate(recvs)},
        )
        return
    require_numel("all_to_all_single", "output", out.numel(), own.numel(), "as many as the input")
    if own.dim() and own.size(0) % comm.size:
        raise ValueError(
            f"all_to_all_single: dimension 0 of {own.size(0)}, expected a multiple of the "
            f"{comm.size} ranks, or split sizes"
        )
    target = Target(out)
    comm.all_to_all(flat(own), target.flat)
    target.deliver()


def _parts(what: str, x: torch.Tensor, splits: Sequence[int], size: int) -> Tensors:
    rows = x.size(0)
    if not splits:
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all_single: {what} splits {list(splits)}, expected {size} numbers, one per "
            f"rank, whose sum is dimension 0: {rows}"
        )
    return torch.split(x, list(splits))


def _exchange(
    comm: Communicator, what: str, sends: dict[int, torch.Tensor], recvs: dict[int, Target]
) -> None:
    outgoing = {rank: x.contiguous() for rank, x in sends.items()}
    comm.exchange(what, outgoing, {rank: target.flat for rank, target in recvs.items()})
    for target in recvs.values():
        target.deliver()


def _one_or_all(tensors: list[torch.Tensor]) -> Any:
    """Return the only tensor, whose calls are kept ready, or all in one message."""
    return tensors[0] if len(tensors) == 1 else tensors


def _split(whole: torch.Tensor, outs: Tensors) -> None:
    start = 0
    for out in outs:
        target = Target(out)
        target.flat.copy_(whole[start : start + target.flat.numel()])
        target.deliver()
        start += target.flat.numel()


def _require_ranks(operation: str, what: str, tensors: Tensors, size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"{operation}: {len(tensors)} {what}, expected {size}, one per rank")


def all_reduce_sparse(comm: Communicator, x: torch.Tensor) -> None:
    """Sum a sparse COO tensor over all ranks, in place, whatever entries each rank has."""
    own = x.detach().coalesce()
    counts = comm.all_gather_values(np.array([own._nnz()], np.int64), "sparse all_reduce")[:, 0]
    columns, shape = own.sparse_dim(), own.values().shape[1:]
    indices = [torch.empty(int(n), columns, dtype=torch.int64, device=x.device) for n in counts]
    values = [torch.empty(int(n), *shape, dtype=x.dtype, device=x.device) for n in counts]
    all_gather_list(comm, indices, own.indices().t().contiguous(), None)
    all_gather_list(comm, values, own.values(), None)
    # In the order of ranks, on all ranks: the same bits everywhere.
    whole = torch.sparse_coo_tensor(
        torch.cat(indices).t(), torch.cat(values), x.shape, check_invariants=False
    )
    with torch.no_grad():
        x.copy_(whole.coalesce())  # not detached, which would keep another number of entries
