"""Speed of the codec kernels on one core, beside that of memcpy in the same run.

``python -m benchmarks.codecs [-n ELEMENTS] [-r REPEATS] [-k KERNEL] [-J FILE]``. *GB/s* counts the
bytes that a kernel reads and writes; *memcpy* is the same for a copy of the float32 elements;
*ratio* is the first divided by the second, the median over repeats of pairs run one after the
other, *best* the largest of them. Seconds are CPU time of the calling thread, which does all the
work: what else the machine runs counts only where it takes caches and memory bandwidth away. Rows
start with a number, every other line with ``#``. The exit code is 1 when a kernel and the NumPy
reference differ in a byte of a sample.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from zcomm.codecs import Codec, Kernels, kernels, reference
from zcomm.codecs.wire import ITEMSIZE, Bytes, Lengths, layout

NUM_WIRES = 4
SAMPLE_NUMEL = 4 * 4096 + 1001
HEADER = (
    f"#{'numel':>11} {'kernel':>20} {'dtype':>8} {'wires':>5} {'format':>12}"
    f" {'GB/s':>7} {'Gelem/s':>7} {'memcpy':>7} {'ratio':>6} {'best':>6}  instructions"
)


@dataclass(frozen=True)
class Case:
    """A kernel on one kind of memory: ``dtype`` is the caller's side, ``wires`` are summed."""

    kernel: str
    dtype: str
    format: str
    wires: int = 1


@dataclass(frozen=True)
class Result:
    """What one case gave; speeds in 1e9 bytes or elements per second."""

    case: Case
    numel: int
    nbytes: int
    gb_per_s: float
    gelem_per_s: float
    memcpy_gb_per_s: float
    ratio: float
    best_ratio: float
    instructions: str

    def row(self) -> str:
        case = self.case
        return (
            f"{self.numel:12d} {case.kernel:>20} {case.dtype:>8} {case.wires:5d} {case.format:>12}"
            f" {self.gb_per_s:7.2f} {self.gelem_per_s:7.2f} {self.memcpy_gb_per_s:7.2f}"
            f" {self.ratio:6.2f} {self.best_ratio:6.2f}  {self.instructions}"
        )


CASES = (
    *(Case("encode", dtype, f) for f in ("int8", "int4") for dtype in ITEMSIZE),
    *(Case("decode", dtype, f) for f in ("int8", "int4") for dtype in ITEMSIZE),
    *(Case("decode_reduce", "float32", f, NUM_WIRES) for f in ("int8", "int4")),
    *(Case("decode_reduce_encode", "-", f, NUM_WIRES) for f in ("int8", "int4")),
    Case("encode", "float32", "none"),
    Case("encode", "bfloat16", "bf16"),
    Case("decode", "bfloat16", "bf16"),
    Case("decode_reduce", "float32", "none", NUM_WIRES),
    Case("decode_reduce", "bfloat16", "bf16", NUM_WIRES),
    Case("decode_reduce", "float16", "none", NUM_WIRES),
    Case("decode_reduce_encode", "-", "bf16", NUM_WIRES),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    options = _parser().parse_args(arguments)
    chosen = kernels()
    instructions = getattr(chosen, "instruction_set", lambda: "numpy")()
    print(f"# codec kernels, {instructions}, one core; memcpy of {4 * options.numel} bytes")
    print(HEADER)
    results, wrong = [], []
    for case in CASES:
        if options.kernel not in ("all", case.kernel):
            continue
        if _sample(case, chosen) != _sample(case, reference):
            wrong.append(case)
        results.append(_measure(case, chosen, options.numel, options.repeats, instructions))
        print(results[-1].row(), flush=True)
    if options.json:
        lines = (json.dumps(dataclasses.asdict(result)) for result in results)
        options.json.write_text("".join(f"{line}\n" for line in lines))
    for case in wrong:
        print(f"# WRONG: {case} differs from the reference")
    print(f"# {len(wrong)} of {len(results)} differ from the reference")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.codecs", description=__doc__.split("\n")[0])
    parser.add_argument("-n", "--numel", type=int, default=1 << 25, help="elements of a message")
    parser.add_argument("-r", "--repeats", type=int, default=7, help="timed pairs per kernel")
    parser.add_argument(
        "-k", "--kernel", default="all", choices=["all", *sorted({case.kernel for case in CASES})]
    )
    parser.add_argument("-J", "--json", type=Path, help="write the results as JSON lines")
    return parser


def _call(case: Case, chosen: Kernels, numel: int) -> tuple[Callable[[], None], Bytes, int]:
    """Return a call of the kernel, the memory it writes, and the bytes it reads and writes."""
    codec = Codec.parse(case.format)
    lengths, starts = np.array([numel], np.int64), np.zeros(1, np.int64)
    wire_nbytes = layout(codec, lengths).nbytes
    memory_nbytes = numel * ITEMSIZE.get(case.dtype, 0)
    encodes = case.kernel in ("encode", "decode_reduce_encode")
    out = np.ones(wire_nbytes if encodes else memory_nbytes, np.uint8)
    if case.kernel == "encode":
        x = _values(numel, case.dtype, seed=0)
        call = partial(chosen.encode, codec, x, case.dtype, starts, lengths, out)
        return call, out, x.nbytes + out.nbytes
    wires = list(_wires(case, codec, numel, lengths, starts))
    place = (starts, lengths, out, case.dtype)
    if case.kernel == "decode":
        call = partial(chosen.decode, codec, wires[0], *place)
    elif case.kernel == "decode_reduce":
        call = partial(chosen.decode_reduce, codec, wires, *place, NUM_WIRES)
    else:
        call = partial(chosen.decode_reduce_encode, codec, wires, codec, lengths, out)
    return call, out, case.wires * wire_nbytes + out.nbytes


def _wires(
    case: Case, codec: Codec, numel: int, lengths: Lengths, starts: Lengths
) -> Iterator[Bytes]:
    for seed in range(case.wires):
        wire = np.empty(layout(codec, lengths).nbytes, np.uint8)
        values = _values(numel, "float32", seed=seed)
        kernels().encode(codec, values, "float32", starts, lengths, wire)
        yield wire


def _values(numel: int, dtype: str, *, seed: int) -> Bytes:
    normal = np.random.default_rng(seed).standard_normal(min(numel, 1 << 20), np.float32)
    values = np.resize(normal, numel)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


def _sample(case: Case, chosen: Kernels) -> bytes:
    call, out, _ = _call(case, chosen, SAMPLE_NUMEL)
    call()
    return out.tobytes()


def _measure(case: Case, chosen: Kernels, numel: int, repeats: int, instructions: str) -> Result:
    call, _, nbytes = _call(case, chosen, numel)
    source, target = np.ones(4 * numel, np.uint8), np.ones(4 * numel, np.uint8)
    copy = partial(ctypes.memmove, target.ctypes.data, source.ctypes.data, 4 * numel)
    pairs = [(_seconds(copy), _seconds(call)) for _ in range(repeats + 1)][1:]
    ratios = [nbytes / kernel / (8 * numel / memcpy) for memcpy, kernel in pairs]
    seconds = statistics.median(kernel for _, kernel in pairs)
    return Result(
        case=case,
        numel=numel,
        nbytes=nbytes,
        gb_per_s=nbytes / seconds / 1e9,
        gelem_per_s=numel / seconds / 1e9,
        memcpy_gb_per_s=8 * numel / statistics.median(memcpy for memcpy, _ in pairs) / 1e9,
        ratio=statistics.median(ratios),
        best_ratio=max(ratios),
        instructions=instructions,
    )


def _seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


if __name__ == "__main__":
    sys.exit(main())
