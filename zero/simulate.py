"""How long a training step takes on a cluster that nobody has to own, and what it waits for.

Words defined here:

- **scheme**: a configuration of zero under the name that papers use.
- **efficiency**: the part of a data sheet's number that is reached; see docs/planning.md for what
  was fitted, and to what.
- **busy** seconds of a resource: how long it works in a step, hidden behind others or not.

Traffic is that of the plans which zero makes (:mod:`zero.rehearsal`); here they get seconds
(:mod:`topology.cost`) and a clock with two hands: one computes, one runs operations in the order in
which they were issued. All ranks are taken to do the same at the same time, and rank 0 stands for
them: nodes are of equal size, and shards differ by less than a piece of :mod:`zero.layout`.

A reader must not assume measurements: nothing here looks at the machine that it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from topology import cost, from_shape
from zcomm.prediction import cost_hops
from zcomm.tuning import assume
from zero.config import Config
from zero.estimate import Estimate, Model, estimate
from zero.layout import UnitModules
from zero.rehearsal import Compute, Issue, Operation, Script, Values, rehearse

OPTIMIZER_NBYTES = 30
"""Bytes of memory that Adam reads and writes for an element: four float32 in, three out, and the
16-bit parameter."""

CODEC_NBYTES = 3
"""Bytes of memory that a codec moves for an element: 16 bits on one side, a code on the other."""

ADD_NBYTES = 6
"""The same for adding an element that travelled as it is to a float32 sum."""

COPY_NBYTES = 4

SCHEMES: Mapping[str, Config] = {
    "ZeRO-3": Config(),
    "qwZ": Config(weights="int8"),
    "hpZ": Config(secondary="node"),
    "qgZ": Config(grads=("int4", "int4")),
    "ZeRO++": Config.zeropp(),
    "safe4": Config.safe4(),
    "persistent": Config(secondary="persistent", grads=("int4", "int4")),
}

STAGES: Mapping[str, Config] = {f"stage {stage}": Config(stage=stage) for stage in range(3)}
"""Data parallelism, and what the ZeRO paper calls P_os and P_os+g."""


@dataclass(frozen=True)
class Device:
    """What a data sheet says: dense 16-bit operations, bytes of memory and bytes per second."""

    flops: float
    memory_bandwidth: float
    memory_nbytes: float
    link: str


DEVICES: Mapping[str, Device] = {
    "v100": Device(125e12, 0.9e12, 32e9, "nvlink sm70"),
    "a100": Device(312e12, 2.0e12, 80e9, "nvlink sm80"),
    "h100": Device(989e12, 3.35e12, 80e9, "nvlink sm90"),
    "h200": Device(989e12, 4.8e12, 141e9, "nvlink sm90"),
    "gb200": Device(2500e12, 8.0e12, 186e9, "nvlink sm100"),
}


@dataclass(frozen=True)
class Efficiency:
    """Which part of its data sheet each resource reaches.

    ``network`` is of the rate of a node's links, ``inside`` of NVLink, ``codec`` of the memory's
    bandwidth.
    """

    compute: float
    network: float
    inside: float
    codec: float


FITTED = Efficiency(compute=0.789, network=0.952, inside=0.476, codec=0.229)
"""What ``python -m benchmarks.planning`` fits to the 52 figures of the ZeRO++ paper."""


SLOWEST = 1e-3
"""Gbit/s: no slower network is meant."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices; ``inter_gbit`` is what leaves a node, all its links together."""

    nodes: int
    per_node: int
    device: str
    inter_gbit: float

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.per_node < 1:
            raise ValueError(f"{self.nodes} nodes of {self.per_node}: both have to be 1 or more")
        if self.device not in DEVICES:
            raise ValueError(f"gpu {self.device!r} is unknown; possible: {', '.join(DEVICES)}")
        if not SLOWEST <= self.inter_gbit < float("inf"):
            raise ValueError(f"{self.inter_gbit} Gbit/s between nodes: has to be {SLOWEST} or more")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.per_node

    def machine(self, efficiency: Efficiency) -> cost.Machine:
        """Return the constants of the cost model."""
        device = DEVICES[self.device]
        inside = cost.LINKS[device.link]
        between = replace(
            cost.LINKS["infiniband 100gbit"],
            bandwidth=self.inter_gbit * 1e9 / 8 * efficiency.network,
        )
        links = (
            replace(inside, bandwidth=inside.bandwidth * efficiency.inside),
            cost.shared(between, self.per_node),
        )
        moved = device.memory_bandwidth * efficiency.codec
        codec = cost.Speed(moved / CODEC_NBYTES, moved / CODEC_NBYTES)
        copies = cost.Speed(
            device.memory_bandwidth / COPY_NBYTES, device.memory_bandwidth / COPY_NBYTES
        )
        adds = replace(copies, decode=device.memory_bandwidth / ADD_NBYTES)
        speeds = {"none": copies, "sum": adds, "int8": codec, "int4": codec}
        return cost.Machine(links, speeds, call=60e-6, piece=0.0)


