"""Sizes of messages, and what is refused: lengths, segments, padding, kinds of arrays."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs.inputs import CODECS, memory
from zcomm import Codec, CodecError
from zcomm.codecs import native, reference

BOTH = pytest.mark.parametrize("kernels", [reference, native], ids=["numpy", "native"])


def counted_nbytes(codec, segments):
    """Bytes of a message of a quantised codec, counted block by block."""
    codes = scales = 0
    for numel in segments:
        for first in range(0, numel, codec.block):
            short = min(codec.block, numel - first)
            codes += short if codec.bits == 8 else (short + 1) // 2
            scales += 2
    return (codes + 15) // 16 * 16 + (scales + 15) // 16 * 16


@given(st.sampled_from([c for c in CODECS if c.quantised]), st.lists(st.integers(0, 10000)))
def test_quantised_sizes(codec, segments):
    nbytes = codec.wire_nbytes(sum(segments), segments=segments)
    assert nbytes == counted_nbytes(codec, segments)
    assert codec.wire_nbytes(sum(segments)) == counted_nbytes(codec, [sum(segments)])


@pytest.mark.parametrize(
    ("text", "numel", "dtype", "nbytes"),
    [
        ("int8", 0, "float32", 0),
        ("int8", 1, "float32", 32),
        ("int8", 256, "bfloat16", 256 + 16),
        ("int8", 2305, "float32", 2320 + 32),
        ("int8", 2**33, "float32", 2**33 + 2**26),
        ("int4", 257, "float32", 144 + 16),
        ("fp8_e4m3", 257, "float32", 272 + 16),
        ("fp8_e5m2:block=32,transform=hadamard", 257, "float16", 272 + 32),
        ("int4:block=32,rounding=stochastic", 31, "float32", 16 + 16),
        ("bf16", 7, "float32", 14),
        ("fp16", 7, "bfloat16", 14),
        ("none", 7, "float32", 28),
        ("none", 7, "bfloat16", 14),
        ("none", 7, torch.float16, 14),
        ("none", 7, np.float16, 14),
        ("none", 7, np.dtype("float32"), 28),
    ],
)
def test_sizes(text, numel, dtype, nbytes):
    assert Codec.parse(text).wire_nbytes(numel, dtype=dtype) == nbytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_encode_gives_what_wire_nbytes_says(codec, dtype):
    x = torch.linspace(-3, 5, 1003, dtype=torch.float64).to(dtype).view(17, 59)
    wire_dtype = torch.float32 if dtype == torch.float64 else dtype
    assert codec.encode(x).nbytes == codec.wire_nbytes(1003, dtype=wire_dtype)
    assert codec.encode(x).nbytes == codec.wire_nbytes(1003, dtype=dtype)
    segments = [3, 0, 1000]
    wire = codec.encode(x, segments=segments)
    assert wire.nbytes == codec.wire_nbytes(1003, dtype=wire_dtype, segments=segments)
    decoded = codec.decode(wire, 1003, wire_dtype, segments=segments)
    assert decoded.dtype == wire_dtype
    error = (decoded.double() - x.to(wire_dtype).double().reshape(-1)).abs().numpy()
    bounds = [codec.error_bound(x.reshape(-1)[a:b], wire_dtype) for a, b in ((0, 3), (3, 1003))]
    assert (error <= np.concatenate(bounds)).all()


def test_none_keeps_16_bit_values_as_they_are():
    x = torch.randn(1001).to(torch.bfloat16)
    wire = Codec("none").encode(x)
    assert wire.tobytes() == x.view(torch.uint8).numpy().tobytes()
    assert torch.equal(Codec("none").decode(wire, 1001, torch.bfloat16), x)


def test_views_with_a_stride_and_numpy_arrays():
    x = np.arange(60, dtype=np.float32).reshape(6, 10)
    codec = Codec("none")
    assert codec.encode(x[:, ::2]).tobytes() == x[:, ::2].tobytes()
    assert codec.encode(torch.from_numpy(x).t()).tobytes() == x.T.tobytes()
    assert codec.decode(codec.encode(x), 60, np.float32).tolist() == list(range(60))
    assert codec.decode(torch.from_numpy(codec.encode(x)), 60, "float32").dtype == np.float32


@pytest.mark.parametrize("segments", [[3, 4], [5, -1, 6], [11]])
def test_segments_that_do_not_add_up(segments):
    x = np.zeros(10, np.float32)
    for call in (
        lambda: Codec("int8").encode(x, segments=segments),
        lambda: Codec("int8").wire_nbytes(10, segments=segments),
        lambda: Codec("int8").decode(np.zeros(32, np.uint8), 10, "float32", segments=segments),
    ):
        with pytest.raises(ValueError, match="do not add up to 10 elements"):
            call()


@pytest.mark.parametrize("segments", [[4.5, 5.5], [5.0, 5], ["5", 5]])
def test_segments_that_are_no_whole_numbers(segments):
    codec, x = Codec("int8"), np.zeros(10, np.float32)
    for call in (
        lambda: codec.encode(x, segments=segments),
        lambda: codec.wire_nbytes(10, segments=segments),
        lambda: codec.decode(np.zeros(32, np.uint8), 10, "float32", segments=segments),
    ):
        with pytest.raises(TypeError, match=r"segment 0: '?[45].*: an int is expected"):
            call()


@pytest.mark.parametrize(
    ("numel", "error", "says"),
    [
        (1.5, TypeError, "numel 1.5: an int is expected"),
        (16.0, TypeError, "numel 16.0: an int is expected"),
        (-1, ValueError, "numel -1: at least 0"),
    ],
)
def test_numbers_of_elements_that_are_none(numel, error, says):
    with pytest.raises(error, match=says):
        Codec("int8").wire_nbytes(numel)
    with pytest.raises(error, match=says):
        Codec("int8").decode(np.zeros(32, np.uint8), numel, "float32")


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("numel", [16, 2**40, 2**62, 2**70])
def test_the_length_of_a_wire_is_looked_at_before_anything_is_allocated(codec, numel):
    needed = codec.wire_nbytes(numel)
    says = f"wire has 7 bytes, but {codec} needs {needed} for {numel} elements"
    with pytest.raises(ValueError, match=says):
        codec.decode(np.zeros(7, np.uint8), numel, "float32")


@pytest.mark.parametrize(
    ("x", "says"),
    [
        ([1.0, 2.0], "expected a torch tensor, a NumPy array or a CuPy array, got a list"),
        (np.zeros(3, np.int32), "dtype int32: possible are float32, float16, bfloat16"),
        (torch.zeros(3, dtype=torch.int64), "dtype int64"),
        (torch.zeros(3, device="meta"), "array on device 'meta'"),
    ],
)
def test_arrays_that_cannot_be_encoded(x, says):
    with pytest.raises(TypeError, match=says):
        Codec("int8").encode(x)


def test_numpy_has_no_bfloat16():
    codec = Codec("int8")
    with pytest.raises(TypeError, match=r"NumPy has no dtype bfloat16: give torch\.bfloat16"):
        codec.decode(codec.encode(np.ones(3, np.float32)), 3, "bfloat16")


@BOTH
@pytest.mark.parametrize("position", [2305, 2319, -1, -12])
def test_padding_that_is_not_zero(kernels, position):
    codec, starts, lengths = Codec("int8"), np.array([0]), np.array([2305])
    wire, out = memory(codec.wire_nbytes(2305)), memory(4 * 2305)
    sound = wire.copy()
    wire[position] = 1
    calls = (
        lambda: kernels.decode(codec, wire, starts, lengths, out, "float32"),
        lambda: kernels.decode_reduce(codec, [sound, wire], starts, lengths, out, "float32", 1),
        lambda: kernels.decode_reduce_encode(codec, [sound, wire], codec, lengths, sound.copy()),
    )
    for i, call in zip((0, 1, 1), calls, strict=True):
        with pytest.raises(CodecError, match=f"wire {i} is not what int8 wrote: padding"):
            call()


@BOTH
@pytest.mark.parametrize(
    ("starts", "lengths", "says"),
    [
        ([0, 91], [5, 10], "segment 1 is 10 elements from 91, but there are 100"),
        ([-1], [5], "segment 0 is 5 elements from -1, but there are 100"),
        ([0], [101], "segment 0 is 101 elements from 0, but there are 100"),
        ([5], [-3], "segment 0 is -3 elements from 5, but there are 100"),
        ([0, 5], [3], "2 starts for 1 lengths"),
    ],
)
def test_segments_outside_the_memory(kernels, starts, lengths, says):
    starts, lengths = np.array(starts), np.array(lengths)
    codec, x = Codec("none"), memory(400)
    wire = memory(4 * abs(int(lengths.sum())))
    with pytest.raises(ValueError, match=says):
        kernels.encode(codec, x, "float32", starts, lengths, wire)
    with pytest.raises(ValueError, match=says):
        kernels.decode(codec, wire, starts, lengths, x, "float32")
    with pytest.raises(ValueError, match=says):
        kernels.decode_reduce(codec, [wire], starts, lengths, x, "float32", 1)


@BOTH
def test_memory_of_a_wrong_length(kernels):
    codec, starts, lengths = Codec("int4"), np.array([0]), np.array([100])
    x, right, wrong = memory(400), memory(80), memory(81)
    with pytest.raises(ValueError, match="out has 81 bytes, but int4 needs 80"):
        kernels.encode(codec, x, "float32", starts, lengths, wrong)
    with pytest.raises(ValueError, match="wire 0 has 81 bytes, but int4 needs 80"):
        kernels.decode(codec, wrong, starts, lengths, x, "float32")
    with pytest.raises(ValueError, match="wire 1 has 81 bytes, but int4 needs 80"):
        kernels.decode_reduce(codec, [right, wrong], starts, lengths, x, "float32", 1)
    with pytest.raises(ValueError, match="0 wires given, at least 1 expected"):
        kernels.decode_reduce(codec, [], starts, lengths, x, "float32", 1)
    with pytest.raises(ValueError, match="divisor 0, at least 1 expected"):
        kernels.decode_reduce(codec, [right], starts, lengths, x, "float32", 0)
    with pytest.raises(ValueError, match="out has 81 bytes, but int4 needs 80"):
        kernels.decode_reduce_encode(codec, [right], codec, lengths, wrong)
