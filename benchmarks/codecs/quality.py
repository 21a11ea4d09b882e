"""How much of the values a codec keeps: errors of every format and option on several sources.

*bytes* are wire bytes per element. *rel_mse* is the sum of the squared errors over the sum of the
squared values, in float64, everything decoded to float32 (``none`` to the dtype of its input).
*of bound* is the largest error as a part of the bound that ``Codec.error_bound`` computes for that
element: more than 1 is wrong. Do not compare codecs by one figure: stochastic rounding has a larger
error than nearest, and no bias.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.codecs import gradients, lines, sources
from benchmarks.codecs.options import TRAINING_STEPS, Options
from benchmarks.codecs.sources import Source
from benchmarks.launch import UsageError
from benchmarks.training import data
from benchmarks.training.model import Shape
from zcomm.codecs import Codec

_BOTH = "rounding=stochastic,transform=hadamard"
CODECS = (
    "none",
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e4m3:transform=hadamard",
    "fp8_e5m2",
    "fp8_e5m2:transform=hadamard",
    "int8:block=64",
    "int8",
    "int8:block=1024",
    "int8:rounding=stochastic",
    "int8:transform=hadamard",
    f"int8:{_BOTH}",
    "int4:block=32",
    "int4:block=64",
    "int4",
    "int4:block=256",
    "int4:rounding=stochastic",
    "int4:transform=hadamard",
    f"int4:{_BOTH}",
)
HEADER = f"#{'numel':>9} {'bytes':>7} {'rel_mse':>9} {'of bound':>8}  {'source':<10} codec"
SEED = 11


@dataclass(frozen=True)
class Quality:
    """What one codec does to one source."""

    source: str
    codec: str
    numel: int
    bytes_per_element: float
    relative_mse: float
    of_bound: float

    def row(self) -> str:
        """Return the line under :data:`HEADER`."""
        return (
            f"{self.numel:10d} {self.bytes_per_element:7.4f} {self.relative_mse:9.2e}"
            f" {self.of_bound:8.4f}  {self.source:<10} {self.codec}"
        )


def run(options: Options) -> int:
    """Measure all codecs on all sources, print, draw; return 1 if a bound does not hold."""
    draw = None if options.picture is None else _drawing(options.picture)
    given = gradients.load(options.gradients) if options.gradients else None
    print("# errors of codecs: everything is encoded and decoded once")
    print(HEADER)
    found, results = [], []
    for source in _sources(options, given):
        found.append(source)
        for codec in CODECS:
            results.append(measure(source, Codec.parse(codec)))
            print(results[-1].row(), flush=True)
    if options.json:
        lines.write(options.json, [asdict(result) for result in results])
    if draw:
        draw(found, results)
        print(f"# picture: {options.picture}")
    wrong = [result for result in results if not result.of_bound <= 1]
    for result in wrong:
        print(f"# WRONG: {result.codec} on {result.source} is beyond its bound")
    print(f"# {len(wrong)} of {len(results)} are beyond their bound")
    return 1 if wrong else 0


def _drawing(path: Path) -> Callable[[list[Source], list[Quality]], None]:
    """Return what will draw the picture, having checked that it can."""
    try:
        from benchmarks import figures
        from benchmarks.codecs import picture
    except ImportError as error:
        raise UsageError(f"--quality {path}: {error}; pip install 'zcomm[bench]'") from None
    figures.check(path, "--quality")
    return partial(picture.draw, path)


def measure(source: Source, codec: Codec) -> Quality:
    """Encode and decode a source, and compare in float64."""
    values = source.values
    wire = codec.encode(values, seed=SEED, segments=source.segments)
    dtype = values.dtype if codec.format == "none" else torch.float32
    decoded = codec.decode(wire, values.numel(), dtype, segments=source.segments)
    exact = values.double().numpy()
    error = np.abs(decoded.double().numpy() - exact)
    bound = np.concatenate([codec.error_bound(x, dtype).reshape(-1) for x in source.parts])
    return Quality(
        source.name,
        str(codec),
        values.numel(),
        wire.nbytes / values.numel(),
        float((error**2).sum() / (exact**2).sum()),
        _largest_part(error, bound),
    )


def _largest_part(error: npt.NDArray[np.float64], bound: npt.NDArray[np.float64]) -> float:
    """Return the largest error / bound; an error where none may be is infinitely too large."""
    exact = bound == 0
    if error[exact].any():
        return float("inf")
    return float(np.max(error[~exact] / bound[~exact], initial=0.0))


def _sources(options: Options, given: gradients.Gradients | None) -> Iterator[Source]:
    yield sources.normal(options.numel)
    yield sources.heavy_tailed(options.numel)
    yield sources.gradients(given or _trained(options))


def _trained(options: Options) -> gradients.Gradients:
    steps = TRAINING_STEPS
    print(f"# gradients: training the demo's model {steps} steps, less than a minute", flush=True)
    start = time.perf_counter()
    text = data.read(None, at_least=Shape().context + 1)
    losses: list[float] = []
    found = gradients.train(
        steps, text=text, shape=Shape(), on_step=lambda _, loss: losses.append(loss)
    )
    seconds = time.perf_counter() - start
    print(f"# gradients: loss {losses[0]:.3f} to {losses[-1]:.3f} in {seconds:.0f} s", flush=True)
    if options.save_gradients:
        gradients.save(options.save_gradients, found)
    return found
