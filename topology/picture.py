"""A picture of a system: nodes, NVLink islands, rails. One layout for SVG and PNG.

Nodes stand side by side; in each the GPUs (or, without GPUs, the ranks) in islands, below them the
NICs, a colour for each rail, and below all nodes the network. Links of a switch meet in a bar over
the island, also where it spans nodes; direct links are curves, as thick as they are many.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from topology.drawing import Box, Line, Shape, Sheet, Words, to_png, to_svg
from topology.system import Gpu, Nic, System

RAILS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#97bbf5", "#9c6b4e", "#ff8ab7")
GREEN, PALE_GREEN, GREY, PALE_GREY, INK = "#3ca951", "#e6f4e9", "#8c959f", "#f6f8fa", "#24292f"
MAX_HOSTS = 4
MAX_UNITS = 16
"""Of a node, and of all nodes side by side: more are too small to be read on a slide."""
UNITS_OF_SEVERAL = 8
"""Of a node, where there are several nodes."""
UNIT, GAP, MARGIN, HEIGHT = 58, 14, 24, 40
TOP_OF_NODE, ROOM_FOR_NAME, ROOM_FOR_LINKS, ROOM_FOR_RAILS = 76, 44, 76, 100


@dataclass
class _Layout:
    """Where things are: left edges by number of unit or NIC, and what was drawn until now."""

    units: dict[int, float] = field(default_factory=dict)
    nics: dict[int, float] = field(default_factory=dict)
    hosts: dict[int, tuple[float, float]] = field(default_factory=dict)
    islands: list[tuple[int, ...]] = field(default_factory=list)
    top_of_units: float = TOP_OF_NODE + ROOM_FOR_NAME

    @property
    def top_of_nics(self) -> float:
        """The upper edge of the NICs."""
        return self.top_of_units + ROOM_FOR_RAILS


def svg(system: System, title: str) -> str:
    """Return an SVG document."""
    return to_svg(draw(system, title))


def png(system: System, title: str, path: Path) -> None:
    """Write a PNG file.

    Raises:
        TopologyError: matplotlib is not installed.
    """
    to_png(draw(system, title), path)


def draw(system: System, title: str) -> Sheet:
    """Return the shapes: at most ``MAX_HOSTS`` nodes, and ``MAX_UNITS`` GPUs or ranks."""
    layout = _layout(system)
    width = max((right for _, right in layout.hosts.values()), default=0) + MARGIN
    lines = _wrapped(title, int(max(width, 560) / 8.5))
    width = max(width, 560)
    shapes: list[Shape] = [
        Words(MARGIN, 30 + 18 * number, line, 14, INK, bold=number == 0)
        for number, line in enumerate(lines[:3])
    ]
    shapes += _nodes(system, layout)
    shapes += _islands(system, layout)
    shapes += _rails(system, layout)
    shapes += _units(system, layout)
    bottom = (layout.top_of_nics if layout.nics else layout.top_of_units) + HEIGHT + 34
    shapes += _network(system, layout, bottom)
    return Sheet(width, bottom + 60, shapes)


def _wrapped(text: str, width: int) -> list[str]:
    """Break a text behind commas, but not in brackets; what is longer than a line, at blanks."""
    lines = [""]
    for clause in re.split(r"(?<=,) (?![^(]*\))", text):
        words = [clause] if len(clause) < width else clause.split()
        for word in words:
            if lines[-1] and len(lines[-1]) + len(word) >= width:
                lines.append("")
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _hosts_of_units(system: System) -> list[int]:
    return [gpu.host for gpu in system.gpus] or [rank.host for rank in system.ranks]


def _layout(system: System) -> _Layout:
    layout = _Layout()
    layout.islands = _groups(system)
    if any(system.nvlink.values()):
        layout.top_of_units += ROOM_FOR_LINKS
    host_of = _hosts_of_units(system)
    num_hosts, most = _shown(system, host_of)
    left = float(MARGIN)
    for host in range(num_hosts):
        x = left + GAP
        for island in layout.islands:
            here = [unit for unit in island if host_of[unit] == host]
            room = most - sum(1 for unit in layout.units if host_of[unit] == host)
            for unit in here[:room]:
                layout.units[unit] = x
                x += UNIT + GAP
            x += GAP if here[:room] and len(layout.islands) > 1 else 0
        right = max(x, left + 4 * (UNIT + GAP))
        first = len(system.gpus)
        nics = [first + n for n, nic in enumerate(system.nics) if nic.host == host]
        nics = _by_gpu(system, nics)[:most]
        right = max(right, left + GAP + len(nics) * (UNIT + GAP))
        for nic, place in zip(nics, _spread(left, right, len(nics)), strict=True):
            layout.nics[nic] = place
        layout.hosts[host] = left, right
        left = right + 2 * GAP
    return layout


def _shown(system: System, host_of: Sequence[int]) -> tuple[int, int]:
    """Return how many nodes are drawn, and how many GPUs or ranks of each at most."""
    largest = max((host_of.count(host) for host in range(len(system.hosts))), default=0)
    if len(system.hosts) == 1:
        return 1, MAX_UNITS
    each = min(max(largest, 1), UNITS_OF_SEVERAL)
    return min(len(system.hosts), MAX_HOSTS, MAX_UNITS // each), UNITS_OF_SEVERAL


def _groups(system: System) -> list[tuple[int, ...]]:
    """Return the islands; of ranks without GPUs the groups of the innermost level."""
    if system.gpus:
        return list(system.islands)
    return list(system.topology.levels[0].groups) if system.ranks else []


def _by_gpu(system: System, nics: Sequence[int]) -> list[int]:
    """Order NICs by the first GPU whose rail they are, so that rails cross little."""
    users = {nic: gpu for gpu, nic in reversed(list(enumerate(system.rails))) if nic is not None}
    return sorted(nics, key=lambda nic: (users.get(nic, len(system.gpus)), nic))


def _spread(left: float, right: float, number: int) -> list[float]:
    step = (right - left) / max(number, 1)
    return [left + step * (position + 0.5) - UNIT / 2 for position in range(number)]


def _nodes(system: System, layout: _Layout) -> Iterator[Shape]:
    top = layout.top_of_nics if layout.nics else layout.top_of_units
    height = top + HEIGHT + 16 - TOP_OF_NODE
    host_of = _hosts_of_units(system)
    for host, (left, right) in layout.hosts.items():
        yield Box(left, TOP_OF_NODE, right - left, height, PALE_GREY, GREY, 10)
        hidden = host_of.count(host) - sum(1 for unit in layout.units if host_of[unit] == host)
        more = f" (+ {hidden} more)" if hidden else ""
        name = system.hosts[host] or f"node {host}"
        yield Words(left + GAP, TOP_OF_NODE + 20, name + more, 12, INK, bold=True)


def _islands(system: System, layout: _Layout) -> Iterator[Shape]:
    for island in layout.islands:
        places = [layout.units[unit] for unit in island if unit in layout.units]
        if len(places) < 2:
            continue
        left, right = min(places) - 7, max(places) + UNIT + 7
        pale = PALE_GREEN if system.gpus else "#ffffff"
        line = GREEN if system.gpus else GREY
        yield Box(left, layout.top_of_units - 7, right - left, HEIGHT + 14, pale, line, 8)
    switched = [gpu.switched for gpu in system.gpus]
    for island in layout.islands:
        shown = [unit for unit in island if unit in layout.units]
        if system.gpus and len(shown) > 1 and all(switched[unit] for unit in shown):
            yield from _switch(system, layout, shown)
    yield from _curves(system, layout)


def _switch(system: System, layout: _Layout, island: Sequence[int]) -> Iterator[Shape]:
    """Draw the bar in which the links of an island meet."""
    places = [layout.units[unit] for unit in island]
    left, right, y = min(places), max(places) + UNIT, layout.top_of_units - 70
    for place in places:
        yield Line(place + UNIT / 2, y + 24, place + UNIT / 2, layout.top_of_units, GREEN, 4)
    yield Box(left, y, right - left, 26, GREEN, radius=5)
    links = system.gpus[island[0]].nvlinks
    gbytes = system.gpus[island[0]].gbytes
    words = f"NVSwitch, {links} links a GPU" + (f", {gbytes:.4g} GB/s" if gbytes else "")
    if right - left < 7 * len(words):
        words = "NVSwitch"
    yield Words((left + right) / 2, y + 17, words, 12, "#ffffff", "middle", bold=True)


def _curves(system: System, layout: _Layout) -> Iterator[Shape]:
    for a, peers in system.nvlink.items():
        for b, links in peers.items():
            if a < b and a in layout.units and b in layout.units and not system.gpus[a].switched:
                x1, x2 = (layout.units[unit] + UNIT / 2 for unit in (a, b))
                bend = 12 + min(60, abs(x2 - x1) / 9)
                yield Line(
                    x1,
                    layout.top_of_units,
                    x2,
                    layout.top_of_units,
                    GREEN,
                    1 + 0.8 * min(links, 4),
                    bend,
                )


def _rails(system: System, layout: _Layout) -> Iterator[Shape]:
    for gpu, nic in enumerate(system.rails):
        if nic in layout.nics and gpu in layout.units:
            x1, x2 = layout.units[gpu] + UNIT / 2, layout.nics[nic] + UNIT / 2
            yield Line(
                x1,
                layout.top_of_units + HEIGHT,
                x2,
                layout.top_of_nics,
                _colour(system, layout, nic),
                2.5,
            )


def _colour(system: System, layout: _Layout, nic: int) -> str:
    """Return the colour of a rail; NICs that are none are grey."""
    if nic not in system.rails:
        return GREY
    host = system.devices[nic].host
    rails = [other for other in layout.nics if system.devices[other].host == host]
    return RAILS[[other for other in rails if other in system.rails].index(nic) % len(RAILS)]


def _units(system: System, layout: _Layout) -> Iterator[Shape]:
    ranks_of: dict[int, list[str]] = {}
    for rank in system.ranks:
        if rank.gpu is not None:
            ranks_of.setdefault(rank.gpu, []).append(str(rank.rank))
    for unit, x in layout.units.items():
        yield Box(x, layout.top_of_units, UNIT, HEIGHT, "#ffffff", GREEN if system.gpus else INK)
        name = system.gpus[unit].name if system.gpus else f"rank {unit}"
        ranks = ",".join(ranks_of.get(unit, ()))
        yield Words(
            x + UNIT / 2, layout.top_of_units + (18 if ranks else 24), name, 11, INK, "middle"
        )
        if ranks:
            yield Words(x + UNIT / 2, layout.top_of_units + 32, f"rank {ranks}", 9, GREY, "middle")
    for nic, x in layout.nics.items():
        yield from _nic(system, layout, nic, x)


def _nic(system: System, layout: _Layout, number: int, x: float) -> Iterator[Shape]:
    nic = system.devices[number]
    assert not isinstance(nic, Gpu)
    yield Box(x, layout.top_of_nics, UNIT, HEIGHT, "#ffffff", _colour(system, layout, number))
    yield Words(x + UNIT / 2, layout.top_of_nics + 17, _short(nic), 10, INK, "middle")
    speed = f"{nic.gbit:g} Gbit/s" if nic.gbit else ""
    yield Words(x + UNIT / 2, layout.top_of_nics + 31, speed, 8, GREY, "middle")


def _short(nic: Nic) -> str:
    name = nic.label or nic.name
    return name if len(name) <= 9 else f"{name[:8]}…"


def _network(system: System, layout: _Layout, y: float) -> Iterator[Shape]:
    if not layout.hosts:
        return
    left = min(start for start, _ in layout.hosts.values())
    right = max(end for _, end in layout.hosts.values())
    for nic, x in layout.nics.items():
        if nic in system.rails or not system.gpus:
            middle = x + UNIT / 2
            yield Line(
                middle, layout.top_of_nics + HEIGHT, middle, y, _colour(system, layout, nic), 2.5
            )
    if not layout.nics:
        for start, end in layout.hosts.values():
            middle = (start + end) / 2
            yield Line(middle, layout.top_of_units + HEIGHT + 16, middle, y, GREY, 2.5)
    yield Box(left, y, right - left, 28, "#d0d7de", radius=5)
    hidden = len(system.hosts) - len(layout.hosts)
    words = "network" + (f" (and {hidden} more node{'s' * (hidden > 1)})" if hidden else "")
    yield Words((left + right) / 2, y + 19, words, 12, INK, "middle", bold=True)
