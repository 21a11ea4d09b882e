"""The native kernels against the NumPy kernels: the same bytes on any input.

Every instruction set that the CPU has is tried, and both ways in which results reach memory;
test_oracle.py holds all kernels to the definition. Memory ends where its allocation ends, so that
a sanitizer (test_sanitizers.py) sees what is read or written beyond it.
"""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.cases import texts
from tests.codecs.inputs import CODECS, DTYPES, KINDS, Message, memory, messages
from tests.marks import one_in
from zcomm import Codec, _native
from zcomm.codecs import native, reference
from zcomm.codecs.wire import ITEMSIZE, layout

EXAMPLES, MANY = 120, 3000
ANY_CODEC = [*CODECS, *map(Codec.parse, texts(64))]
NEVER = 1 << 62
FOREIGN_SCALES = (0x7F7F, 0xFF7F, 0x7E80, 0x7900, 0xF300, 1, 0)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of each kernel; ``streamed`` sends results past the caches."""

    message: Message
    codec_out: Codec
    dtype_out: str = "float32"
    num_wires: int = 3
    divisor: int = 3
    seed: int = 0
    streamed: bool = False


@st.composite
def calls(draw):
    message, streamed = draw(messages(codecs=ANY_CODEC)), draw(st.booleans())
    if streamed:
        message = dataclasses.replace(message, offset=draw(st.sampled_from([0, 16, 48, 5])))
    return Call(
        message=message,
        codec_out=draw(st.sampled_from(ANY_CODEC)),
        dtype_out=draw(st.sampled_from(DTYPES)),
        num_wires=draw(st.integers(1, 9)),
        divisor=draw(st.sampled_from([1, 2, 3, 9, 41, 47, 55, 2**24 + 1])),
        seed=draw(st.integers(0, 2**64 - 1)),
        streamed=streamed,
    )


@contextlib.contextmanager
def streaming(always):
    before = _native.stream_from(0 if always else NEVER)
    try:
        yield
    finally:
        _native.stream_from(before)


def outcomes(chosen, call, values, wires):
    """What the four kernels write, on memory whose other bytes must stay as they are."""
    message, codec, codec_out = call.message, call.message.codec, call.codec_out
    starts, lengths, dtype, offset = message.starts, message.lengths, call.dtype_out, message.offset
    out_nbytes = message.numel * ITEMSIZE[dtype]
    wire = memory(message.wire_nbytes, offset, fill=170)
    chosen.encode(codec, values, message.dtype, starts, lengths, wire, call.seed)
    decoded = memory(out_nbytes, offset, fill=85)
    chosen.decode(codec, wires[0], starts, lengths, decoded, dtype)
    total = memory(out_nbytes, offset + 2, fill=85)
    chosen.decode_reduce(codec, wires, starts, lengths, total, dtype, call.divisor)
    passed_on = memory(layout(codec_out, lengths).nbytes, offset, fill=170)
    chosen.decode_reduce_encode(codec, wires, codec_out, lengths, passed_on, call.seed)
    return [written.tobytes() for written in (wire, decoded, total, passed_on)]


def check(chosen, call):
    arguments = call, call.message.values(), call.message.wires(call.num_wires)
    names = ("encode", "decode", "decode_reduce", "decode_reduce_encode")
    with streaming(call.streamed):
        found = outcomes(chosen, *arguments)
    pairs = zip(found, outcomes(reference, *arguments), strict=True)
    different = [name for name, (a, b) in zip(names, pairs, strict=True) if a != b]
    assert different == []


@settings(max_examples=EXAMPLES)
@given(calls())
def test_same_bytes(native_kernels, call):
    check(native_kernels, call)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=MANY)
@given(calls())
def test_same_bytes_on_many(native_kernels, call):
    check(native_kernels, call)


@pytest.mark.parametrize(("codec", "kind"), one_in(3, CODECS, KINDS), ids=str)
def test_same_bytes_for_every_codec_and_kind(native_kernels, codec, kind):
    lengths = np.array([4096 + 2 * codec.block + 37, 0, 8192, 5], np.int64)
    starts = np.cumsum(lengths) - lengths
    for i, dtype in enumerate(DTYPES):
        message = Message(codec, dtype, starts, lengths, int(lengths.sum()), kind, 3, 16 * i)
        check(native_kernels, Call(message, codec, dtype, seed=7, streamed=i != 1))


@pytest.mark.parametrize("text", ["int4", "int8", "fp8_e4m3:transform=hadamard", "none", "fp16"])
def test_same_bytes_from_1024_wires(native_kernels, text):
    codec, lengths, starts = Codec.parse(text), np.array([300, 45]), np.array([50, 2])
    message = Message(codec, "float32", starts, lengths, 360, "wide", 11, 1)
    check(native_kernels, Call(message, codec, num_wires=1024, divisor=1024))


@pytest.mark.parametrize("text", ["int8:block=32", "int4:block=32", "fp8_e5m2:block=32"])
@pytest.mark.parametrize("num_wires", [2, 3, 4, 7])
def test_sums_of_what_no_encoder_writes(native_kernels, text, num_wires):
    """Scales so large that a code times a scale is infinite, though the sum of them were not."""
    codec, rng = Codec.parse(text), np.random.default_rng(num_wires)
    starts, lengths = np.zeros(1, np.int64), np.array([32 * 200])
    parts, numel = layout(codec, lengths), int(lengths[0])
    wires = [rng.integers(0, 256, parts.nbytes, np.uint8) for _ in range(num_wires)]
    for wire in wires:
        scales = rng.choice(np.array(FOREIGN_SCALES, np.uint16), 200)
        wire[int(parts.scales[0]) : int(parts.scales[-1])] = scales.view(np.uint8)
    found = [memory(4 * numel) for _ in range(2)]
    for out, chosen in zip(found, (native_kernels, reference), strict=True):
        chosen.decode_reduce(codec, wires, starts, lengths, out, "float32", 1)
    assert np.isinf(found[1].view(np.float32)).any()
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("text", ["int8", "int4:block=32", "fp8_e5m2", "int4:transform=hadamard"])
def test_every_alignment(native_kernels, text, streamed):
    codec, lengths = Codec.parse(text), np.array([4096 + 64])
    for offset in range(64):
        message = Message(codec, "float32", lengths * 0, lengths, 4160, "normal", 1, offset)
        check(native_kernels, Call(message, codec, num_wires=1, divisor=1, streamed=streamed))


def test_large_results_are_streamed_by_default():
    """So that the other tests of it are of what is in use."""
    nbytes = _native.stream_from(NEVER)
    _native.stream_from(nbytes)
    assert 1 << 20 <= nbytes <= 1 << 26


@pytest.mark.parametrize("text", ["int8", "int4:rounding=stochastic", "fp8_e4m3"])
def test_threads_at_once(native_kernels, text):
    codec, numel, count = Codec.parse(text), 300_000, 8
    x = np.random.default_rng(0).standard_normal((count, numel), np.float32)
    starts, lengths = np.zeros(1, np.int64), np.array([numel])

    def wire(i):
        out = memory(codec.wire_nbytes(numel))
        native_kernels.encode(codec, x[i].view(np.uint8), "float32", starts, lengths, out, i)
        return out.tobytes()

    with ThreadPoolExecutor(count) as threads:
        assert list(threads.map(wire, range(count))) == [wire(i) for i in range(count)]


def test_instruction_sets_are_ordered():
    names = native.instruction_sets()
    assert names == sorted(names, key=["avx512", "avx2", "baseline"].index)
    assert names[-1] == "baseline"
