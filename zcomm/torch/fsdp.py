"""ZeRO++ under FSDP2: quantised, hierarchical all-gathers and reduce-scatters for ``fully_shard``.

FSDP2 lets every module have an all-gather and a reduce-scatter of its own. Here they are those of a
communicator (:mod:`zcomm.torch.worlds`), whatever the backend of FSDP's groups. The buffers that
FSDP hands over are, for every rank, the padded shards of a module's parameters one after the other;
each of them is a *segment*, so that a parameter's codes depend on the parameter alone.

Do not assume that the objects belong to one group: with ``reshard_after_forward=2`` the same
all-gather is called for the sharding group in forward and for a smaller one in backward. What the
smaller one gathers was decoded already, and is sent as it is (hpZ's secondary partition).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zcomm import hops
from zcomm.communicator import Communicator
from zcomm.hops import CodecSpec
from zcomm.layout import Layout, Segment
from zcomm.torch.ddp import QuantizedAllReduce
from zcomm.torch.worlds import TopologySpec, World, world
from zcomm.work import Work

logger = logging.getLogger("zcomm")
MIN_NUMEL = 65536


def quantize_fsdp(
    model: nn.Module,
    weights: CodecSpec = "int8",
    grads: CodecSpec = ("int8", "int4"),
    topology: TopologySpec = "auto",
    min_numel: int = MIN_NUMEL,
    replicas: dist.ProcessGroup | None = None,
) -> Communicator:
    """Let all FSDP2 modules of a model communicate through codecs, hierarchically.

    Call it after ``fully_shard``; all ranks of the default process group do, in one order. Groups
    may be of any backend; mixed precision, divide factors, meshes and prefetching are FSDP's.
    Parameters that FSDP holds are not touched: what is quantised is what travels.

    Args:
        model: one that holds FSDP2 modules, which ``fully_shard`` makes.
        weights: codec of the all-gathers of parameters: None (exact), a name, or one per level,
            innermost first, as :meth:`zcomm.Communicator.all_gather` takes it.
        grads: codec of the reduce-scatters of gradients, the same.
        topology: of the ranks of the default group: "auto", "2x4" (2 nodes of 4), a file, or a
            :class:`topology.Topology`.
        min_numel: modules with fewer elements travel exactly.
        replicas: of a model that is sharded over a part of the ranks (a 1-D mesh), the group of
            this rank and those that hold the same shards: reduced gradients are averaged over it,
            through ``grads``. In a 2-D mesh FSDP does that itself, exactly.

    Returns:
        The communicator of all ranks: its ``traffic`` counts what this rank sends.

    Raises:
        ValueError: no FSDP2 module; a codec that the topology or the operation has no use for;
            a module with several meshes.
        TopologyError: a topology that does not describe the ranks.
    """
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no FSDP2 module: fully_shard comes first")
    places = world(topology)
    levels = places.comm.topology
    for operation, codec in (("all_gather", weights), ("reduce_scatter", grads)):
        hops.check_codecs(operation, hops.parse_codecs(codec, len(levels.levels)), levels)
    for name, module in modules:
        parameters = _parameters(module)
        label = name or "root"
        gather: Any = AllGather(places, parameters, weights, min_numel, label)
        reduce: Any = ReduceScatter(places, parameters, grads, min_numel, label)
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
        if replicas is not None:
            module.set_all_reduce_hook(Replicas(reduce, replicas, topology))
    if places.comm.rank == 0:
        logger.info("FSDP2: %d modules, weights %s, gradients %s", len(modules), weights, grads)
        if any(_replicated(module) for _, module in modules):
            logger.warning(
                "FSDP2: the all_reduce among replicas of a 2-D mesh is torch's own, and exact; "
                "through codecs it goes with a 1-D mesh and quantize_fsdp(replicas=...)"
            )
    return places.comm


def _replicated(module: FSDPModule) -> bool:
    mesh = getattr(_group(module), "mesh_info", None)
    return getattr(mesh, "replicate_mesh_size", 1) > 1


def _parameters(module: FSDPModule) -> Sequence[Any]:
    """Return FSDP's descriptions of the parameters that a module communicates, in its order."""
    group: Any = _group(module)
    return () if group is None else group.fsdp_params


