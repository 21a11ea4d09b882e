"""Figures of the ZeRO++ paper (arXiv 2306.10209) and of the article that announced it.

384 V100, 16 a node, links of 100 Gbit/s of which 1, 2, 4 or 8 were turned on. Figures with four
links, and with two, are read off bars of the article, which have no decimals; those with one link
and eight are the paper's table of end-to-end speeds, which round to such bars.
"""

from __future__ import annotations

from dataclasses import dataclass

NODES, PER_NODE, DEVICE, LINK_GBIT = 24, 16, "v100", 100

BASELINE, ZEROPP = "ZeRO-3", "ZeRO++"

LAYERS_HIDDEN = {18: (40, 6144), 49: (60, 8192), 91: (112, 8192), 138: (171, 8192)}
"""Layers and width by billions of parameters. The articles give neither: these are the widths of
DeepSpeed's examples of such sizes, and as many layers as make the size."""


@dataclass(frozen=True)
class Figure:
    """TFLOPs of one GPU, as published."""

    billions: int
    tokens: int
    links: int
    scheme: str
    tflops: float


# Billions of parameters, tokens of a GPU, links, ZeRO-3, ZeRO++.
_TABLE = (
    (18, 1024, 1, 14.15, 30.57),
    (49, 1024, 1, 11.27, 21.95),
    (91, 1024, 1, 11.27, 21.93),
    (138, 1024, 1, 11.25, 21.81),
    (18, 2048, 1, 25.98, 46.40),
    (49, 2048, 1, 20.06, 38.08),
    (91, 2048, 1, 19.99, 38.06),
    (138, 2048, 1, 19.96, 37.90),
    (18, 2048, 2, 37.0, 50.0),
    (138, 2048, 2, 32.0, 48.0),
    (18, 1024, 4, 25.0, 35.0),
    (49, 1024, 4, 23.0, 36.0),
    (91, 1024, 4, 23.0, 36.0),
    (138, 1024, 4, 23.0, 36.0),
    (18, 2048, 4, 40.0, 53.0),
    (49, 2048, 4, 36.0, 51.0),
    (91, 2048, 4, 36.0, 51.0),
    (138, 2048, 4, 36.0, 50.0),
    (18, 1024, 8, 31.27, 37.87),
    (49, 1024, 8, 34.54, 44.46),
    (91, 1024, 8, 34.49, 44.36),
    (138, 1024, 8, 34.19, 44.38),
    (18, 2048, 8, 47.31, 53.65),
    (49, 2048, 8, 48.05, 56.24),
    (91, 2048, 8, 47.74, 56.26),
    (138, 2048, 8, 47.55, 55.30),
)

FIGURES = tuple(
    Figure(billions, tokens, links, scheme, tflops)
    for billions, tokens, links, *pair in _TABLE
    for scheme, tflops in zip((BASELINE, ZEROPP), pair, strict=True)
)
