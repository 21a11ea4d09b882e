"""A case as a call on memory of some place, and the bytes that it writes compared.

Messages to be decoded are made on the host: by the reference for a sample that is compared, by the
fastest kernels there are for a timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.codecs.cases import Case
from benchmarks.codecs.places import Call, Host, Place, ones
from zcomm.codecs import Codec, Kernels, reference
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


def prepare(case: Case, place: Place, numel: int, encoder: Kernels) -> Prepared:
    """Return the case as a call on ``numel`` elements; ``encoder`` makes the messages it reads."""
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
    wires = [place.put(wire) for wire in _wires(codec, numel, case.wires, encoder)]
    read_nbytes = sum(wire.nbytes for wire in wires)
    place_of = (starts, lengths, out, case.dtype)
    if case.kernel == "decode":
        call = partial(kernels.decode, codec, wires[0], *place_of)
    elif case.kernel == "decode_reduce":
        call = partial(kernels.decode_reduce, codec, wires, *place_of, case.wires)
    else:
        call = partial(kernels.decode_reduce_encode, codec, wires, codec, lengths, out, SEED)
    return Prepared(call, out, read_nbytes + out.nbytes)


def _wires(codec: Codec, numel: int, num_wires: int, encoder: Kernels) -> Iterator[Bytes]:
    lengths, starts = np.array([numel], np.int64), np.zeros(1, np.int64)
    for seed in range(num_wires):
        wire = np.empty(layout(codec, lengths).nbytes, np.uint8)
        x = values(numel, "float32", seed=seed)
        encoder.encode(codec, x, "float32", starts, lengths, wire, SEED)
        yield wire


def values(numel: int, dtype: str, *, seed: int) -> Bytes:
    """Return the memory of normal numbers, which repeat after 2^20 of them."""
    normal = np.random.default_rng(seed).standard_normal(min(numel, 1 << 20), np.float32)
    repeated = np.resize(normal, numel)
    if dtype == "bfloat16":
        return (repeated.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return repeated.astype(dtype).view(np.uint8)


def differs(case: Case, place: Place, numel: int = SAMPLE_NUMEL) -> bool:
    """Tell whether the case and the NumPy reference differ in a byte of a sample."""
    return _result(case, place, numel) != _result(case, Host(reference), numel)


def _result(case: Case, place: Place, numel: int) -> bytes:
    prepared = prepare(case, place, numel, reference)
    prepared.call()
    return place.get(prepared.out).tobytes()