@dataclass(frozen=True)
class Transformer:
    """A GPT of 16-bit parameters: equal blocks, and a root of the tied embedding and a norm."""

    layers: int
    hidden: int
    vocabulary: int = 50304

    @classmethod
    def of_size(cls, numel: float, layers: int, vocabulary: int = 50304) -> Transformer:
        """Return the one whose width, a multiple of 64, gives nearly so many parameters.

        Raises:
            ValueError: none does, within 5 %.
        """
        if not 0 < numel < float("inf") or layers < 1 or vocabulary < 1:
            raise ValueError(
                f"{numel:g} parameters, {layers} layers, a vocabulary of {vocabulary}: all have to"
                " be more than 0"
            )
        # 12·layers·h² + vocabulary·h = numel
        a, b = 12.0 * layers, float(vocabulary)
        width = ((b * b + 4 * a * numel) ** 0.5 - b) / (2 * a)
        made = cls(layers, max(round(width / 64), 1) * 64, vocabulary)
        if abs(made.numel / numel - 1) > 0.05:
            raise ValueError(
                f"{numel:g} parameters in {layers} layers: the nearest width, {made.hidden}, gives"
                f" {made.numel:.3g}; give --layers or --vocabulary that fit"
            )
        return made

    @cached_property
    def block_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a block's parameters: attention, multi-layer perceptron, two norms."""
        h = self.hidden
        vectors = ((h,), (h,), (3 * h,), (h,), (h,), (h,), (4 * h,), (h,))
        return ((3 * h, h), (h, h), (4 * h, h), (h, 4 * h), *vectors)

    @property
    def root_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parameters outside of blocks."""
        return ((self.vocabulary, self.hidden), (self.hidden,), (self.hidden,))

    @property
    def unit_numels(self) -> list[int]:
        """Parameters of each unit, the root last."""
        return [_numel(self.block_shapes)] * self.layers + [_numel(self.root_shapes)]

    @property
    def numel(self) -> int:
        """Parameters of all units."""
        return sum(self.unit_numels)

    def units(self) -> tuple[UnitModules, ...]:
        """Return the units, with parameters that have no memory."""
        shapes = [self.block_shapes] * self.layers + [self.root_shapes]
        names = [f"blocks.{i}" for i in range(self.layers)] + [""]
        return tuple(_unit(name, each) for name, each in zip(names, shapes, strict=True))


def _numel(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _unit(name: str, shapes: Sequence[tuple[int, ...]]) -> UnitModules:
    parameters = tuple(
        (str(i), nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")))
        for i, shape in enumerate(shapes)
    )
    return UnitModules(name, nn.Module(), parameters)


@dataclass(frozen=True)
class Prediction:
    """One step of one rank.

    Attributes:
        seconds: of the step.
        flops: operations per second and device; papers count 8 per parameter and token, 6 where
            nothing is computed again.
        nbytes: that the rank sends, by level, innermost first.
        busy: seconds by resource: ``compute``, ``codecs``, ``inside``, ``network``, ``latency``.
        memory: of the rank, without activations.
    """

    seconds: float
    flops: float
    nbytes: tuple[int, ...]
    busy: Mapping[str, float]
    memory: Estimate

    @property
    def bottleneck(self) -> str:
        """The resource that is busy the longest."""
        return max(self.busy, key=self.busy.__getitem__)


@dataclass(eq=False)
class Rehearsed:
    """A model's step under a configuration, to be given to any clock.

    ``per_node`` and ``nodes`` decide traffic; rates and devices do not.
    """

    model: Transformer
    config: Config
    nodes: int
    per_node: int
    script: Script = field(init=False)

    def __post_init__(self) -> None:
        # Messages of this size take the way that sends the least over the outer levels.
        tuning = assume(from_shape((self.per_node, self.nodes)), "local")
        self.script = rehearse(self.model.units(), self.config, tuning)

    @cached_property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes that the rank sends in a step, by level."""
        total = [0, 0]
        for event in self.script:
            if isinstance(event, Issue):
                for level, nbytes in sent(event.operation).items():
                    total[level] += nbytes
        return tuple(total)

    def predict(
        self, cluster: Cluster, efficiency: Efficiency, *, tokens: int, recompute: bool = True
    ) -> Prediction:
        """Return what a step costs.

        Args:
            cluster: of the nodes that were rehearsed.
            efficiency: what its resources reach.
            tokens: of a rank in a step.
            recompute: whether backward computes the forward again (activation checkpointing).
        """
        device = DEVICES[cluster.device]
        machine = cluster.machine(efficiency)
        flops = device.flops * efficiency.compute
        numels = self.model.unit_numels

        def computing(event: Compute) -> float:
            passes = (3 if recompute else 2) if event.backward else 1
            return 2 * passes * numels[event.unit] * tokens / flops

        busy = dict.fromkeys(("compute", "codecs", "inside", "network", "latency"), 0.0)
        costs: dict[int, float] = {}

        def operating(operation: Operation | Values) -> float:
            if isinstance(operation, Values):
                busy["latency"] += machine.call
                return machine.call
            hops = cost_hops(operation.plan)
            key = id(operation.plan)
            if key not in costs:
                costs[key] = cost.seconds(machine, hops)
            _add_busy(busy, machine, hops)
            return costs[key]

        owners = cluster.size if self.config.stage > 0 else 1
        last = OPTIMIZER_NBYTES * self.model.numel / owners / device.memory_bandwidth
        seconds = clock(self.script, computing, operating) + last
        busy["compute"] = last + sum(
            computing(event) for event in self.script if isinstance(event, Compute)
        )
        counted = (8 if recompute else 6) * self.model.numel * tokens
        *_, root = numels
        sizes = Model(self.model.numel, numels[0], root)
        memory = estimate(
            self.config, sizes, num_ranks=cluster.size, ranks_per_node=cluster.per_node
        )
        return Prediction(seconds, counted / seconds, self.nbytes, busy, memory)


