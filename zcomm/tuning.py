"""What is known of the speed of this job, and which of several plans follows from it.

A *tuning* holds the constants of the cost model, measured or assumed, and *curves*: the seconds
that plans took at several sizes. ``zcomm tune`` (:mod:`zcomm.tune`) measures and writes one;
``zcomm.init`` reads it on rank 0 and gives it to all ranks, so that all choose alike. The *size* of
a plan is the bytes of its buffer, with 2 for every element where a codec is used. A curve belongs
to an operation, the route of its plans (their hops and formats in words), and a size of pieces.

Do not assume that a file can be read: what is damaged or of another job is a warning, and what is
assumed without it is slower, not wrong.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from topology import Topology, cost
from zcomm import environment
from zcomm.arrays import ITEMSIZE
from zcomm.plan import Plan
from zcomm.prediction import predict

SCHEMA = "zcomm.tuning/1"

NEARLY = 1.03
"""A plan that takes so much longer than the best is as good: the first one is taken then."""

Plans = tuple[Plan, ...]
"""What is executed for one operation, one after the other: two plans for an all_reduce."""


@dataclass(frozen=True)
class Key:
    """Whose seconds a curve holds."""

    operation: str
    route: str
    piece_nbytes: int | None = None

    @classmethod
    def of(cls, plans: Plans) -> Key:
        """Return the key of plans."""
        route = " ".join(plan.route for plan in plans)
        return cls(plans[0].counted_as, route, plans[0].piece_nbytes)


@dataclass(frozen=True)
class Curve:
    """Seconds at sizes in bytes, both ascending in the size."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """Interpolate, both axes logarithmic; outside the sizes take the nearest seconds."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1]
        above = bisect_right(self.sizes, size)
        left, right = self.sizes[above - 1], self.sizes[above]
        part = math.log(size / left) / math.log(right / left)
        before, after = math.log(self.seconds[above - 1]), math.log(self.seconds[above])
        return math.exp(before + part * (after - before))


@dataclass(frozen=True)
class Tuning:
    """Constants, curves, and where they come from."""

    topology: Topology
    transport: str
    machine: cost.Machine
    curves: Mapping[Key, Curve] = field(default_factory=dict)
    source: str = "assumed"

    @property
    def measured(self) -> bool:
        """Tell whether anything was measured."""
        return self.source != "assumed"

    @cached_property
    def piece_sizes(self) -> tuple[int, ...]:
        """The sizes of pieces that were measured, beside the usual ones."""
        return tuple(sorted({key.piece_nbytes for key in self.curves if key.piece_nbytes}))

    def pick(self, candidates: Sequence[Plans]) -> int:
        """Return the number of the fastest of several ways to do one operation.

        By the curves, where those with pieces of the usual size all have one, else by the cost
        model. Of plans that are nearly as fast the first is taken; so it is of threads of one
        process, which play ranks and have no links: they show what large messages would do.
        """
        if self.transport == "local" and not self.measured:
            return 0
        usual = [plans[0].piece_nbytes is None for plans in candidates]
        known = [plans for plans, is_usual in zip(candidates, usual, strict=True) if is_usual]
        if known and all(Key.of(plans) in self.curves for plans in known):
            seconds = [self.measured_seconds(plans) for plans in candidates]
        else:
            seconds = [self.model_seconds(plans) for plans in candidates]
        limit = min(seconds) * NEARLY
        # Of infinite seconds the model may make what is no number, and smaller than nothing.
        return next((number for number, value in enumerate(seconds) if value <= limit), 0)

    def measured_seconds(self, plans: Plans) -> float:
        """Return the seconds of plans by their curve; infinite without one.

        Beyond the largest size they grow as those of the model do.
        """
        curve = self.curves.get(Key.of(plans))
        size = size_of(plans)
        # Pieces are measured at large sizes only, where there are several.
        if curve is None or (plans[0].piece_nbytes and size < curve.sizes[0]):
            return math.inf
        seconds = curve.at(size)
        if size > curve.sizes[-1]:
            part = curve.sizes[-1] / size
            seconds *= self.model_seconds(plans) / self.model_seconds(plans, part)
        return seconds

    def model_seconds(self, plans: Plans, part: float = 1.0) -> float:
        """Return the seconds of plans, or of a part of their elements, by the cost model."""
        return sum(predict(self.machine, plan, self.transport, part) for plan in plans)

    def restrict(self, topology: Topology) -> Tuning:
        """Return what is known for some of the ranks: constants, and curves only for all."""
        if topology == self.topology:
            return self
        return replace(self, topology=topology, curves={})


def size_of(plans: Plans) -> int:
    """Return the size that curves are read at, see the module."""
    plan = plans[0]
    narrow = any(each.quantised for each in plans)
    return sum(
        layout.numel * (min(2, ITEMSIZE[layout.dtype]) if narrow else ITEMSIZE[layout.dtype])
        for layout in plan.layouts
    )


