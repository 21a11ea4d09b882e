"""What all pictures share: colours that colour-blind readers tell apart, and panels.

The colours are those of Okabe and Ito (2008). A codec has the same one in every picture.
"""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, INK, GREY = "#E69F00", "#56B4E9", "#222222", "#8c8c8c"
_CODECS = {None: BLUE, "int8": VERMILION, "int4": VERMILION}
_LIBRARIES = {"gloo": GREEN, "mpi": PURPLE}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def panels(num_panels: int, width: float, height: float, **more: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels beside each other."""
    drawn, axes = pyplot.subplots(
        1,
        num_panels,
        squeeze=False,
        figsize=(width * num_panels, height),
        layout="constrained",
        **more,
    )
    for each in axes[0]:
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(GREY)
        each.tick_params(colors=INK, labelsize=9)
        each.set_axisbelow(True)
    return drawn, list(axes[0])


def color(library: str, codec: str | None) -> str:
    """Return the colour of a variant."""
    if library != "zcomm":
        return _LIBRARIES.get(library, GREY)
    return _CODECS.get(codec if codec is None else codec.split(":")[0].split(",")[0], ORANGE)


def size(nbytes: float) -> str:
    """Return bytes as people write them: 64 KiB."""
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes:g} B"


def words(name: str) -> str:
    """Return the name of an operation in words."""
    return name.replace("_", "-")
