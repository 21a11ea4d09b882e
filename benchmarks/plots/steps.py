"""What a training step consists of: computing, communication that is waited for, all else.

Reads objects with ``name``, ``compute_s``, ``comm_s`` and ``other_s``, seconds; a panel a file.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.plots import look
from benchmarks.plots.lines import Item, Lines, rows

_KEYS = ("name", "compute_s", "comm_s", "other_s")
_PARTS = (
    ("compute_s", "computing", look.BLUE),
    ("other_s", "other work", look.SKY),
    ("comm_s", "waiting for communication", look.VERMILION),
)


def figure(files: Sequence[Lines], _: int | None = None) -> Figure:
    """Return the picture.

    Raises:
        UsageError: a file without such objects.
    """
    found = [(file.path.stem, rows([file], "training steps", *_KEYS)) for file in files]
    longest = max(len(items) for _, items in found)
    drawn, panels = look.panels(len(found), 6.8, 1.5 + 0.42 * longest)
    for axes, (title, items) in zip(panels, found, strict=True):
        _panel(axes, items)
        axes.set_title(title, loc="left", fontsize=12, color=look.INK)
    handles = [Patch(color=tint, label=label) for _, label, tint in _PARTS]
    drawn.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return drawn


def _panel(axes: Axes, items: Sequence[Item]) -> None:
    totals = [sum(item[key] for key, _, _ in _PARTS) for item in items]
    most = max(totals) or 1.0
    for place, (item, total) in enumerate(zip(items, totals, strict=True)):
        start = 0.0
        for key, _, tint in _PARTS:
            axes.barh(place, item[key], 0.62, left=start, color=tint)
            if item[key] > 0.08 * most:
                middle, ink = start + item[key] / 2, look.INK if tint == look.SKY else "w"
                axes.text(middle, place, f"{item[key]:.2f}", ha="center", va="center", color=ink)
            start += item[key]
        axes.text(total + 0.012 * most, place, f"{total:.2f} s", va="center", color=look.INK)
    axes.set_yticks(range(len(items)), [item["name"] for item in items])
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.14)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("seconds of a step", color=look.INK)
