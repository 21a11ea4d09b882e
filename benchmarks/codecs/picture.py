"""The picture of ``--quality``: wire bytes of an element against relative MSE, a panel a source.

Codecs of about the same size crowd, so the axis of bytes is stretched where they are and cut
between. Do not assume that a codec has a point: what is exact, or nearly, is listed in the corner.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks import figures
from benchmarks.codecs.quality import Quality
from benchmarks.codecs.sources import Source
from zcomm.codecs import Codec
from zcomm.codecs.codec import DEFAULT_BLOCK

Floats = npt.NDArray[np.float64]

_COLORS = {
    "int4": "#d94801",
    "int8": "#08519c",
    "fp8_e4m3": "#238b45",
    "fp8_e5m2": "#74a857",
    "bf16": "#6a51a3",
    "fp16": "#9e7ac7",
}
_MARKERS: dict[tuple[str, str], tuple[str, Literal["full", "none"], float, str]] = {
    ("nearest", "none"): ("o", "full", 6.0, "nearest"),
    ("stochastic", "none"): ("^", "full", 8.0, "stochastic"),
    ("nearest", "hadamard"): ("D", "none", 8.5, "Hadamard"),
    ("stochastic", "hadamard"): ("^", "none", 11.0, "Hadamard and stochastic"),
}
_LEAST = 1e-8
_ZONES = ((0.495, 0.57), (0.995, 1.04), (1.96, 2.04))
_WIDTHS = (1.0, 1.0, 0.45)
_GAP = 0.16
_TICKS = (0.508, 0.516, 0.531, 0.563, 1.002, 1.008, 1.016, 1.031, 2.0)


def draw(path: Path, sources: Sequence[Source], results: Sequence[Quality]) -> None:
    """Draw the results to a file whose suffix says the format.

    Raises:
        UsageError: the file cannot be written.
    """
    figures.save(figure(sources, results), path, "--quality", dpi=120)


def figure(sources: Sequence[Source], results: Sequence[Quality]) -> Figure:
    """Return the picture, a panel a source."""
    drawn, panels = pyplot.subplots(
        1,
        len(sources),
        sharey=True,
        squeeze=False,
        figsize=(5 * len(sources), 6.8),
        layout="constrained",
    )
    for axes, source in zip(panels[0], sources, strict=True):
        _panel(axes, source, [result for result in results if result.source == source.name])
    panels[0, 0].set_ylabel("relative mean squared error")
    drawn.suptitle("Size on the wire against error: lower left is better")
    _legend(drawn)
    return drawn


def _panel(axes: Axes, source: Source, results: Sequence[Quality]) -> None:
    axes.set_title(f"{source.title}, {source.values.numel():,} elements", fontsize=11)
    axes.set_xscale("function", functions=(_stretch, _shrink))
    axes.set_yscale("log")
    axes.set_xlim(_ZONES[0][0], _ZONES[-1][1])
    axes.set_ylim(_LEAST, 0.3)
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{tick:g}" for tick in _TICKS], rotation=45, fontsize=8)
    axes.set_xlabel("wire bytes per element (cut where grey)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for (_, end), (start, _) in itertools.pairwise(_ZONES):
        axes.axvspan(end, start, color="0.93", zorder=0)
    shown = [result for result in results if result.relative_mse >= _LEAST]
    _blocks(axes, shown)
    for result in shown:
        _point(axes, result)
    _names(axes, shown)
    _list(axes, [result for result in results if result.relative_mse < _LEAST])


def _stretch(x: Floats) -> Floats:
    known, drawn = _axis()
    return np.interp(x, known, drawn)


def _shrink(x: Floats) -> Floats:
    known, drawn = _axis()
    return np.interp(x, drawn, known)


def _axis() -> tuple[list[float], list[float]]:
    """Return bytes, and where they are drawn."""
    drawn, place = [], 0.0
    for width in _WIDTHS:
        drawn += [place, place + width]
        place += width + _GAP
    return [end for zone in _ZONES for end in zone], drawn


def _point(axes: Axes, result: Quality) -> None:
    codec = Codec.parse(result.codec)
    marker, fill, size, _ = _MARKERS[codec.rounding, codec.transform]
    axes.plot(
        result.bytes_per_element,
        result.relative_mse,
        marker=marker,
        fillstyle=fill,
        markersize=size,
        markeredgewidth=1.4,
        color=_COLORS[codec.format],
        linestyle="none",
    )


def _blocks(axes: Axes, results: Sequence[Quality]) -> None:
    """Join the block sizes of a format, and say which they are where it is not the default."""
    for format in ("int4", "int8"):
        found = {
            codec.block: result
            for result in results
            if (codec := Codec.parse(result.codec)) == Codec(format, codec.block)
        }
        if not found:
            continue
        curve = [found[block] for block in sorted(found, reverse=True)]
        points = [(result.bytes_per_element, result.relative_mse) for result in curve]
        axes.plot(*zip(*points, strict=True), color=_COLORS[format], linewidth=1.2, alpha=0.6)
        for block, result in found.items():
            if block > Codec(format).block:
                _write(axes, result, str(block), (-3, 8), ha="right", fontsize=8, color="0.3")
            elif block < Codec(format).block:
                _write(axes, result, str(block), (0, -14), ha="center", fontsize=8, color="0.3")
        _write(axes, curve[-1], format, (4, 8), ha="right", **_bold(format))


def _names(axes: Axes, results: Sequence[Quality]) -> None:
    """Name the formats that are no curve."""
    for result in results:
        if result.codec.startswith("fp8") and result.codec in _COLORS:
            _write(axes, result, result.codec, (10, -3), ha="left", **_bold(result.codec))
        elif result.codec in ("bf16", "fp16"):
            _write(axes, result, result.codec, (0, 10), ha="center", **_bold(result.codec))


def _bold(format: str) -> dict[str, Any]:
    return {"color": _COLORS[format], "fontweight": "bold", "fontsize": 10}


def _write(axes: Axes, result: Quality, text: str, offset: tuple[int, int], **look: Any) -> None:
    place = (result.bytes_per_element, result.relative_mse)
    axes.annotate(text, place, xytext=offset, textcoords="offset points", **look)


def _list(axes: Axes, results: Sequence[Quality]) -> None:
    lines = [
        f"{result.codec}, {result.bytes_per_element:g} bytes: "
        + (f"{result.relative_mse:.0e}" if result.relative_mse else "exact")
        for result in results
    ]
    axes.text(0.97, 0.03, "\n".join(lines), transform=axes.transAxes, ha="right", fontsize=8.5)


def _legend(drawn: Figure) -> None:
    handles = [
        Line2D([], [], marker=marker, fillstyle=fill, markersize=size, color="0.25", label=label)
        for marker, fill, size, label in _MARKERS.values()
    ]
    for handle in handles:
        handle.set_linestyle("none")
    defaults = ", ".join(f"{format} {block}" for format, block in DEFAULT_BLOCK.items())
    title = (
        f"small numbers are block sizes, joined by lines; all others have the default: {defaults}"
    )
    drawn.legend(handles=handles, title=title, loc="outside lower center", ncols=len(handles))
