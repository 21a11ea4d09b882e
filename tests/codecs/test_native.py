"""The native kernels against the NumPy kernels: the same bytes on any input.

Every instruction set that the CPU has is tried; test_oracle.py holds the NumPy kernels to the
definition.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.inputs import CODECS, DTYPES, KINDS, Message, memory, messages
from zcomm import Codec
from zcomm.codecs import native, reference

EXAMPLES, MANY = 100, 3000
ANY = {
    "message": messages(),
    "num_wires": st.integers(1, 9),
    "divisor": st.sampled_from([1, 2, 3, 9, 41, 47, 55, 2**24 + 1]),
    "codec_out": st.sampled_from(CODECS),
}


def outcomes(chosen, message, values, wires, divisor, codec_out):
    """What the four kernels write, on memory whose other bytes must stay as they are."""
    codec, dtype, starts, lengths = message.codec, message.dtype, message.starts, message.lengths
    wire = memory(message.wire_nbytes, message.offset, fill=170)
    chosen.encode(codec, values, dtype, starts, lengths, wire)
    decoded = memory(values.nbytes, message.offset + 1, fill=85)
    chosen.decode(codec, wires[0], starts, lengths, decoded, dtype)
    total = memory(values.nbytes, message.offset + 2, fill=85)
    chosen.decode_reduce(codec, wires, starts, lengths, total, dtype, divisor)
    nbytes = Message(codec_out, dtype, starts, lengths, 0, "zero", 0, 0).wire_nbytes
    passed_on = memory(nbytes, message.offset + 3, fill=170)
    chosen.decode_reduce_encode(codec, wires, codec_out, lengths, passed_on)
    return [written.tobytes() for written in (wire, decoded, total, passed_on)]


def check(chosen, message, num_wires, divisor, codec_out):
    arguments = (message, message.values(), message.wires(num_wires), divisor, codec_out)
    names = ("encode", "decode", "decode_reduce", "decode_reduce_encode")
    pairs = zip(outcomes(chosen, *arguments), outcomes(reference, *arguments), strict=True)
    different = [name for name, (a, b) in zip(names, pairs, strict=True) if a != b]
    assert different == []


@settings(max_examples=EXAMPLES)
@given(**ANY)
def test_same_bytes(native_kernels, message, num_wires, divisor, codec_out):
    check(native_kernels, message, num_wires, divisor, codec_out)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=MANY)
@given(**ANY)
def test_same_bytes_on_many(native_kernels, message, num_wires, divisor, codec_out):
    check(native_kernels, message, num_wires, divisor, codec_out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_same_bytes_for_every_codec_and_kind(native_kernels, codec, kind):
    lengths = np.array([4096 + 2 * codec.block + 37, 0, 8192, 5], np.int64)
    starts = np.cumsum(lengths) - lengths
    for dtype in DTYPES:
        message = Message(codec, dtype, starts, lengths, int(lengths.sum()), kind, 3, 5)
        check(native_kernels, message, 3, 3, codec)


@pytest.mark.parametrize("text", ["int4", "int8", "none", "bf16", "fp16"])
def test_same_bytes_from_1024_wires(native_kernels, text):
    codec, lengths, starts = Codec.parse(text), np.array([300, 45]), np.array([50, 2])
    message = Message(codec, "float32", starts, lengths, 360, "wide", 11, 1)
    check(native_kernels, message, 1024, 1024, codec)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_same_bytes_for_every_16_bit_pattern(native_kernels, codec, dtype):
    patterns = np.random.default_rng(0).permutation(65536).astype(np.uint16).view(np.uint8)
    starts, lengths = np.zeros(1, np.int64), np.array([65536], np.int64)
    nbytes = Message(codec, dtype, starts, lengths, 65536, "zero", 0, 0).wire_nbytes
    wires = [memory(nbytes), memory(nbytes)]
    for wire, chosen in zip(wires, (native_kernels, reference), strict=True):
        chosen.encode(codec, patterns, dtype, starts, lengths, wire)
    assert wires[0].tobytes() == wires[1].tobytes()


def flushes_to_zero():
    return bool(np.array([2.0**-126], np.float32)[0] * np.float32(0.5) == 0)


@pytest.mark.parametrize("text", ["none", "bf16", "fp16", "int8", "int4"])
def test_flush_to_zero_changes_nothing(native_kernels, text):
    codec, lengths, starts = Codec.parse(text), np.array([5000]), np.array([0])
    message = Message(codec, "float32", starts, lengths, 5000, "wide", 5, 0)
    arguments = (message, message.values(), message.wires(3), 3, Codec("none"))
    expected = outcomes(native_kernels, *arguments)
    try:
        assert torch.set_flush_denormal(True)
        assert flushes_to_zero()
        assert outcomes(native_kernels, *arguments) == expected
        assert flushes_to_zero(), "the setting of the thread was not restored"
    finally:
        torch.set_flush_denormal(False)
    assert not flushes_to_zero()


def test_instruction_sets_are_ordered():
    assert native.instruction_sets()[-1] == "baseline"
