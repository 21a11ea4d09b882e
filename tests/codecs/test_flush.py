"""Where small numbers count as zero, and that a processor's own flush to zero changes nothing.

Two limits, both on bits: a rounded scale below 2^-100 flushes its block, an input of the Hadamard
transform below 2^-102 is zero.
"""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs import oracle, single
from tests.codecs.cases import Call, expected, outcomes, texts, texts_of_256_bytes
from tests.codecs.inputs import DTYPES, drawn, memory, messages
from zcomm import Codec, arrays

QUANTISED = [text for text in texts(64) if ":" in text]
PLAIN = [text for text in QUANTISED if "hadamard" not in text]
HADAMARD = [text for text in QUANTISED if "hadamard" in text]
SMALLEST_SCALE = 0x0D80  # 2^-100
LIMIT = np.float32(2.0**-102)


def below(value, steps=1):
    """The float32 next to a positive value, towards zero."""
    return (np.array([value], np.float32).view(np.uint32) - np.uint32(steps)).view(np.float32)[0]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("text", PLAIN)
def test_a_block_is_flushed_by_its_rounded_scale(any_kernels, text, sign):
    codec = Codec.parse(text)
    largest = oracle.largest_code(codec)
    smallest = np.float32(abs(largest) * 2.0**-100)
    rounds_up = np.float32(float(smallest) * (1 - 2.0**-8 + 2.0**-20))
    negative = 0x8000 if sign * largest < 0 and "int" in text and "stoch" not in text else 0
    for extreme, live in (
        (smallest, True),
        (below(smallest), True),
        (rounds_up, True),
        (np.float32(float(smallest) * (1 - 2.0**-8)), False),
        (np.float32(2.0**-149), False),
    ):
        x = sign * extreme * np.resize(np.array([0.25, -0.5, 0.0], np.float32), 64)
        x[9] = sign * extreme
        wire = single.encode(any_kernels, codec, x)
        wanted = SMALLEST_SCALE | negative if live else 0
        assert single.scales(codec, wire, 64).tolist() == [wanted], extreme
        assert single.codes(codec, wire, 64).any() == live
        if not live:
            assert not single.decode(any_kernels, codec, wire, 64).view(np.uint32).any()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("text", HADAMARD)
def test_inputs_of_the_transform_below_the_limit_are_zero(any_kernels, text, sign):
    """Equal values in a group: the first coefficient is their sum, the others are 0."""
    codec = Codec.parse(text)
    first = float(np.float32(32**-0.5)) * 32
    x = np.empty(64, np.float32)
    x[:32] = abs(oracle.largest_code(codec)) * 2.0**-100 / first * (1 - 2.0**-10)
    for value, live in ((LIMIT, True), (below(LIMIT), False)):
        x[32:] = sign * value
        wire = single.encode(any_kernels, codec, x)
        assert single.scales(codec, wire, 64).tolist()[0] & 0x7FFF == SMALLEST_SCALE
        assert (single.codes(codec, wire, 64)[32] != 0) == live
        assert not single.codes(codec, wire, 64)[33:].any()


@pytest.mark.parametrize("negative", [0, 0x8000])
@pytest.mark.parametrize("text", HADAMARD)
def test_inputs_of_the_inverse_below_the_limit_are_zero(any_kernels, text, negative):
    codec = Codec.parse(text)
    one = {"fp8_e4m3": 0x38, "fp8_e5m2": 0x3C}.get(codec.format, 1)
    for scale, live in ((0x0C80, True), (0x0C7F, False), (0x0001, False)):
        step = np.float32(oracle.load((scale | negative).to_bytes(2, "little"), "bfloat16")[0])
        for numel, size in ((32, 32), (3, 2), (1, 1)):
            wire = single.message(codec, [one] * numel, [scale | negative])
            found = single.decode(any_kernels, codec, wire, numel)
            wanted = np.zeros(numel, np.float32)
            wanted[0] = live * step * size * np.float32(size**-0.5)
            wanted[size:] = step
            assert found.tobytes() == (wanted + np.float32(0)).tobytes()


