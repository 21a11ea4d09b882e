"""Time over message size: a panel an operation, a curve a variant, and the floors of the wire.

Of a peer with several calls the fastest counts at every size. Lines that run together at the right
have their names pushed apart. Nothing can lie in the grey part: so many bytes take so long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from benchmarks.plots import look
from benchmarks.plots.lines import Item, Lines, rows

_KEYS = ("operation", "nbytes", "name", "library", "median")
_PEERS = {"gloo": "gloo", "mpi": "MPI"}
_ALONG = "along"
_SOLID, _DASHED = "-", "--"
_LABEL_GAP = 0.045
"""The least distance between two names, in heights of the panel."""


@dataclass(frozen=True)
class Curve:
    """Seconds by bytes of a message; half of the calls lie from ``low`` to ``high``."""

    name: str
    color: str
    style: str
    median: dict[int, float]
    low: dict[int, float]
    high: dict[int, float]


def figure(files: Sequence[Lines], _: int | None = None) -> Figure:
    """Return the picture.

    Raises:
        UsageError: files without rows of ``benchmarks.wire``.
    """
    found = rows(files, "rows of benchmarks.wire", *_KEYS)
    operations = list(dict.fromkeys(item["operation"] for item in found))
    drawn, panels = look.panels(len(operations), 7.2, 6.0)
    for axes, operation in zip(panels, operations, strict=True):
        own = [item for item in found if item["operation"] == operation]
        _panel(axes, own, curves(own), floors(own))
        axes.set_title(look.words(operation), loc="left", fontsize=12, color=look.INK)
    panels[0].set_ylabel("time of a call, ms", color=look.INK)
    drawn.suptitle(_title(found), fontsize=11, color=look.INK)
    drawn.draw_without_rendering()  # only now are the panels where they will be
    for axes in panels:
        _turn(axes)
    return drawn


def curves(found: Sequence[Item]) -> list[Curve]:
    """Return the curves of an operation, the slowest at its largest size first."""
    groups: dict[str, list[Item]] = {}
    for item in found:
        name = str(_PEERS.get(item["library"], item["name"]))
        groups.setdefault(name, []).append(item)
    made = [_curve(name, items) for name, items in groups.items()]
    return sorted(made, key=lambda curve: -curve.median[max(curve.median)])


def _curve(name: str, items: Sequence[Item]) -> Curve:
    best: dict[int, Item] = {}
    for item in items:
        old = best.get(item["nbytes"])
        if old is None or item["median"] < old["median"]:
            best[item["nbytes"]] = item
    first = items[0]
    return Curve(
        name=name,
        color=look.color(first["library"], first.get("codec")),
        style=_DASHED if name.endswith(" flat") else _SOLID,
        median={nbytes: best[nbytes]["median"] for nbytes in sorted(best)},
        low={nbytes: _percentile(best[nbytes], 25) for nbytes in sorted(best)},
        high={nbytes: _percentile(best[nbytes], 75) for nbytes in sorted(best)},
    )


def _percentile(item: Item, part: float) -> float:
    return float(np.percentile(item.get("seconds") or [item["median"]], part))


def floors(found: Sequence[Item]) -> dict[str | None, dict[int, float]]:
    """Return the floor by codec, then by bytes: the lowest of zcomm's variants."""
    made: dict[str | None, dict[int, float]] = {}
    for item in found:
        if item["library"] != "zcomm" or not item.get("floor"):
            continue
        own = made.setdefault(item.get("codec"), {})
        own[item["nbytes"]] = min(item["floor"], own.get(item["nbytes"], math.inf))
    return {codec: dict(sorted(own.items())) for codec, own in made.items()}


def _title(found: Sequence[Item]) -> str:
    item = found[0]
    place = f"{item.get('num_nodes', '?')} nodes, {item.get('num_ranks', '?')} ranks"
    link = f", links of {item['rate'] / 1e9:.3g} Gbit/s" if item.get("rate") else ""
    noisy = "; measured beside other programs" if any(i.get("noisy") for i in found) else ""
    kind = item.get("dtype", "")
    return f"Median call of {kind} messages: {place}{link}{noisy}"


