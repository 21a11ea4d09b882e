"""A communication hook for DistributedDataParallel: the mean of gradients through codecs.

A bucket is reduced and gathered in one go on zcomm's own thread, in the order in which buckets are
ready, while backward goes on. All replicas decode the same bytes, so that they stay equal to the
last bit. Parameters are *segments*: no block of a codec holds elements of two.

With ``feedback`` (Karimireddy et al., arXiv 1901.09847) what the first encoding loses is kept:

1. c = gradient + residual
2. send Q(c)
3. residual = c − Q(c)

What later hops lose, of sums that belong to several ranks, is not fed back.
"""

# No postponed annotations: DDP compares those of a hook with classes.

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from zcomm import hops
from zcomm.codecs import Codec
from zcomm.hops import CodecSpec
from zcomm.layout import Layout, Segment
from zcomm.torch.worlds import TopologySpec, world
from zcomm.work import Work

MIN_NUMEL = 65536


class QuantizedAllReduce:
    """The state of :func:`all_reduce_hook`: which codec, for which ranks, and what was lost.

    All ranks of the default process group make one, in one order, with the same arguments.

    Args:
        codec: None (exact), a name, or one per level of the topology, innermost first, as
            :meth:`zcomm.Communicator.all_reduce` takes it.
        feedback: add what the first encoding lost to the next gradients; it costs a second encoding
            and as much memory as the gradients.
        process_group: that of DDP, of any backend; None: the default one.
        topology: of the ranks of the default group: "auto", "2x4", a file or a
            :class:`topology.Topology`.
        min_numel: buckets with fewer elements travel exactly.

    Raises:
        ValueError: a codec that the topology has no use for; feedback without a codec on the first
            hop, or with one that rounds stochastically.
        TopologyError: a topology that does not describe the ranks.
    """

    def __init__(
        self,
        codec: CodecSpec = "int8",
        feedback: bool = False,
        process_group: dist.ProcessGroup | None = None,
        topology: TopologySpec = "auto",
        min_numel: int = MIN_NUMEL,
    ) -> None:
        self.comm = world(topology).group(process_group)
        found = self.comm.topology
        codecs = hops.parse_codecs(codec, len(found.levels))
        hops.check_codecs("reduce_scatter", codecs, found)
        self._codecs = codecs
        self._gather = (codecs[hops.outermost(found)],) * len(codecs)
        self._min_numel = min_numel
        self._algorithm = "auto"
        self._first: Codec | None = None
        self._numbers: dict[torch.Tensor, int] = {}
        self._residuals: dict[int, torch.Tensor] = {}
        if feedback:
            self._algorithm = hops.choose("auto", found)
            by_levels = self._algorithm == "hierarchical"
            first = hops.levels_with_peers(found)[0] if by_levels else hops.outermost(found)
            self._first = codecs[first]
            if self._first is None:
                raise ValueError(
                    f"feedback with codec {codec}: the first hop, at level {first}, has none"
                )
            if self._first.rounding == "stochastic":
                # What is drawn is known only where it is sent.
                raise ValueError(f"feedback with codec {codec}: possible is rounding=nearest")

    def reduce(self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[Work[Any]]:
        """Start to make a bucket the mean of all ranks', in place."""
        lengths = tuple(parameter.numel() for parameter in parameters)
        layout = _cut(str(buffer.dtype).removeprefix("torch."), lengths, self.comm.size)
        shard = buffer.new_empty(layout.shard_numel(self.comm.rank))
        works: list[Work[Any]] = []
        if self._first is not None and buffer.numel() >= self._min_numel:
            feed_back = partial(self._feed_back, buffer, layout, self._residuals_of(parameters))
            if buffer.device.type == "cpu":
                works.append(self.comm.enqueue(feed_back))
            else:
                feed_back()  # on the stream that the operations wait for
        how: dict[str, Any] = {"min_numel": self._min_numel, "async_op": True}
        works.append(
            self.comm.reduce_layout(
                [buffer], [shard], [layout], codec=self._codecs, algorithm=self._algorithm, **how
            )
        )
        works.append(
            self.comm.gather_layout([shard], [buffer], [layout], codec=self._gather, **how)
        )
        return works

    def _residuals_of(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what is kept for each parameter, zero at first.

        Parameters are numbered as they come in the first backward, which is the same order in every
        run; buckets are not the same ones later.
        """
        for parameter in parameters:
            number = self._numbers.setdefault(parameter, len(self._numbers))
            if number not in self._residuals:
                self._residuals[number] = torch.zeros(
                    parameter.numel(), dtype=torch.float32, device=parameter.device
                )
        return [self._residuals[self._numbers[parameter]] for parameter in parameters]

    @torch.no_grad()
    def _feed_back(
        self, buffer: torch.Tensor, layout: Layout, residuals: Sequence[torch.Tensor]
    ) -> None:
        assert self._first is not None
        lengths = [segment.numel for shard in layout.shards for segment in shard]
        numels = [residual.numel() for residual in residuals]
        for part, residual in zip(buffer.split_with_sizes(numels), residuals, strict=True):
            part.add_(residual)
        wire = self._first.encode(buffer, segments=lengths)
        arrives = self._first.decode(wire, buffer.numel(), torch.float32, segments=lengths)
        lost = torch.nan_to_num(buffer.float() - arrives, nan=0.0, posinf=0.0, neginf=0.0)
        for part, residual in zip(lost.split_with_sizes(numels), residuals, strict=True):
            residual.copy_(part)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps between steps; save it beside the model, for each rank."""
        return {"residuals": {number: x.clone() for number, x in self._residuals.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` returned, before the first backward."""
        if self._numbers:
            raise ValueError("load_state_dict comes before the first backward of this hook")
        self._residuals = {int(number): x.clone() for number, x in state["residuals"].items()}


def all_reduce_hook(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of DDP: ``ddp.register_comm_hook(QuantizedAllReduce("int8"), this)``."""
    assert isinstance(state, QuantizedAllReduce)
    buffer = bucket.buffer()
    works = state.reduce(buffer, bucket.parameters())
    on_device = buffer.device.type != "cpu"
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[buffer.device] if on_device else []
    )

    def finish() -> None:
        failed = [work.error for work in works if work.error is not None]
        if failed:
            for work in works:
                work.awaited = True  # the future says so
            future.set_exception(failed[0])  # type: ignore[arg-type]
        else:
            future.set_result(buffer)

    if on_device:
        for work in works:
            work.wait()  # the current stream does; the host does not
        finish()
    else:
        state.comm.enqueue(finish)
    return future


@lru_cache(maxsize=1024)
def _cut(dtype: str, lengths: tuple[int, ...], size: int) -> Layout:
    """Cut a bucket into even shards, of segments that end where parameters do."""
    even = Layout.cut(dtype, sum(lengths), size)
    ends = list(accumulate(lengths))
    shards = []
    for (whole,) in even.shards:
        low, high = whole.start, whole.start + whole.numel
        inner = [low, *(end for end in ends if low < end < high), high]
        shards.append(
            tuple(Segment(start, end - start) for start, end in pairwise(inner) if end > start)
        )
    return Layout(dtype, tuple(shards))