def assume(topology: Topology, transport: str) -> Tuning:
    """Return a tuning of which nothing was measured."""
    levels = [(level.name, max(map(len, level.groups))) for level in topology.levels]
    machine = cost.assumed(levels, device=transport == "nccl")
    return Tuning(topology, transport, machine)


def to_json(tuning: Tuning, facts: Mapping[str, Any]) -> str:
    """Return a tuning as JSON; ``facts`` say when and how it was measured."""
    machine = asdict(tuning.machine)
    curves = [
        asdict(key) | {"sizes": curve.sizes, "seconds": curve.seconds}
        for key, curve in tuning.curves.items()
    ]
    document = {
        "schema": SCHEMA,
        "zcomm": _version(),
        "digest": tuning.topology.digest(),
        "topology": tuning.topology.describe(),
        "transport": tuning.transport,
        "processor": processor(),
        **facts,
        "machine": machine,
        "curves": curves,
    }
    return json.dumps(document, indent=1)


def from_json(text: str, topology: Topology, transport: str, source: str) -> Tuning:
    """Read what :func:`to_json` wrote.

    Raises:
        ValueError: not such a text, or of another version, topology or transport.
    """
    try:
        given = json.loads(text)
        expected = {
            "schema": SCHEMA,
            "zcomm": _version(),
            "digest": topology.digest(),
            "transport": transport,
        }
        for name, value in expected.items():
            if given[name] != value:
                raise ValueError(f"{name} is {given[name]!r}, not {value!r}")
        machine = _machine(given["machine"], len(topology.levels))
        curves = dict(_curve(one) for one in given["curves"])
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a tuning of zcomm ({type(error).__name__}: {error})") from None
    return Tuning(topology, transport, machine, curves, f"{source}, measured {given.get('date')}")


def _machine(given: Mapping[str, Any], num_levels: int) -> cost.Machine:
    links = tuple(
        cost.Link(_positive(one["latency"]), _positive(one["bandwidth"]), _amount(one["processor"]))
        for one in given["links"]
    )
    if len(links) != num_levels:
        raise ValueError(f"{len(links)} links for {num_levels} levels")
    speeds = {
        str(name): cost.Speed(_positive(one["encode"]), _positive(one["decode"]))
        for name, one in given["speeds"].items()
    }
    if not speeds:
        raise ValueError("no speed of any codec")
    message = _amount(given.get("message", 0))
    return cost.Machine(links, speeds, _positive(given["call"]), _positive(given["piece"]), message)


def _curve(given: Mapping[str, Any]) -> tuple[Key, Curve]:
    piece = given["piece_nbytes"]
    nbytes = None if piece is None else max(int(_positive(piece)), 1)
    key = Key(str(given["operation"]), str(given["route"]), nbytes)
    sizes = tuple(int(_positive(size)) for size in given["sizes"])
    seconds = tuple(_positive(value) for value in given["seconds"])
    if len(sizes) != len(seconds) or not sizes or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"sizes and seconds of {key.operation} {key.route} do not belong together")
    return key, Curve(sizes, seconds)


def _positive(value: Any) -> float:
    number = _amount(value)
    if number == 0:
        raise ValueError(f"{value!r} is not a positive number")
    return number


def _amount(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{value!r} is not a number of at least 0")
    return number


@cache
def processor() -> str:
    """Return the name of this machine's processor as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version() -> str:
    from zcomm import __version__

    return __version__


def path_of(topology: Topology, transport: str) -> Path | None:
    """Return where the tuning of a job lies; None: files are turned off (``ZCOMM_TUNING=0``)."""
    folder = environment.text("ZCOMM_TUNING")
    if folder == "0":
        return None
    where = Path(folder).expanduser() if folder else environment.cache_folder() / "tuning"
    return where / f"{topology.digest()[:16]}-{transport}.json"


def read(topology: Topology, transport: str) -> str:
    """Return the text of the tuning file of a job, empty where there is none, or none to be used.

    A file that cannot be used is one warning.
    """
    path = path_of(topology, transport)
    try:
        if path is None or not path.exists():
            return ""
        text = path.read_text()
        from_json(text, topology, transport, str(path))
        # Not of the job, whose ranks may differ in it: of the machine of rank 0, where it was
        # measured, so that two clusters of one shape are told apart if they can be.
        there = json.loads(text).get("processor")
        if there != processor():
            raise ValueError(f"processor is {there!r}, not {processor()!r}")
    except (OSError, ValueError) as error:
        logging.getLogger("zcomm").warning(
            "tuning file %s is ignored: %s; `zcomm tune` writes a new one", path, _one_line(error)
        )
        return ""
    return text


def load(topology: Topology, transport: str) -> Tuning:
    """Return what :func:`read` finds, else what can be assumed."""
    text = read(topology, transport)
    if not text:
        return assume(topology, transport)
    return from_json(text, topology, transport, str(path_of(topology, transport)))


def write(path: Path, text: str) -> None:
    """Write a file at once: whoever reads it sees the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    except OSError:
        Path(file.name).unlink(missing_ok=True)
        raise


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
