"""What all pictures share: colours that colour-blind readers tell apart, and how a file is made.

The colours are those of Okabe and Ito (2008). A codec has the same one in every picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed, nor may one be looked for

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from benchmarks.launch import UsageError

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, INK, GREY = "#E69F00", "#56B4E9", "#222222", "#8c8c8c"
_CODECS = {None: BLUE, "int8": VERMILION, "int4": VERMILION}
_LIBRARIES = {"gloo": GREEN, "mpi": PURPLE}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def check(path: Path) -> None:
    """Refuse a file whose suffix is no format of pictures.

    Raises:
        UsageError: the message says which are possible.
    """
    possible = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in possible:
        raise UsageError(f"-o {path}: its suffix must be one of {', '.join(possible)}")


def save(drawn: Figure, path: Path) -> None:
    """Write a figure and close it.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        drawn.savefig(path, dpi=140)
    except OSError as error:
        raise UsageError(f"-o {path}: {error.strerror}; give a file to write") from None
    finally:
        pyplot.close(drawn)


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
