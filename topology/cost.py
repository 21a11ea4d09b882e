"""What an exchange costs: seconds of a list of hops, from plain numbers.

Words defined here:

- **link**: what one level costs: *latency*, the seconds from one rank's send to what its peer does
  next, and *bandwidth*, the bytes per second that every rank sends while all ranks send.
- **speed** of a codec: 16-bit elements per second that one rank encodes, or decodes and adds, while
  all ranks do. What travels as it is passes a codec too: ``"none"`` copies, ``"sum"`` adds.
- **stage**: what keeps one resource busy: the processor of a rank (encoding, decoding, pieces) or
  a level's link. A pipelined operation is as slow as its slowest stage, and the others are seen
  once: before it when the pipeline fills, after it when it drains.

All ranks are taken to do the same at the same time. Do not assume a network that others use too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """One level: seconds, bytes per second of a rank, and its seconds of processor per byte."""

    latency: float
    bandwidth: float
    processor: float = 0.0


@dataclass(frozen=True)
class Speed:
    """Elements of 16 bits per second that one rank encodes, and decodes and adds."""

    encode: float
    decode: float


@dataclass(frozen=True)
class Machine:
    """The constants of a job.

    ``links`` are the levels, innermost first. ``call``: seconds of an operation that moves nothing,
    the ranks' handshake included. ``piece``: seconds of processor that a piece costs in every hop,
    ``message``: and for each of its messages there.
    """

    links: tuple[Link, ...]
    speeds: Mapping[str, Speed]
    call: float
    piece: float
    message: float = 0.0

    def speed(self, codec: str) -> Speed:
        """Return the speed of a codec; of one that was not measured, that of the slowest."""
        slowest = min(self.speeds.values(), key=lambda speed: speed.encode)
        return self.speeds.get(codec, slowest)


@dataclass(frozen=True)
class Work:
    """What a rank computes before a hop: elements that it encodes, and that it decodes."""

    codec: str
    encoded: float = 0.0
    decoded: float = 0.0


@dataclass(frozen=True)
class Sends:
    """What a rank sends over the links of one level in one hop, to so many peers."""

    level: int
    nbytes: float
    num_messages: int = 1


@dataclass(frozen=True)
class Hop:
    """What the busiest rank does in one hop of a whole operation: first work, then sends."""

    work: tuple[Work, ...] = ()
    sends: tuple[Sends, ...] = ()


@dataclass(frozen=True)
class Pieces:
    """How an operation is cut: the first and the last piece are ``head`` times smaller.

    Of two pieces only the first is.
    """

    number: int = 1
    head: float = 1.0
    in_flight: int = 1

    @property
    def each(self) -> float:
        """The part of the whole that a piece of the usual size holds."""
        num_small = min(self.number - 1, 2)
        return 1.0 / (self.number - num_small + num_small / self.head)

    @property
    def first(self) -> float:
        """The part of the whole that the first piece holds."""
        return self.each / self.head if self.number > 1 else 1.0

    @property
    def last(self) -> float:
        """The part of the whole that the last piece holds."""
        return self.each / self.head if self.number > 2 else self.each


def seconds(machine: Machine, hops: Sequence[Hop], pieces: Pieces = Pieces()) -> float:
    """Return how long an operation takes.

    1. A piece alone passes all stages, one after the other.
    2. A stage that is busy all the time begins when the first piece reaches it, and what follows it
       is done when the last piece has passed that too. The slowest stage decides.
    3. No more than ``in_flight`` pieces are under way, so that latency is hidden so far only.
    """
    if not hops:
        return machine.call
    stages = _stages(machine, hops, pieces.number)
    alone = sum(stage.alone(pieces.each) for stage in stages)
    if pieces.number == 1:
        return machine.call + alone
    busiest = max(
        _kept_busy(stages, resource, pieces) for stage in stages for resource in stage.busy
    )
    waves = (pieces.number - 1) / pieces.in_flight * alone
    return machine.call + max(busiest, alone, waves)


def busy(machine: Machine, hops: Sequence[Hop]) -> dict[int, float]:
    """Return the seconds that an operation of one piece keeps every resource busy, see below."""
    found: dict[int, float] = {}
    for stage in _stages(machine, hops, 1):
        for resource, value in stage.busy.items():
            found[resource] = found.get(resource, 0.0) + value
    return found


@dataclass(frozen=True)
class _Stage:
    """Seconds that the whole operation keeps resources busy in one place of its course.

    Resource -1 is the processor, others are levels. ``latency`` is of every piece, ``fixed`` of all
    pieces together, whatever their size.
    """

    busy: Mapping[int, float]
    latency: float = 0.0
    fixed: float = 0.0

    def alone(self, part: float) -> float:
        """Return the seconds of a piece that holds this part of the whole and meets no other."""
        return max(self.busy.values(), default=0.0) * part + self.latency


def _stages(machine: Machine, hops: Sequence[Hop], num_pieces: int) -> list[_Stage]:
    stages = []
    for hop in hops:
        work = sum(_work(machine, one) for one in hop.work)
        each = machine.piece if hop.sends else 0.0
        each += machine.message * sum(sends.num_messages for sends in hop.sends)
        stages.append(_Stage({-1: work}, latency=each, fixed=each * num_pieces))
        links = [(sends, machine.links[sends.level]) for sends in hop.sends]
        if links:
            busy = {sends.level: sends.nbytes / link.bandwidth for sends, link in links}
            busy[-1] = sum(sends.nbytes * link.processor for sends, link in links)
            stages.append(_Stage(busy, max(link.latency for _, link in links)))
    return stages


def _work(machine: Machine, work: Work) -> float:
    speed = machine.speed(work.codec)
    return work.encoded / speed.encode + work.decoded / speed.decode


def _kept_busy(stages: Sequence[_Stage], resource: int, pieces: Pieces) -> float:
    """Return the seconds of an operation whose slowest stage is this resource."""
    places = [number for number, stage in enumerate(stages) if resource in stage.busy]
    before = sum(stage.alone(pieces.first) for stage in stages[: places[0]])
    after = sum(stage.alone(pieces.last) for stage in stages[places[-1] + 1 :])
    here = [stages[number] for number in places]
    busy = sum(stage.busy[resource] + stage.fixed for stage in here)
    latency = max(stage.latency for stage in here) if resource >= 0 else 0.0
    return before + busy + latency + after


GIGA = 1e9

LINKS = {
    # One way, of one rank. NVLink: all links of a GPU, of which sm60 to sm100 have 4, 6, 12, 4, 18
    # and 18 (NCCL's topo.h has 18, 20, 20, 12, 20.6 and 40.1 GB/s for one); PCIe: 16 lanes.
    "nvlink sm60": Link(8e-6, 72 * GIGA),
    "nvlink sm70": Link(8e-6, 120 * GIGA),
    "nvlink sm80": Link(8e-6, 240 * GIGA),
    "nvlink sm86": Link(8e-6, 48 * GIGA),
    "nvlink sm90": Link(8e-6, 370.8 * GIGA),
    "nvlink sm100": Link(8e-6, 721.8 * GIGA),
    "pcie gen3": Link(12e-6, 12 * GIGA),
    "pcie gen4": Link(12e-6, 24 * GIGA),
    "pcie gen5": Link(12e-6, 48 * GIGA),
    "pcie gen6": Link(12e-6, 96 * GIGA),
    "shared memory": Link(20e-6, 4 * GIGA),
    # One way, of a node, to be shared by its ranks. Sockets: NCCL's, by processor.
    "socket": Link(12e-6, 10 * GIGA),
    "socket broadwell": Link(12e-6, 6 * GIGA),
    "socket skylake": Link(12e-6, 10 * GIGA),
    "socket sapphire rapids": Link(12e-6, 22 * GIGA),
    "socket emerald rapids": Link(12e-6, 40 * GIGA),
    "socket amd": Link(12e-6, 16 * GIGA),
    "socket arm": Link(12e-6, 6 * GIGA),
    "socket power9": Link(12e-6, 32 * GIGA),
    "ethernet 1gbit": Link(60e-6, 0.119 * GIGA),
    "ethernet 10gbit": Link(50e-6, 1.19 * GIGA),
    "ethernet 25gbit": Link(30e-6, 2.98 * GIGA),
    "ethernet 100gbit": Link(30e-6, 11.9 * GIGA),
    "infiniband 100gbit": Link(15e-6, 12 * GIGA),
    "infiniband 200gbit": Link(15e-6, 24 * GIGA),
    "infiniband 400gbit": Link(15e-6, 48 * GIGA),
    "infiniband 800gbit": Link(15e-6, 96 * GIGA),
}
"""Kinds of links, where nothing was measured: latency of one hop of ours, and bandwidth."""

# Those of the native kernels with AVX-512 on a core of its own; a GPU is limited by its memory.
_HOST_SPEEDS = {
    "none": Speed(5e9, 5e9),
    "sum": Speed(5e9, 5e9),
    "bf16": Speed(4e9, 6e9),
    "fp16": Speed(4e9, 6e9),
    "int8": Speed(4e9, 6e9),
    "int4": Speed(4e9, 6e9),
    "fp8_e4m3": Speed(1e9, 2e9),
    "fp8_e5m2": Speed(1e9, 2e9),
}
_DEVICE_SPEEDS = {name: Speed(3e11, 3e11) for name in _HOST_SPEEDS}


def shared(link: Link, num_ranks: int) -> Link:
    """Return the part of a node's link that each of its ranks has."""
    return replace(link, bandwidth=link.bandwidth / num_ranks)