@contextlib.contextmanager
def flushing():
    """Have the processor take subnormal numbers for zero, in inputs and results."""
    try:
        assert torch.set_flush_denormal(True)
        assert results_are_flushed()
        assert inputs_are_flushed()
        yield
        assert results_are_flushed(), "a kernel left the thread's setting changed"
        assert inputs_are_flushed(), "a kernel left the thread's setting changed"
    finally:
        torch.set_flush_denormal(False)
    assert not results_are_flushed()
    assert not inputs_are_flushed()


def results_are_flushed():
    return bool((np.full(64, 2.0**-126, np.float32) * np.float32(0.5) == 0).all())


def inputs_are_flushed():
    return bool((np.full(64, 2.0**-149, np.float32) * np.float32(2.0**60) == 0).all())


SMALL_KINDS = ("wide", "bits", "special", "tiny", "edge", "edge_hadamard", "subnormal", "ties")


@st.composite
def small_calls(draw):
    codecs = list(map(Codec.parse, texts(64)))
    message = draw(messages(codecs=codecs, longest=300))
    return Call(
        message=dataclasses.replace(message, kind=draw(st.sampled_from(SMALL_KINDS))),
        codec_out=draw(st.sampled_from(codecs)),
        dtype_out=draw(st.sampled_from(DTYPES)),
        num_wires=draw(st.integers(1, 4)),
        divisor=draw(st.sampled_from([1, 3])),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


@settings(max_examples=60)
@given(small_calls())
def test_the_processors_flush_changes_no_byte(any_kernels, call):
    inputs = call.inputs()
    wanted = expected(call, inputs)
    with flushing():
        found = outcomes(any_kernels, call, inputs)
    assert found == wanted


@pytest.mark.parametrize("text", texts(64))
def test_the_processors_flush_changes_no_byte_of_a_long_message(any_kernels, text):
    codec, rng = Codec.parse(text), np.random.default_rng(7)
    drawn_once = [drawn(rng, kind, 4097, "float32") for kind in SMALL_KINDS for _ in range(2)]
    values = np.concatenate(drawn_once).view(np.float32)

    def computed():
        wire = single.encode(any_kernels, codec, values, 3)
        return wire, summed(any_kernels, codec, [wire, wire, wire], values.size)

    assert_flushing_changes_nothing(computed)


@pytest.mark.parametrize("text", texts_of_256_bytes())
def test_the_processors_flush_changes_no_value_of_special_scales(any_kernels, text):
    codec = Codec.parse(text)
    numel = codec.block * len(single.SCALES)
    wires = [single.every_code(codec, seed) for seed in range(2)]
    assert_flushing_changes_nothing(
        lambda: [summed(any_kernels, codec, some, numel) for some in (wires[:1], wires)]
    )


SMALL64 = np.array([1e-30, 2.0**-127, -(2.0**-149), 3e-39, 1e-45, 2.0**-1074, 0.0, -5.0])


@pytest.mark.parametrize("text", ["none", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("numel", [8, 1 << 20])
def test_the_processors_flush_does_not_reach_what_becomes_float32(text, numel):
    """Also in the threads that torch computes with, which have a mode of their own."""
    codec, x = Codec.parse(text), np.resize(SMALL64, numel)
    assert_flushing_changes_nothing(
        lambda: [codec.encode(x), codec.encode(torch.from_numpy(x)), codec.error_bound(x)]
    )
    assert codec.encode(x).tobytes() == codec.encode(x.astype(np.float32)).tobytes()


def test_the_processors_flush_does_not_reach_the_assignment_of_float32_to_float64():
    narrow = SMALL64.astype(np.float32)
    wanted = narrow.astype(np.float64)
    for convert in (np.array, torch.tensor):
        target = convert(np.zeros(8))
        with flushing():
            arrays.assign(target, convert(narrow))
        assert np.asarray(target).tobytes() == wanted.tobytes()


def summed(kernels, codec, wires, numel):
    """A third of the sum of messages, as bytes of float32."""
    out = memory(4 * numel)
    kernels.decode_reduce(codec, wires, single.FIRST, np.array([numel]), out, "float32", 3)
    return out


def assert_flushing_changes_nothing(compute):
    wanted = [array.tobytes() for array in compute()]
    with flushing():
        found = compute()
    assert [array.tobytes() for array in found] == wanted
