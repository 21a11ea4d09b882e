"""A plan in the plain numbers of the cost model: what it computes and sends, and how it is cut.

Rank 0 stands for all ranks. Do not assume that a plan is executed: nothing here needs a transport.
"""

from __future__ import annotations

from collections.abc import Sequence

from topology import cost
from zcomm import pieces
from zcomm.arrays import ITEMSIZE
from zcomm.collectives.small import fits
from zcomm.guard import PAYLOAD_NBYTES
from zcomm.plan import Hop, Plan


def predict(machine: cost.Machine, plan: Plan, transport: str, part: float = 1.0) -> float:
    """Return the seconds of a plan, or of one like it with this part of its elements."""
    if _fits(plan, part):
        crossed = [
            part * each.nbytes / machine.links[each.level].bandwidth for each in _sends(plan, 0)
        ]
        return machine.call + max(crossed, default=0.0)
    cut = cost.Pieces()
    if transport != "nccl":
        number = max(round(part * pieces.count(plan)), 1)
        cut = cost.Pieces(number, pieces.RAMP[0], pieces.in_flight(plan))
    return cost.seconds(machine, [_scaled(hop, part) for hop in cost_hops(plan)], cut)


def busy(machine: cost.Machine, plan: Plan) -> dict[int, float]:
    """Return the seconds that a plan keeps busy the processor, -1, and the links of each level."""
    return cost.busy(machine, cost_hops(plan))


def _fits(plan: Plan, part: float) -> bool:
    """Tell whether all of it travels with the handshake, see :mod:`zcomm.collectives.small`."""
    if part == 1.0 or len(plan.hops) != 1:
        return fits(plan)
    hop, size = plan.hops[0], plan.topology.size
    largest = max((plan.chunk_nbytes(hop, shard) for shard in range(size)), default=0)
    return len(plan.peers(hop, 0)) == size and part * largest <= PAYLOAD_NBYTES


def _scaled(hop: cost.Hop, part: float) -> cost.Hop:
    work = [cost.Work(one.codec, one.encoded * part, one.decoded * part) for one in hop.work]
    sends = [cost.Sends(one.level, one.nbytes * part, one.num_messages) for one in hop.sends]
    return cost.Hop(tuple(work), tuple(sends))


def cost_hops(plan: Plan) -> tuple[cost.Hop, ...]:
    """Return a plan in the plain numbers of the cost model."""
    found: tuple[cost.Hop, ...] = plan.memo("cost hops", 0, lambda made, _: _cost_hops(made))
    return found


def _cost_hops(plan: Plan) -> tuple[cost.Hop, ...]:
    if not plan.hops:
        return ()
    gathers = plan.operation == "all_gather"
    work = _gather_work(plan) if gathers else _reduce_work(plan)
    hops = []
    for index, before in enumerate(work):
        sends = _sends(plan, index) if index < len(plan.hops) else ()
        hops.append(cost.Hop(before, sends))
    return tuple(hops)


def _sends(plan: Plan, index: int) -> tuple[cost.Sends, ...]:
    found: dict[int, list[int]] = {}
    for message in plan.messages(index, 0):
        found.setdefault(message.level, []).append(message.wire_nbytes)
    return tuple(cost.Sends(level, sum(each), len(each)) for level, each in sorted(found.items()))


def _gather_work(plan: Plan) -> list[tuple[cost.Work, ...]]:
    """Encode the own shard before the first hop; decode all after the last."""
    every = range(plan.topology.size)
    own = tuple(cost.Work(name, encoded=n) for name, n in _elements(plan, plan.hops[0], [0]))
    last = tuple(cost.Work(name, decoded=n) for name, n in _elements(plan, plan.hops[-1], every))
    return [own, *((),) * (len(plan.hops) - 1), last]


def _reduce_work(plan: Plan) -> list[tuple[cost.Work, ...]]:
    """Encode all shards; between hops decode, add and encode what is on its way; add at the end."""
    work: list[list[cost.Work]] = []
    for index, hop in enumerate(plan.hops):
        cargo = [shard for peer in plan.peers(hop, 0) for shard in plan.cargo(hop, 0, peer)]
        encoded = [cost.Work(name, encoded=n) for name, n in _elements(plan, hop, cargo)]
        work.append([*(_added(plan, index - 1) if index else ()), *encoded])
    work.append(_added(plan, len(plan.hops) - 1))
    return [tuple(one) for one in work]


def _added(plan: Plan, index: int) -> list[cost.Work]:
    """Return the decoding and adding of what arrives in a hop."""
    hop = plan.hops[index]
    elements = _elements(plan, hop, plan.cargo(hop, 0, 0))
    num_peers = len(plan.peers(hop, 0))
    names = [("sum" if name == "none" else name, n) for name, n in elements]
    return [cost.Work(name, decoded=n * num_peers) for name, n in names]


def _elements(plan: Plan, hop: Hop, shards: Sequence[int]) -> list[tuple[str, float]]:
    """Return the elements of shards by codec; without one, 2 bytes count as one."""
    found: dict[str, float] = {}
    for layout, wire in zip(plan.layouts, hop.formats, strict=True):
        name = wire.codec.format if wire.codec else "none"
        weight = 1.0 if wire.codec else ITEMSIZE[wire.dtype] / 2
        numel = sum(layout.shard_numel(shard) for shard in shards)
        found[name] = found.get(name, 0.0) + numel * weight
    return list(found.items())
