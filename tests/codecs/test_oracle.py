"""The NumPy kernels, on any input, against the definition written out one number at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs import oracle
from tests.codecs.inputs import CODECS, Message, memory, messages
from zcomm import Codec
from zcomm.codecs import reference

EXAMPLES, MANY = 80, 1500
LONGEST = 150


def segments_of(message, values, dtype):
    """The values of the segments in memory, as lists of floats."""
    loaded = oracle.load(values, dtype)
    bounds = zip(message.starts.tolist(), message.lengths.tolist(), strict=True)
    return [loaded[start : start + length] for start, length in bounds]


def placed(message, before, segments, dtype, *, saturate):
    """The bytes of memory after segments were written to it."""
    size, expected = oracle.ITEMSIZE[dtype], bytearray(before.tobytes())
    for start, values in zip(message.starts.tolist(), segments, strict=True):
        stored = oracle.store(values, dtype, saturate=saturate)
        expected[start * size : (start + len(values)) * size] = stored
    return bytes(expected)


def check(message, num_wires, divisor, codec_out):
    codec, dtype = message.codec, message.dtype
    values = message.values()
    wire = memory(message.wire_nbytes, message.offset, fill=170)
    reference.encode(codec, values, dtype, message.starts, message.lengths, wire)
    segments = segments_of(message, values, dtype)
    assert wire.tobytes() == oracle.encode(codec.format, codec.block, segments)

    wires = message.wires(num_wires)
    lengths = message.lengths.tolist()
    decoded = [oracle.decode(codec.format, codec.block, wire, lengths) for wire in wires]
    before = message.values(stream=99)
    out = before.copy()
    reference.decode(codec, wires[0], message.starts, message.lengths, out, dtype)
    assert out.tobytes() == placed(message, before, decoded[0], dtype, saturate=True)

    out = before.copy()
    reference.decode_reduce(codec, wires, message.starts, message.lengths, out, dtype, divisor)
    total = oracle.reduced(decoded, divisor)
    assert out.tobytes() == placed(message, before, total, dtype, saturate=False)

    encoded = oracle.encode(codec_out.format, codec_out.block, oracle.reduced(decoded))
    out = memory(len(encoded), message.offset + 1, fill=85)
    reference.decode_reduce_encode(codec, wires, codec_out, message.lengths, out)
    assert out.tobytes() == encoded


ANY = {
    "message": messages(longest=LONGEST),
    "num_wires": st.integers(1, 4),
    "divisor": st.sampled_from([1, 2, 3, 41, 47, 55, 2**24 + 1]),
    "codec_out": st.sampled_from(CODECS),
}


@settings(max_examples=EXAMPLES)
@given(**ANY)
def test_reference_is_the_definition(message, num_wires, divisor, codec_out):
    check(message, num_wires, divisor, codec_out)


@pytest.mark.slow
@settings(max_examples=MANY)
@given(**ANY)
def test_reference_is_the_definition_on_many(message, num_wires, divisor, codec_out):
    check(message, num_wires, divisor, codec_out)


@pytest.mark.parametrize("kind", ["normal", "wide", "special", "huge"])
@pytest.mark.parametrize("text", ["int8", "int4", "int4:block=4096"])
def test_reference_is_the_definition_on_long_segments(text, kind):
    codec = Codec.parse(text)
    lengths = np.array([2 * codec.block + 3, codec.block, 1], np.int64)
    starts = np.cumsum(lengths) - lengths
    message = Message(codec, "float32", starts, lengths, int(lengths.sum()), kind, 7, 1)
    check(message, 2, 2, codec)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_pattern_through_the_casts(dtype):
    patterns = np.arange(65536, dtype=np.uint16).view(np.uint8)
    starts, lengths = np.zeros(1, np.int64), np.array([65536], np.int64)
    for codec in (Codec("none"), Codec("bf16"), Codec("fp16")):
        wire = memory(65536 * oracle.ITEMSIZE[oracle.CAST[codec.format]])
        reference.encode(codec, patterns, dtype, starts, lengths, wire)
        assert wire.tobytes() == oracle.encode(codec.format, 0, [oracle.load(patterns, dtype)])