def _panel(
    axes: Axes,
    found: Sequence[Item],
    drawn: Sequence[Curve],
    wire: Mapping[str | None, Mapping[int, float]],
) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for curve in drawn:
        x = list(curve.median)
        y = _milli(curve.median)
        axes.fill_between(
            x, _milli(curve.low), _milli(curve.high), color=curve.color, alpha=0.13, lw=0
        )
        axes.plot(x, y, curve.style, color=curve.color, lw=1.8, marker="o", ms=3.5)
    _sizes_axis(axes, sorted({item["nbytes"] for item in found}))
    every = [value for curve in drawn for value in (*curve.median.values(), *curve.low.values())]
    every += [value for own in wire.values() for value in own.values()]
    axes.set_ylim(min(every) * 1e3 / 1.6, max(max(_milli(c.median)) for c in drawn) * 3)
    _floors(axes, wire)
    _labels(axes, drawn)
    axes.yaxis.set_major_locator(LogLocator(10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="y", color="0.9", lw=0.8)
    axes.set_xlabel("bytes of the whole message", color=look.INK)


def _floors(axes: Axes, wire: Mapping[str | None, Mapping[int, float]]) -> None:
    """Draw the floors, each with its name along it where the curves are far away: on the left."""
    lowest = min(wire.values(), key=lambda own: list(own.values())[-1], default=None)
    for codec, own in wire.items():
        tint = look.color("zcomm", codec)
        x, y = list(own), _milli(own)
        axes.plot(x, y, ":", color=tint, lw=1.3)
        axes.annotate(
            f"wire floor, {codec or 'exact'}",
            (x[0], y[0]),
            (12, -10) if own is lowest else (2, 8),
            textcoords="offset points",
            rotation_mode="anchor",
            fontsize=8.5,
            color=tint,
            gid=_ALONG,
        )
    if lowest is not None:
        axes.fill_between(
            list(lowest), _milli(lowest), axes.get_ylim()[0] / 100, color="0.94", lw=0, zorder=0
        )


def _turn(axes: Axes) -> None:
    """Turn the names of floors as these run: time is proportional to bytes, so all alike."""
    (x, y), (far_x, far_y) = axes.transData.transform([(1, 1), (10, 10)])
    for text in axes.texts:
        if text.get_gid() == _ALONG:
            text.set_rotation(math.degrees(math.atan2(far_y - y, far_x - x)))


def _milli(values: Mapping[int, float]) -> list[float]:
    return [value * 1e3 for value in values.values()]


def _sizes_axis(axes: Axes, nbytes: Sequence[int]) -> None:
    axes.set_xlim(nbytes[0] / 1.3, nbytes[-1] * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(list(nbytes)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([look.size(n) for n in nbytes], rotation=35, ha="right", fontsize=8.5)


def _labels(axes: Axes, drawn: Sequence[Curve]) -> None:
    """Write names at the right ends, pushed apart where they would meet.

    A dashed curve has the colour of a named one, and a note says what dashes are.
    """
    solid = [curve for curve in drawn if curve.style == _SOLID]
    if len(solid) < len(drawn):
        note = "dashed: the flat algorithm"
        axes.text(0.02, 0.97, note, transform=axes.transAxes, va="top", fontsize=9, color=look.INK)
    bottom, top = (math.log(value) for value in axes.get_ylim())
    ends = [(max(curve.median), list(curve.median.values())[-1] * 1e3) for curve in solid]
    heights = [(math.log(y) - bottom) / (top - bottom) for _, y in ends]
    line: dict[str, Any] = {"arrowstyle": "-", "lw": 0.7, "shrinkA": 0, "relpos": (0, 0.5)}
    for curve, end, height in zip(solid, ends, apart(heights, _LABEL_GAP), strict=True):
        axes.annotate(
            curve.name,
            xy=end,
            xytext=(1.035, height),
            textcoords="axes fraction",
            va="center",
            fontsize=9.5,
            color=curve.color,
            annotation_clip=False,
            arrowprops=line | {"color": curve.color},
        )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return heights of at most 1, moved so that none is nearer to another than ``gap``."""
    order = np.argsort(heights, kind="stable")
    moved = np.array(heights, np.float64)
    groups: list[list[int]] = []
    for which in order:
        groups.append([int(which)])
        # Groups that meet become one, spread around the middle of what its members want.
        while (
            len(groups) > 1
            and _low(groups[-1], heights, gap) < _high(groups[-2], heights, gap) + gap
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    for group in groups:
        low = _low(group, heights, gap)
        for number, which in enumerate(group):
            moved[which] = low + number * gap
    return [float(value) for value in moved]


def _low(group: Sequence[int], heights: Sequence[float], gap: float) -> float:
    middle = sum(heights[which] for which in group) / len(group)
    return min(middle - (len(group) - 1) * gap / 2, 1 - (len(group) - 1) * gap)


def _high(group: Sequence[int], heights: Sequence[float], gap: float) -> float:
    return _low(group, heights, gap) + (len(group) - 1) * gap
