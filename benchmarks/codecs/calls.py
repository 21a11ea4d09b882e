"""A case as a call on memory of some place, and the bytes that it writes compared.

Messages to be decoded are made by the NumPy reference for a sample that is compared, and by the
place's own kernels for a timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.codecs.cases import Case
from benchmarks.codecs.places import Call, Host, Place, ones
from zcomm.codecs import Codec, reference
from zcomm.codecs.wire import ITEMSIZE, Bytes, layout

SAMPLE_NUMEL = 4 * 4096 + 1001
"""Whole blocks of every size, and short ones."""

SEED = 7
"""Of random numbers in stochastic rounding; any will do."""


@dataclass(frozen=True)
class Prepared:
    """A call of a kernel, the memory it writes, and the bytes it reads and writes."""

    call: Call
    out: Any
    nbytes: int


def prepare(case: Case, place: Place, numel: int, origin: Place) -> Prepared:
    """Return the case as a call on ``numel`` elements; ``origin`` makes the messages it reads."""
    codec = Codec.parse(case.codec)
    lengths, starts = np.array([numel], np.int64), np.zeros(1, np.int64)
    encodes = case.kernel in ("encode", "decode_reduce_encode")
    memory_nbytes = numel * ITEMSIZE.get(case.dtype, 0)
    out = place.put(ones(layout(codec, lengths).nbytes if encodes else memory_nbytes))
    kernels = place.kernels
    if case.kernel == "encode":
        x = place.put(values(numel, case.dtype, seed=0))
        call = partial(kernels.encode, codec, x, case.dtype, starts, lengths, out, SEED)
        return Prepared(call, out, x.nbytes + out.nbytes)
    wires = [_wire(codec, numel, seed, origin) for seed in range(case.wires)]
    if origin is not place:
        wires = [place.put(origin.get(wire)) for wire in wires]
    read_nbytes = sum(wire.nbytes for wire in wires)
    place_of = (starts, lengths, out, case.dtype)
    if case.kernel == "decode":
        call = partial(kernels.decode, codec, wires[0], *place_of)
    elif case.kernel == "decode_reduce":
        call = partial(kernels.decode_reduce, codec, wires, *place_of, case.wires)
    else:
        call = partial(kernels.decode_reduce_encode, codec, wires, codec, lengths, out, SEED)
    return Prepared(call, out, read_nbytes + out.nbytes)


def _wire(codec: Codec, numel: int, seed: int, origin: Place) -> Any:
    lengths, starts = np.array([numel], np.int64), np.zeros(1, np.int64)
    x = origin.put(values(numel, "float32", seed=seed))
    wire = origin.put(ones(layout(codec, lengths).nbytes))
    origin.kernels.encode(codec, x, "float32", starts, lengths, wire, SEED)
    return wire


def values(numel: int, dtype: str, *, seed: int) -> Bytes:
    """Return the memory of normal numbers, which repeat after 2^20 of them."""
    normal = np.random.default_rng(seed).standard_normal(min(numel, 1 << 20), np.float32)
    repeated = np.resize(normal, numel)
    if dtype == "bfloat16":
        return (repeated.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return repeated.astype(dtype).view(np.uint8)


def differs(case: Case, place: Place, numel: int = SAMPLE_NUMEL) -> bool:
    """Tell whether the case and the NumPy reference differ in a byte of a sample."""
    right = Host(reference)
    ours, expected = (prepare(case, each, numel, right) for each in (place, right))
    ours.call()
    expected.call()
    return not np.array_equal(place.get(ours.out), expected.out)
