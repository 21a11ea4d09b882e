"""Rectangles, lines and words on a sheet, written as SVG by hand or as PNG by matplotlib.

Lengths are pixels, y grows downwards. Nothing here knows what is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from xml.sax.saxutils import escape

from topology.errors import TopologyError

FONT = "Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Box:
    """A rectangle with round corners."""

    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    stroke: str = "none"
    radius: float = 6


@dataclass(frozen=True)
class Line:
    """A line, or, with a ``bend``, a curve whose middle is so far above its ends."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    width: float = 1.5
    bend: float = 0


@dataclass(frozen=True)
class Words:
    """One line of text; ``anchor`` is start, middle or end."""

    x: float
    y: float
    text: str
    size: float = 12
    colour: str = "#24292f"
    anchor: str = "start"
    bold: bool = False


Shape = Box | Line | Words


@dataclass(frozen=True)
class Sheet:
    """Shapes, later ones above earlier ones, on a white sheet."""

    width: float
    height: float
    shapes: Sequence[Shape]


def to_svg(sheet: Sheet) -> str:
    """Return the document."""
    size = f"{sheet.width:g} {sheet.height:g}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
        f'width="{sheet.width:g}" height="{sheet.height:g}" font-family="{FONT}">'
    )
    paper = Box(0, 0, sheet.width, sheet.height, "#ffffff", radius=0)
    return "\n".join([head, *(_svg(shape) for shape in (paper, *sheet.shapes)), "</svg>", ""])


def _svg(shape: Shape) -> str:
    if isinstance(shape, Box):
        return (
            f'<rect x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" '
            f'height="{shape.height:g}" rx="{shape.radius:g}" fill="{shape.fill}" '
            f'stroke="{shape.stroke}" stroke-width="1.5"/>'
        )
    if isinstance(shape, Line):
        # The middle of a quadratic curve is half as high as its control point.
        middle = f"{(shape.x1 + shape.x2) / 2:g} {min(shape.y1, shape.y2) - 2 * shape.bend:g}"
        curve = f"Q {middle} " if shape.bend else "L "
        return (
            f'<path d="M {shape.x1:g} {shape.y1:g} {curve}{shape.x2:g} {shape.y2:g}" fill="none" '
            f'stroke="{shape.colour}" stroke-width="{shape.width:g}"/>'
        )
    weight = ' font-weight="bold"' if shape.bold else ""
    return (
        f'<text x="{shape.x:g}" y="{shape.y:g}" font-size="{shape.size:g}" fill="{shape.colour}" '
        f'text-anchor="{shape.anchor}"{weight}>{escape(_printable(shape.text))}</text>'
    )


def _printable(text: str) -> str:
    """Leave out what XML cannot hold."""
    return "".join(character if character.isprintable() else "?" for character in text)


def to_png(sheet: Sheet, path: FilePath) -> None:
    """Write a picture of twice the size in pixels.

    Raises:
        TopologyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise TopologyError(
            "a PNG needs matplotlib: pip install 'zcomm[bench]', or draw an SVG"
        ) from None
    figure = Figure(figsize=(sheet.width / 72, sheet.height / 72), dpi=144)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, sheet.width)
    axes.set_ylim(sheet.height, 0)
    axes.axis("off")
    for order, shape in enumerate(sheet.shapes):
        _paint(axes, shape, order)
    figure.savefig(path, format="png", facecolor="white")


def _paint(axes: object, shape: Shape, order: int) -> None:
    from matplotlib import patches
    from matplotlib.path import Path

    add = axes.add_patch  # type: ignore[attr-defined]
    if isinstance(shape, Box):
        add(
            patches.FancyBboxPatch(
                (shape.x, shape.y),
                shape.width,
                shape.height,
                boxstyle=f"round,pad=0,rounding_size={shape.radius}",
                facecolor=shape.fill,
                edgecolor=shape.stroke,
                zorder=order,
            )
        )
    elif isinstance(shape, Line):
        middle = ((shape.x1 + shape.x2) / 2, min(shape.y1, shape.y2) - 2 * shape.bend)
        ends = (shape.x1, shape.y1), (shape.x2, shape.y2)
        points = [ends[0], middle, ends[1]] if shape.bend else list(ends)
        codes = [Path.MOVETO, *([Path.CURVE3] * 2 if shape.bend else [Path.LINETO])]
        line = Path(points, codes)
        look = {"facecolor": "none", "edgecolor": shape.colour, "linewidth": shape.width}
        add(patches.PathPatch(line, zorder=order, **look))
    else:
        horizontal = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        axes.text(  # type: ignore[attr-defined]
            shape.x,
            shape.y,
            _printable(shape.text).replace("$", r"\$"),
            fontsize=shape.size,
            color=shape.colour,
            ha=horizontal,
            weight="bold" if shape.bold else "normal",
            zorder=order,
        )