def clock(
    script: Script,
    computing: Callable[[Compute], float],
    operating: Callable[[Operation | Values], float],
) -> float:
    """Return when a script ends.

    An operation begins when it was issued and the one before it has ended; computing goes on when
    what it waits for has ended.
    """
    now = free = 0.0
    ends: dict[int, float] = {}
    for event in script:
        if isinstance(event, Compute):
            now += computing(event)
        elif isinstance(event, Issue):
            free = max(now, free) + operating(event.operation)
            ends[id(event.operation)] = free
        else:
            now = max(now, ends[id(event.operation)])
    return max(now, free)


def sent(operation: Operation | Values, *, cut: bool = False) -> dict[int, int]:
    """Return the bytes that the rank sends, per level.

    Args:
        operation: of a script.
        cut: count the messages of pieces, as transports other than nccl send them.
    """
    rank = operation.rank
    total: dict[int, int] = {}
    if isinstance(operation, Values):
        topology = operation.topology
        for peer in range(topology.size):
            if peer != rank:
                level = topology.distance(rank, peer)
                total[level] = total.get(level, 0) + operation.nbytes
        return total
    plan = operation.plan
    if cut:
        return plan.wire_nbytes(rank)
    for index in range(len(plan.hops)):
        for message in plan.messages(index, rank):
            total[message.level] = total.get(message.level, 0) + message.wire_nbytes
    return total


def _add_busy(busy: dict[str, float], machine: cost.Machine, hops: Sequence[cost.Hop]) -> None:
    busy["latency"] += machine.call
    for hop in hops:
        for work in hop.work:
            speed = machine.speed(work.codec)
            busy["codecs"] += work.encoded / speed.encode + work.decoded / speed.decode
        for sends in hop.sends:
            name = "inside" if sends.level == 0 else "network"
            busy[name] += sends.nbytes / machine.links[sends.level].bandwidth
            busy["latency"] += machine.links[sends.level].latency
