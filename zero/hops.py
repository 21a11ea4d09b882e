"""Gradients in two operations: inside the nodes, then between them.

Between the two the sum of a node lies in float32 on the ranks of the node, 1/L of a unit on each of
L: its *slice*, the shards of the rank's rail. There it can wait for more micro-batches
(``accumulate="node"``), and there the error of the outer codec is fed back (``grads_feedback``):

1. c = slice + residual
2. send Q(c) to the ranks of the rail
3. residual = c − Q(c), kept in int8

so what one reduction loses the next one brings. LoCo (arXiv 2407.04480) does this with a moving
average and resets; here it is the plain form (Karimireddy et al., arXiv 1901.09847), sharded.

With one reduction a step and no feedback the bits are those of one operation over all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcomm import Codec, Communicator
from zcomm.layout import Layout
from zcomm.seeds import derive
from zcomm.work import Work
from zero.algorithms import Algorithms
from zero.config import Config
from zero.layout import dtype_name
from zero.places import is_away
from zero.secondary import groups_of
from zero.unit import Buffer, Unit

logger = logging.getLogger("zcomm")

RESIDUAL = Codec.parse("int8:block=256")


class Residual(NamedTuple):
    """What was lost of one buffer's slice, encoded, under the loss scale of then."""

    wire: Any
    scale: float


