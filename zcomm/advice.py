"""What would make a job faster: codecs, by what is known of its speed, and cores for its ranks.

Seconds are those of the job's table where it has a curve, else of the cost model; with assumed
constants they are what a usual machine would do. An **advice** is what is, and what would be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from topology import Topology
from zcomm import prediction
from zcomm.plan import Plan
from zcomm.planner import Planner
from zcomm.tune import numel_of

OPERATIONS = ("all_gather", "reduce_scatter")
CODECS = ("int8", "int4")
NBYTES = 2**26

WORTH, WORTH_ASSUMED = 1.1, 1.75
"""A codec is named where the operation is so much faster with it; of constants that nobody has
measured, which may be wrong by as much, only a large gain is believed."""


@dataclass(frozen=True)
class Advice:
    """What was found about a subject, and what would be better; empty where nothing would."""

    about: str
    found: str
    better: str = ""


def about_codecs(planner: Planner, topology: Topology) -> Iterator[Advice]:
    """Say for a large message what it waits for, and which codec makes it faster."""
    tensor = "bfloat16", numel_of(topology.size, NBYTES)
    for operation in OPERATIONS:
        exact = planner.executed(operation, tensor, None)
        now = _seconds(planner, exact)
        measured = planner.tuning.measured
        source = "" if measured else " (assumed)"
        waits = _waits_for(planner, exact, topology)
        found = f"64 MiB take {_ms(now)}{source}, most of it {waits}"
        coded = {
            codec: _seconds(planner, planner.executed(operation, tensor, codec)) for codec in CODECS
        }
        better = [
            f"{codec} {_ms(seconds)} ({now / seconds:.1f} times as fast)"
            for codec, seconds in coded.items()
            if now / seconds >= (WORTH if measured else WORTH_ASSUMED)
        ]
        words = f"with a codec: {', '.join(better)}" if better else ""
        none = "no codec is faster" if measured else "measure, whether a codec is faster"
        yield Advice(operation, found if better else f"{found}; {none}", words)


def about_cores(affinities: Sequence[Collection[int]]) -> Iterator[Advice]:
    """Say whether the ranks of a host, or their threads, are more than its cores.

    Args:
        affinities: of every rank of the host, the CPUs that it may run on; each has as many threads
            as torch has here.
    """
    import torch

    ranks, threads = len(affinities), torch.get_num_threads()
    cores = len({cpu for each in affinities for cpu in each})
    # What each rank may use of the cores: its own CPUs, and no more than a fair share of all.
    share = min(cores // ranks, *map(len, affinities))
    if ranks > cores:
        found = f"{ranks} ranks of this host share {cores}"
        yield Advice("cores", found, "one rank a core: what a rank waits for, it computes sooner")
    elif threads > share:
        found = f"{ranks} ranks of {threads} threads share {cores}"
        yield Advice("cores", found, f"OMP_NUM_THREADS={share}")


def _seconds(planner: Planner, plans: tuple[Plan, ...]) -> float:
    known = planner.tuning
    measured = known.measured_seconds(plans)
    return measured if measured < float("inf") else known.model_seconds(plans)


def _waits_for(planner: Planner, plans: tuple[Plan, ...], topology: Topology) -> str:
    """Name the resource that plans keep busy the longest."""
    busy: dict[int, float] = {}
    for plan in plans:
        for resource, seconds in prediction.busy(planner.tuning.machine, plan).items():
            busy[resource] = busy.get(resource, 0.0) + seconds
    longest = max(busy, key=busy.__getitem__)
    return "on the processor" if longest < 0 else f"on the {topology.levels[longest].name}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