def assumed(levels: Sequence[tuple[str, int]], *, device: bool = False) -> Machine:
    """Return constants for a job of which nothing was measured.

    Up to the level ``node`` ranks share memory, or NVLink: of devices in several domains in a node
    the domains are joined by PCIe, and a domain above nodes is NVLink too. All other levels, where
    no level is called ``node`` all but the first, are a network of 1 Gbit/s, or of 100 Gbit/s for
    devices, one link for each node: where it is not so, measure (``zcomm tune``).

    Args:
        levels: name, and ranks of a group, of every level, innermost first.
        device: arrays lie on devices.
    """
    names = [name for name, _ in levels]
    node = names.index("node") if "node" in names else 0
    fast = "nvlink sm80" if device else "shared memory"
    kinds = []
    for number, name in enumerate(names):
        if number > node and not (device and name == "domain"):
            kinds.append("infiniband 100gbit" if device else "ethernet 1gbit")
        else:
            kinds.append("pcie gen4" if device and "domain" in names[:number] else fast)
    networks = [kind.startswith(("infiniband", "ethernet")) for kind in kinds]
    inside = [levels[node][1] if is_network else 1 for is_network in networks]
    return of_links(kinds, inside, device=device)


def of_links(kinds: Sequence[str], ranks_inside: Sequence[int], *, device: bool = False) -> Machine:
    """Return constants for a job whose levels are joined by links of these kinds.

    Args:
        kinds: names of :data:`LINKS`, innermost level first.
        ranks_inside: for every level, how many ranks share one of its links; what each rank has of
            its own, as NVLink, is shared by one.
        device: arrays lie on devices.

    Raises:
        ValueError: a kind that is not known, or not as many of both.
    """
    unknown = [kind for kind in kinds if kind not in LINKS]
    if unknown:
        raise ValueError(f"link {unknown[0]!r} is unknown; possible: {', '.join(LINKS)}")
    if len(kinds) != len(ranks_inside):
        raise ValueError(f"{len(kinds)} kinds of links for {len(ranks_inside)} levels")
    pairs = zip(kinds, ranks_inside, strict=True)
    links = tuple(shared(LINKS[kind], number) for kind, number in pairs)
    speeds = _DEVICE_SPEEDS if device else _HOST_SPEEDS
    return Machine(links, speeds, call=60e-6, piece=40e-6)
