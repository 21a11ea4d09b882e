"""Every implementation of the kernels against the definition written out one number at a time."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs import oracle, single
from tests.codecs.cases import (
    Call,
    cases,
    differences,
    expected,
    outcomes,
    texts,
    texts_of_256_bytes,
)
from tests.codecs.inputs import CODECS, DTYPES, Message, memory, messages
from zcomm import Codec
from zcomm.codecs import reference
from zcomm.codecs.wire import layout

EXAMPLES, MANY = 80, 1500
LONGEST = 150
PATTERNS = np.random.default_rng(0).permutation(65536).astype(np.uint16).view(np.uint8)
ANY_CODEC = [*CODECS, *map(Codec.parse, texts(64))]


@st.composite
def calls(draw):
    return Call(
        message=draw(messages(codecs=ANY_CODEC, longest=LONGEST)),
        codec_out=draw(st.sampled_from(ANY_CODEC)),
        dtype_out=draw(st.sampled_from(DTYPES)),
        num_wires=draw(st.integers(1, 4)),
        divisor=draw(st.sampled_from([1, 2, 3, 41, 47, 55, 2**24 + 1])),
        seed=draw(st.sampled_from([0, 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)),
    )


@settings(max_examples=EXAMPLES)
@given(calls())
def test_reference_is_the_definition(call):
    assert differences(reference, call, expected(call)) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=MANY)
@given(calls())
def test_reference_is_the_definition_on_many(call):
    assert differences(reference, call, expected(call)) == []


@functools.cache
def answer(case):
    """The inputs of a case and what the oracle says, once for all implementations."""
    inputs = case.call.inputs()
    return inputs, expected(case.call, inputs)


@pytest.mark.parametrize("case", cases("smoke"), ids=str)
def test_table(any_kernels, case):
    inputs, wanted = answer(case)
    assert differences(any_kernels, case.call, wanted, inputs) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("text", texts())
def test_whole_table(any_kernels, text):
    """The reference against the definition; the others against the reference."""
    wrong = {}
    for case in cases("full"):
        if case.text == text:
            inputs, call = case.call.inputs(), case.call
            slow = any_kernels is reference
            wanted = expected(call, inputs) if slow else outcomes(reference, call, inputs)
            wrong[str(case)] = differences(any_kernels, call, wanted, inputs)
    assert {name: different for name, different in wrong.items() if different} == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", texts_of_256_bytes())
def test_every_code_times_special_scales(any_kernels, text, dtype):
    codec = Codec.parse(text)
    starts, lengths = np.zeros(1, np.int64), np.array([codec.block * len(single.SCALES)])
    wires = [single.every_code(codec, seed) for seed in range(3)]
    decoded = [decoded_once(codec, wire.tobytes()) for wire in wires]
    out = memory(int(lengths[0]) * oracle.ITEMSIZE[dtype], 1)
    any_kernels.decode(codec, wires[0], starts, lengths, out, dtype)
    assert out.tobytes() == oracle.store(decoded[0], dtype, saturate=True)
    any_kernels.decode_reduce(codec, wires, starts, lengths, out, dtype, 3)
    (total,) = oracle.reduced([[values] for values in decoded], 3)
    assert out.tobytes() == oracle.store(total, dtype)


@functools.cache
def decoded_once(codec, wire):
    return oracle.decode(codec, wire, [codec.block * len(single.SCALES)])[0]


@pytest.mark.parametrize("text", [text for text in texts(64) if ":" in text])
def test_blocks_far_from_the_start_of_a_segment(any_kernels, text):
    """Around multiples of 2^16 elements, where an implementation may well work in pieces."""
    codec, seed, numel = Codec.parse(text), 2**40 + 9, 3 * 2**16 + 64 * 5 + 23
    x = np.random.default_rng(4).standard_normal(numel).astype(np.float32)
    wire = single.encode(any_kernels, codec, x, seed)
    decoded = single.decode(any_kernels, codec, wire, numel)
    step = 64 * codec.bits // 8
    (start,) = layout(codec, np.array([numel])).scales[:1]
    scales = wire[start:]
    for block in (0, 1, 1023, 1024, 1025, 2047, 2048, 3071, 3072, 3076, 3077):
        row = x[64 * block : 64 * block + 64]
        codes, scale = far_block(codec, row.tolist(), 64 * block, seed)
        assert wire[step * block : step * block + len(codes)].tobytes() == codes
        assert scales[2 * block : 2 * block + 2].tobytes() == scale
        alone = np.frombuffer(oracle.padded(codes) + oracle.padded(scale), np.uint8)
        found = decoded[64 * block : 64 * block + len(row)]
        wanted = oracle.decode(codec, alone, [len(row)])[0]
        assert found.tobytes() == oracle.store(wanted, "float32")


def far_block(codec, row, first, seed):
    """The codes and the scale of a block that starts at element ``first`` of its segment."""
    if codec.transform == "hadamard":
        row = oracle.hadamard(row)
    scale = oracle.scale_of(row, codec)
    codes = oracle.codes_of(row, scale, codec, first, seed)
    return oracle.packed(codes, codec.bits), oracle.store([scale], "bfloat16")


@pytest.mark.parametrize("num_wires", [1, 2, 5])
@pytest.mark.parametrize("text", texts(64))
def test_fused_kernels_are_their_parts(any_kernels, text, num_wires):
    """One wire is decoded, several are summed to float32 memory, and that is encoded."""
    codec, rng = Codec.parse(text), np.random.default_rng(num_wires)
    lengths = np.array([300, 33, 1, 64])
    starts = np.cumsum(lengths) - lengths
    codec_out = Codec.parse(rng.choice(list(texts(32))))
    message = Message(codec, "float32", starts, lengths, int(lengths.sum()), "wide", num_wires, 0)
    wires = message.wires(num_wires)
    total = memory(4 * message.numel)
    any_kernels.decode_reduce(codec, wires, starts, lengths, total, "float32", 1)
    if num_wires == 1:
        decoded = memory(4 * message.numel)
        any_kernels.decode(codec, wires[0], starts, lengths, decoded, "float32")
        assert decoded.tobytes() == total.tobytes()
    nbytes = layout(codec_out, lengths).nbytes
    fused, parts = memory(nbytes, 1, fill=1), memory(nbytes, 2, fill=2)
    any_kernels.decode_reduce_encode(codec, wires, codec_out, lengths, fused, 77)
    any_kernels.encode(codec_out, total, "float32", starts, lengths, parts, 77)
    assert fused.tobytes() == parts.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("text", ["none", "bf16", "fp16"])
def test_every_16_bit_pattern_through_the_casts(any_kernels, text, dtype):
    assert_every_pattern(any_kernels, Codec.parse(text), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("text", [text for text in texts(32) if ":" in text])
def test_every_16_bit_pattern(any_kernels, text, dtype):
    assert_every_pattern(any_kernels, Codec.parse(text), dtype)


def assert_every_pattern(kernels, codec, dtype):
    wire = memory(len(encoded_patterns(codec, dtype)))
    starts, lengths = np.zeros(1, np.int64), np.array([65536])
    kernels.encode(codec, PATTERNS, dtype, starts, lengths, wire, 3)
    assert wire.tobytes() == encoded_patterns(codec, dtype)


@functools.cache
def encoded_patterns(codec, dtype):
    return oracle.encode(codec, [oracle.load(PATTERNS, dtype)], 3)
