"""Files of figures: the suffix says the format, and what cannot be written is said in one line."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no display is needed, nor may one be looked for

from matplotlib import pyplot
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from benchmarks.launch import UsageError


def check(path: Path, flag: str) -> None:
    """Refuse a file whose suffix is no format of pictures; ``flag`` is where it was given.

    Raises:
        UsageError: the message says which are possible.
    """
    possible = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in possible:
        raise UsageError(f"{flag} {path}: its suffix must be one of {', '.join(possible)}")


def save(drawn: Figure, path: Path, flag: str, dpi: int) -> None:
    """Write a figure and close it.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        drawn.savefig(path, dpi=dpi)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}; give a file to write") from None
    finally:
        pyplot.close(drawn)
