"""One segment of float32 values, through one kernel, as arrays that a test can compare.

Codes are integers, or bytes for fp8; scales are bfloat16 patterns. Do not assume that anything is
checked here.
"""

import numpy as np

from tests.codecs import oracle
from tests.codecs.inputs import memory
from zcomm.codecs.wire import layout

SCALES = (
    *(0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x0D80, 0x8D80, 0x0D7F, 0x0C80, 0x0C7F),
    *(0x3F80, 0xBF80, 0x3DCC, 0x4049, 0x7B80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81),
)
FIRST = np.zeros(1, np.int64)


def encode(kernels, codec, values, seed=0):
    """The message of an array of float32 values."""
    lengths = np.array([len(values)])
    wire = memory(layout(codec, lengths).nbytes)
    values = np.ascontiguousarray(values, np.float32).view(np.uint8)
    kernels.encode(codec, values, "float32", FIRST, lengths, wire, seed)
    return wire


def decode(kernels, codec, wire, numel):
    """The ``numel`` values of a message as float32."""
    out = memory(4 * numel)
    kernels.decode(codec, wire, FIRST, np.array([numel]), out, "float32")
    return out.view(np.float32)


def round_trip(kernels, codec, values, seed=0):
    """What a receiver reads, as float32."""
    return decode(kernels, codec, encode(kernels, codec, values, seed), len(values))


def codes(codec, wire, numel):
    """The code of every element: signed, for fp8 its byte."""
    if "fp8" in codec.format:
        return wire[:numel]
    if codec.bits == 8:
        return wire[:numel].view(np.int8)
    unpacked = []
    for first in range(0, numel, codec.block):
        short = min(codec.block, numel - first)
        start = first // 2
        packed = wire[start : start + (short + 1) // 2].tolist()
        unpacked += oracle.unpacked(packed, short, 4)
    return np.array(unpacked, np.int8)


def scales(codec, wire, numel):
    """The pattern of every block's scale."""
    start, end = layout(codec, np.array([numel])).scales.tolist()
    return wire[start:end].view(np.uint16)


def message(codec, codes, scales):
    """The message of codes, as ``codes`` gives them, and of patterns, one for every block."""
    codes, scales = np.asarray(codes).astype(np.int8).view(np.uint8), np.array(scales, np.uint16)
    rows = [codes[first : first + codec.block] for first in range(0, len(codes), codec.block)]
    packed = np.concatenate([_packed(row) for row in rows] if codec.bits == 4 else rows)
    padding = [np.zeros(-part.nbytes % 16, np.uint8) for part in (packed, scales)]
    return np.concatenate([packed, padding[0], scales.view(np.uint8), padding[1]])


def every_code(codec, seed):
    """A message whose blocks hold every byte as codes, one block for every special scale."""
    rng = np.random.default_rng(seed)
    codes = np.concatenate([rng.permutation(256) for _ in SCALES]).astype(np.uint8)
    scales = rng.permutation(np.array(SCALES, np.uint16)).view(np.uint8)
    return np.concatenate([codes, scales, np.zeros(-scales.size % 16, np.uint8)])


def _packed(row):
    half = (len(row) + 1) // 2
    high = np.append(row[half:], np.zeros(len(row) % 2, np.uint8))
    return row[:half] & 15 | high << 4
