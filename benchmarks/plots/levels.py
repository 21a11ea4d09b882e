"""Bytes by level: what a node sends inside itself and to other nodes for one call.

zcomm counts its own bytes at every level. Of peers only what left by the node's interface is
known, headers included, so their bars have no part inside the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.launch import UsageError
from benchmarks.plots import look
from benchmarks.plots.lines import Item, Lines, rows

_KEYS = ("operation", "nbytes", "name", "library", "level_nbytes", "interface_nbytes")
_INSIDE, _BETWEEN, _COUNTED = look.SKY, look.BLUE, look.GREY


@dataclass(frozen=True)
class Bar:
    """Bytes of one variant; ``inside`` is None where nobody counts them."""

    name: str
    inside: int | None
    between: int


def figure(files: Sequence[Lines], nbytes: int | None = None) -> Figure:
    """Return the picture, of messages of ``nbytes`` or of the largest that there are.

    Raises:
        UsageError: files without such rows.
    """
    found = rows(files, "rows of benchmarks.wire", *_KEYS)
    sizes = sorted({item["nbytes"] for item in found})
    wanted = sizes[-1] if nbytes is None else nbytes
    if wanted not in sizes:
        possible = ", ".join(str(size) for size in sizes)
        raise UsageError(f"-b {wanted}: no messages of that size; there are {possible}")
    found = [item for item in found if item["nbytes"] == wanted]
    operations = list(dict.fromkeys(item["operation"] for item in found))
    made = {name: bars([i for i in found if i["operation"] == name]) for name in operations}
    longest = max(len(each) for each in made.values())
    drawn, panels = look.panels(len(operations), 6.2, 1.5 + 0.42 * longest)
    for axes, operation in zip(panels, operations, strict=True):
        _panel(axes, made[operation])
        axes.set_title(look.words(operation), loc="left", fontsize=12, color=look.INK)
    _legend(drawn, found[0])
    return drawn


def bars(found: Sequence[Item]) -> list[Bar]:
    """Return the bars of one operation in the order of the rows."""
    made = {}
    for item in found:
        levels = item["level_nbytes"]
        if levels:
            made[item["name"]] = Bar(item["name"], sum(levels[:-1]), levels[-1])
        elif item["interface_nbytes"]:
            made[item["name"]] = Bar(item["name"], None, item["interface_nbytes"])
    return list(made.values())


def _panel(axes: Axes, shown: Sequence[Bar]) -> None:
    most = max(max(bar.between, bar.inside or 0) for bar in shown) / 1e6
    for place, bar in enumerate(shown):
        between = bar.between / 1e6
        tint = _BETWEEN if bar.inside is not None else _COUNTED
        height, offset = (0.36, 0.19) if bar.inside is not None else (0.36, 0.0)
        axes.barh(place - offset, between, height, color=tint)
        _value(axes, between, place - offset, most)
        if bar.inside is not None:
            axes.barh(place + offset, bar.inside / 1e6, height, color=_INSIDE)
            _value(axes, bar.inside / 1e6, place + offset, most)
    axes.set_yticks(range(len(shown)), [bar.name for bar in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.18)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color="0.9", lw=0.8)
    axes.set_xlabel("MB that the busiest node sends", color=look.INK)


def _value(axes: Axes, value: float, place: float, most: float) -> None:
    axes.text(
        value + most * 0.015, place, f"{value:.2f}", va="center", fontsize=8.5, color=look.INK
    )


def _legend(drawn: Figure, item: Item) -> None:
    handles = [
        Patch(color=_BETWEEN, label="to other nodes, counted by zcomm"),
        Patch(color=_INSIDE, label="inside the node, counted by zcomm"),
        Patch(color=_COUNTED, label="left by the interface, headers included"),
    ]
    title = (
        f"One call of {look.size(item['nbytes'])}, {item.get('dtype', '')}: "
        f"{item.get('num_nodes', '?')} nodes, {item.get('num_ranks', '?')} ranks"
    )
    drawn.suptitle(title, fontsize=11, color=look.INK)
    drawn.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