class TwoHops:
    """The two groups of ranks, and the residuals.

    Attributes:
        accumulate: whether slices wait for the step.
        scale: the loss scale that gradients have now.
        residuals: by buffer, of those that were reduced with a codec.
    """

    def __init__(
        self,
        comm: Communicator,
        config: Config,
        groups: Sequence[tuple[int, ...]],
        algorithms: Algorithms,
    ) -> None:
        number = next(i for i, group in enumerate(groups) if comm.rank in group)
        position = groups[number].index(comm.rank)
        self._size = comm.size
        self._rails = list(zip(*groups, strict=True))
        self._rail = self._rails[position]
        self._codecs = config.grads_codecs(len(comm.topology.levels))
        self._reduce_dtype = None if config.reduce_dtype == "param" else "float32"
        self._feedback = config.grads_feedback
        self._algorithms = algorithms
        self._layouts: dict[object, Layout] = {}
        self._wide: set[Buffer] = set()
        self.accumulate = config.accumulate == "node"
        self.scale = 1.0
        self.residuals: dict[Buffer, Residual] = {}
        self.node = comm.split(color=number, key=position)
        self.rail = comm.split(color=position, key=number)

    @property
    def residual_nbytes(self) -> int:
        """Bytes of all residuals of this rank."""
        return sum(residual.wire.nbytes for residual in self.residuals.values())

    def reduce(
        self, unit: Unit, fulls: Sequence[Tensor], seed: int, *, async_op: bool
    ) -> tuple[list[Tensor], tuple[Work[object], ...]]:
        """Reduce a unit; returns float32 means, or slices that are to be accumulated, and works."""
        slices, works = self._inside(unit, fulls, seed, async_op)
        if self.accumulate:
            return slices, works
        means, more = self.finish(unit, slices, seed, async_op=async_op)
        return means, (*works, *more)

    def save_state(self, buffers: Sequence[Buffer]) -> dict[str, Any]:
        """Return residuals by the number of their buffer, and the scale of each."""
        found = [(i, self.residuals[b]) for i, b in enumerate(buffers) if b in self.residuals]
        scales = {str(i): residual.scale for i, residual in found}
        wires = {
            f"residual.{i}": torch.as_tensor(residual.wire, device="cpu") for i, residual in found
        }
        return {"residual_scales": scales, **wires}

    def load_state(self, state: Mapping[str, Any], buffers: Sequence[Buffer]) -> None:
        """Take what :meth:`save_state` returned; without tensors residuals start at zero."""
        self.residuals.clear()
        for index, scale in state.get("residual_scales", {}).items():
            wire = state.get(f"residual.{index}")
            if wire is not None:
                buffer = buffers[int(index)]
                kept = wire.to(buffer.device, copy=True)
                kept = kept if is_away(buffer.device) else kept.numpy()
                self.residuals[buffer] = Residual(kept, scale)

    def _inside(
        self, unit: Unit, fulls: Sequence[Tensor], seed: int, async_op: bool
    ) -> tuple[list[Tensor], tuple[Work[object], ...]]:
        layouts = [
            self._node_layout(buffer, full.dtype)
            for buffer, full in zip(unit.trainable, fulls, strict=True)
        ]
        slices = [
            torch.empty(self._slice_layout(buffer).numel, device=buffer.device)
            for buffer in unit.trainable
        ]
        for buffer, full in zip(unit.trainable, fulls, strict=True):
            if full.dtype == torch.float32:
                self._wide.add(buffer)
        codecs = self._codecs if unit.quantise else None
        work = self.node.reduce_layout(
            fulls,
            slices,
            layouts,
            op="sum",
            codec=codecs,
            algorithm=self._algorithms.choose(
                self.node, unit, layouts, codecs, self._reduce_dtype, hop=" inside a node"
            ),
            reduce_dtype=self._reduce_dtype,
            min_numel=0,
            label=unit.label,
            seed=seed,
            async_op=async_op,
        )
        return slices, (work,) if async_op else ()

    def finish(
        self, unit: Unit, slices: Sequence[Tensor], seed: int, *, async_op: bool = False
    ) -> tuple[list[Tensor], tuple[Work[object], ...]]:
        """Reduce slices between the nodes; returns float32 means of all ranks, and works."""
        buffers = unit.trainable
        codec = self._outer_codec() if unit.quantise else None
        sent = [
            slice_ if codec else slice_.new_empty(slice_.shape, dtype=self._hop_dtype(buffer))
            for buffer, slice_ in zip(buffers, slices, strict=True)
        ]
        layouts = [
            self._slice_layout(buffer, dtype_name(part.dtype))
            for buffer, part in zip(buffers, sent, strict=True)
        ]
        means = [
            torch.empty(layout.shard_numel(self.rail.rank), device=buffer.device)
            for layout, buffer in zip(layouts, buffers, strict=True)
        ]

        self._wide.difference_update(buffers)

        def prepare() -> None:
            for buffer, part, slice_ in zip(buffers, sent, slices, strict=True):
                if codec is None:
                    part.copy_(slice_)
                elif self._feedback:
                    self._feed_back(buffer, codec, slice_)

        def divide() -> None:
            for mean in means:
                # Not by a number of the host: CUDA multiplies by its reciprocal.
                mean.div_(torch.full((), float(self._size), device=mean.device))

        held = [self.residuals[b].wire for b in buffers if b in self.residuals]
        prepared = _run(self.rail, prepare, [*sent, *slices, *held], async_op)
        codecs = self._codecs if codec else None
        work = self.rail.reduce_layout(
            sent,
            means,
            layouts,
            op="sum",
            codec=codecs,
            algorithm=self._algorithms.choose(
                self.rail, unit, layouts, codecs, self._reduce_dtype, hop=" between nodes"
            ),
            reduce_dtype=self._reduce_dtype,
            min_numel=0,
            label=unit.label,
            seed=derive(seed, 1),
            async_op=async_op,
        )
        works = (
            *prepared,
            *((work,) if async_op else ()),
            *_run(self.rail, divide, means, async_op),
        )
        return means, works

    def _feed_back(self, buffer: Buffer, codec: Codec, slice_: Tensor) -> None:
        lengths = [run.numel for rank in self._rail for run in buffer.layout.trainable_runs(rank)]
        numel = slice_.numel()
        before = self.residuals.get(buffer)
        if before is not None:
            lost = RESIDUAL.decode(before.wire, numel, torch.float32, segments=lengths)
            slice_.add_(lost, alpha=self.scale / before.scale)
        wire = codec.encode(slice_, segments=lengths)
        arrives = codec.decode(wire, numel, torch.float32, segments=lengths)
        lost = torch.nan_to_num(slice_ - arrives, nan=0.0, posinf=0.0, neginf=0.0)
        self.residuals[buffer] = Residual(RESIDUAL.encode(lost, segments=lengths), self.scale)

    def _outer_codec(self) -> Codec | None:
        """Return the codec of the first hop between nodes."""
        sizes = [len(group) for group in self._groups_of_me()]
        level = next((i for i, size in enumerate(sizes) if size > 1), len(sizes) - 1)
        return self._codecs[level]

    def _groups_of_me(self) -> list[tuple[int, ...]]:
        levels = self.rail.topology.levels
        return [next(g for g in level.groups if self.rail.rank in g) for level in levels]

    def _hop_dtype(self, buffer: Buffer) -> torch.dtype:
        """Return the dtype in which a node's sum travels without a codec, as in one operation."""
        wide = self._reduce_dtype is not None or buffer in self._wide
        if buffer.layout.dtype == torch.bfloat16 and not wide:
            return torch.bfloat16
        return torch.float32

    def _node_layout(self, buffer: Buffer, dtype: torch.dtype) -> Layout:
        key = (buffer, dtype)
        if key not in self._layouts:
            shards = buffer.layout.gradients(dtype).shards
            of_rails = [tuple(s for rank in rail for s in shards[rank]) for rail in self._rails]
            self._layouts[key] = Layout(dtype_name(dtype), tuple(of_rails))
        return self._layouts[key]

    def _slice_layout(self, buffer: Buffer, dtype: str = "float32") -> Layout:
        key = (buffer, dtype)
        if key not in self._layouts:
            self._layouts[key] = buffer.layout.in_a_row(self._rail, dtype)
        return self._layouts[key]


def _run(
    comm: Communicator, function: Callable[[], None], arrays: Sequence[Any], async_op: bool
) -> tuple[Work[object], ...]:
    if async_op:
        return (comm.enqueue(function, arrays),)  # type: ignore[return-value]
    function()
    return ()


def two_hops(comm: Communicator, config: Config, algorithms: Algorithms) -> TwoHops | None:
    """Return the two hops of a configuration that needs them; None where there is one hop.

    Raises:
        ValueError: nodes of different sizes.
    """
    if config.accumulate == "rank" and not config.grads_feedback:
        return None
    groups = groups_of(comm.topology, "node")
    if len(groups) == 1:
        logger.info("one node: accumulate='node' and grads_feedback have no hop to work on")
        return None
    return TwoHops(comm, config, groups, algorithms)