def _group(module: FSDPModule) -> Any:
    """Return FSDP's description of what a module communicates; None: nothing.

    Raises:
        ValueError: parameters of one module on several meshes.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13
    if groups is None:
        return state._fsdp_param_group
    if len(groups) > 1:
        raise ValueError(f"{type(module).__name__} shards over {len(groups)} meshes, possible is 1")
    return groups[0] if groups else None


class _Comm:
    """What both have in common: where memory comes from, and how a buffer is cut."""

    def __init__(
        self,
        places: World,
        parameters: Sequence[Any],
        codec: CodecSpec,
        min_numel: int,
        label: str,
    ) -> None:
        self._places = places
        self._parameters = parameters
        self.codec = codec
        self.min_numel = min_numel
        self._label = label

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _layout(self, full: torch.Tensor, size: int, *, trainable: bool) -> Layout:
        """Cut a buffer into the padded shards of parameters, one after the other for every rank.

        Where not all of them take part (a parameter without a gradient in this backward), which
        ones is not known here, and each rank's part is one segment.
        """
        dtype = str(full.dtype).removeprefix("torch.")
        return _layout(dtype, self.lengths(full.numel() // size, trainable=trainable), size)

    def lengths(self, numel: int, *, trainable: bool) -> tuple[int, ...]:
        """Return the elements of the padded shards that a rank's part consists of."""
        lengths = tuple(
            parameter.padded_sharded_param_size.numel()
            for parameter in self._parameters
            if not trainable or parameter.sharded_param.requires_grad
        )
        return lengths if sum(lengths) == numel else (numel,)


@lru_cache(maxsize=1024)
def _layout(dtype: str, lengths: tuple[int, ...], size: int) -> Layout:
    each = sum(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    cut = [(start, length) for start, length in zip(starts, lengths, strict=True) if length]
    return Layout(
        dtype,
        tuple(
            tuple(Segment(rank * each + start, length) for start, length in cut)
            for rank in range(size)
        ),
    )


class AllGather(_Comm):
    """Gathers the parameters of one module."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the shards of all ranks, the own one decoded like the others.

        On CPU beside the caller, whether ``async_op`` is set or not: FSDP waits for what is
        returned where it reads the parameters, and what it prefetches comes while others compute.
        """
        comm = self._places.group(group)
        layout = self._layout(output_tensor, comm.size, trainable=False)
        # Several dtypes travel as bytes; a smaller group holds what was decoded before.
        whole = layout.dtype != "uint8" and comm.size == self._shard_size()
        beside = async_op or output_tensor.device.type == "cpu"
        work = comm.gather_layout(
            [input_tensor],
            [output_tensor],
            [layout],
            codec=self.codec if whole else None,
            min_numel=self.min_numel,
            label=self._label,
            async_op=beside,
        )
        return Arrival(work) if beside else None

    def _shard_size(self) -> int:
        return int(self._parameters[0].mesh_info.shard_mesh_size)


class ReduceScatter(_Comm):
    """Reduces the gradients of one module."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce over all ranks, and keep the own part."""
        comm = self._places.group(group)
        name, factor = _reduction(op)
        if factor != 1.0:
            input_tensor.mul_(factor)
        work = comm.reduce_layout(
            [input_tensor],
            [output_tensor],
            [self._layout(input_tensor, comm.size, trainable=True)],
            op=name,
            codec=self.codec,
            min_numel=self.min_numel,
            label=self._label,
            async_op=async_op,
        )
        return Arrival(work) if async_op else None


class Replicas:
    """Averages a module's reduced gradients over those who hold the same shards."""

    def __init__(
        self, reduce: ReduceScatter, group: dist.ProcessGroup, topology: TopologySpec
    ) -> None:
        self._reduce = reduce
        how = {"process_group": group, "topology": topology, "min_numel": reduce.min_numel}
        self._mean = QuantizedAllReduce(reduce.codec, **how)  # type: ignore[arg-type]

    def __call__(self, reduced: torch.Tensor) -> None:
        """Average in place."""
        lengths = self._reduce.lengths(reduced.numel(), trainable=True)
        for work in self._mean.reduce(reduced, reduced.split_with_sizes(lengths)):
            work.wait()


class Arrival(dist.Work):
    """An operation of a communicator, as torch waits for it."""

    def __init__(self, work: Work[Any]) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the results may be used; raises what the operation raised."""
        self._work.wait()
        return True

    def is_completed(self) -> bool:
        """Tell whether the operation has ended."""
        return self._work.done()


def _reduction(op: Any) -> tuple[str, float]:
    """Return the reduction that FSDP asks for, and what inputs are multiplied with before."""
    for name, known in (("avg", dist.ReduceOp.AVG), ("sum", dist.ReduceOp.SUM)):
        if op == known:
            return name, 1.0
    if op == dist.ReduceOp.PREMUL_SUM:
        return "sum", float(op.factor)
    raise ValueError(f"reduce_scatter of gradients with {op}: possible are SUM, AVG, PREMUL_SUM")
