"""Topologies that people write: ``"8"``, ``"2x4"``, ``"2x2x4"``, ``"3+5"``, or a file.

A **shape text** is read outermost first: ``2x4`` is 2 nodes of 4 ranks, placed in blocks. ``3+5``
is two uneven nodes. Text made of digits, ``x``, ``+`` and blanks is always a shape; any other text
is the path of a file (a file called ``2x4`` is reached as ``./2x4``).
"""

import math
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path

from topology.errors import TopologyError
from topology.files import parse_named, read_text, repeat
from topology.model import Level, Topology

_SHAPE_ALPHABET = re.compile(r"[0-9xX+\s]+")
_NUMBER = re.compile(r"0*[1-9][0-9]{0,8}")
_USUAL_NAMES = ("domain", "node", "network")
_POSSIBLE = (
    "possible: '8' (one node), '2x4' (2 nodes of 4 ranks, outermost first), "
    "'3+5' (uneven nodes) or the path of a file: JSON, XML of NCCL, `nvidia-smi topo -m`"
)


def parse(spec: str | Path | Topology, size: int | None = None) -> Topology:
    """Read a topology and compare it with the number of ranks of the job.

    Args:
        spec: a shape text, the path of a file of any kind (``topology.files``), or a Topology,
            which is returned as it is. A file that describes one host stands for as many as the
            job has, with a block of ranks each: one for each GPU.
        size: number of ranks of the job; None accepts any.

    Raises:
        TopologyError: a text that is neither a shape nor a readable file, or a topology of another
            number of ranks.
    """
    if isinstance(spec, Topology):
        return _sized(spec, size, "the given topology")
    if isinstance(spec, str) and _SHAPE_ALPHABET.fullmatch(spec) and spec.strip():
        return _parse_shape(spec, size)
    if not isinstance(spec, (str, Path)) or not str(spec).strip():
        raise TopologyError(f"topology {spec!r} is no text, path or Topology; {_POSSIBLE}")
    return _sized(_read(str(spec), size), size, f"topology file {str(spec)!r}")


def flat(size: int) -> Topology:
    """Return the topology of one level: ``size`` ranks that are all equally near."""
    return from_shape((size,))


def from_shape(shape: Sequence[int]) -> Topology:
    """Return the uniform topology whose ranks are placed in blocks.

    Args:
        shape: number of positions at each level, innermost first, as ``Topology.shape`` gives it:
            ``(4, 2)`` is 2 nodes of 4 ranks.

    Raises:
        TopologyError: no level, or a number below 1.
    """
    if not shape or min(shape) < 1:
        raise TopologyError(f"a shape needs numbers of at least 1, got {tuple(shape)}")
    size = math.prod(shape)
    levels = zip(level_names(len(shape)), accumulate(shape, mul), strict=True)
    return Topology(tuple(_blocks(name, range(0, size + 1, step)) for name, step in levels))


def level_names(num_levels: int) -> tuple[str, ...]:
    """Return the names of the levels of a shape text, innermost first.

    One level is a node. Of more, the last is the network, the one below it the node, the next the
    (NVLink) domain; levels still further inside are called ``level0``, ``level1``, ….
    """
    if num_levels == 1:
        return ("node",)
    unnamed = tuple(f"level{index}" for index in range(num_levels - len(_USUAL_NAMES)))
    return unnamed + _USUAL_NAMES[-num_levels:]


def _parse_shape(text: str, size: int | None) -> Topology:
    separator = "+" if "+" in text else "x"
    parts = [part.strip() for part in text.lower().split(separator)]
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise TopologyError(f"topology {text!r} is not a shape of numbers from 1 on; {_POSSIBLE}")
    numbers = [int(part) for part in parts]
    total = sum(numbers) if separator == "+" else math.prod(numbers)
    if size is not None and total != size:
        # Compared before ranks are built: a slip of the pen must not fill the memory.
        sum_or_product = f" {separator} ".join(str(number) for number in numbers)
        arithmetic = f"{sum_or_product} = {total}" if len(numbers) > 1 else sum_or_product
        raise TopologyError(
            f"topology {text!r} describes {arithmetic} ranks, but the job has {size}; "
            f"{_shapes_of(size)}"
        )
    if separator == "x":
        return from_shape(numbers[::-1])
    bounds = [0, *accumulate(numbers)]
    return Topology((_blocks("node", bounds), _blocks("network", [0, total])))


def _blocks(name: str, bounds: Sequence[int]) -> Level:
    return Level(name, tuple(tuple(range(start, end)) for start, end in pairwise(bounds)))


def _shapes_of(size: int) -> str:
    extents = [extent for extent in range(1, size + 1) if size % extent == 0]
    shapes = [f"'{extent}x{size // extent}'" for extent in extents]
    shown = shapes if len(shapes) <= 8 else [*shapes[:4], "…", *shapes[-3:]]
    return f"possible: '{size}', {', '.join(shown)}, …"


def _read(path: str, size: int | None) -> Topology:
    """Read a file of any kind; a machine that one host describes stands for all of the job."""
    try:
        text = read_text(path)
    except OSError as error:
        raise TopologyError(
            f"topology {path!r} is neither a shape nor a readable file ({error.strerror}); "
            f"{_POSSIBLE}"
        ) from None
    system = parse_named(text, path)
    try:
        found = system.topology
    except TopologyError as error:
        raise TopologyError(f"topology file {path!r}: {error}") from None
    if size is None or system.given is not None or system.ranks or len(system.hosts) > 1:
        return found
    return repeat(found, size) or found


def _sized(topology: Topology, size: int | None, origin: str) -> Topology:
    if size is not None and topology.size != size:
        raise TopologyError(f"{origin} is of {topology.describe()}, but the job has {size} ranks")
    return topology
