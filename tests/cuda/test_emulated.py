"""The CUDA kernels, run by the emulator, and their host side: the bytes of the NumPy kernels."""

import ctypes

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.codecs.cases import Call, cases, differences, outcomes
from tests.codecs.inputs import CODECS, drawn, memory, messages
from tests.marks import one_in
from zcomm import Codec
from zcomm.codecs import cuda, instances, parameters, reference
from zcomm.codecs.wire import layout
from zcomm.errors import CodecError

BLOCKS_OF_ALL = ("int8", "int4:block=64", "fp8_e4m3", "int4:transform=hadamard", "bf16", "none")
GENERAL = tuple(
    map(
        Codec.parse,
        (
            "int8:block=32,transform=hadamard",
            "int4:block=32,rounding=stochastic",
            "fp8_e4m3:block=1024",
            "int8:block=512,rounding=stochastic,transform=hadamard",
            "none",
        ),
    )
)
PARTS = 8


def check(kernels, call):
    inputs = call.inputs()
    assert differences(kernels, call, outcomes(reference, call, inputs), inputs) == []


@pytest.mark.parametrize("case", cases("smoke"), ids=str)
def test_case(kernels, case):
    check(kernels, case.call)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_cases(kernels, part):
    for case in cases("full")[part::PARTS]:
        check(kernels, case.call)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    message=messages(),
    codec_out=st.sampled_from(CODECS),
    dtype_out=st.sampled_from(list(instances.DTYPES)),
    num_wires=st.integers(1, 9),
    divisor=st.sampled_from([1, 2, 3, 41, 64]),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_message(kernels, message, codec_out, dtype_out, num_wires, divisor, seed):
    check(kernels, Call(message, codec_out, dtype_out, num_wires, divisor, seed))


def both(kernels, nbytes, name, *arguments):
    """What a kernel and its reference write to memory at a multiple of 16, given as ``...``."""
    results = [memory(nbytes), memory(nbytes)]
    for chosen, out in zip((kernels, reference), results, strict=True):
        getattr(chosen, name)(*(out if argument is ... else argument for argument in arguments))
    return [result.tobytes() for result in results]


@pytest.mark.parametrize(
    ("codec", "dtype", "kind"),
    one_in(3, [*instances.FAST, *GENERAL], list(instances.DTYPES), ["normal", "special", "huge"]),
    ids=str,
)
def test_vectors_at_multiples_of_16(kernels, codec, dtype, kind):
    lengths, starts = np.array([9 * max(codec.block, 64) + 75]), np.zeros(1, np.int64)
    x = drawn(np.random.default_rng(3), kind, int(lengths[0]), dtype)
    nbytes = layout(codec, lengths).nbytes
    written, wire = both(kernels, nbytes, "encode", codec, x, dtype, starts, lengths, ..., 2**40)
    assert written == wire
    received, place = np.frombuffer(wire, np.uint8).copy(), (starts, lengths, ..., dtype)
    written, expected = both(kernels, x.nbytes, "decode", codec, received, *place)
    assert written == expected
    wires = [received] * 6
    written, expected = both(kernels, x.nbytes, "decode_reduce", codec, wires, *place, 3)
    assert written == expected


@pytest.mark.parametrize("kind", ["normal", "special", "huge"])
@pytest.mark.parametrize("codecs", instances.FAST_PASSES, ids=lambda pair: ">".join(map(str, pair)))
def test_every_fused_pass(device, kernels, codecs, kind):
    codec_in, codec_out = codecs
    lengths, starts = np.array([9 * codec_out.block + 75]), np.zeros(1, np.int64)
    wires = [memory(layout(codec_in, lengths).nbytes) for _ in range(9)]
    for i, wire in enumerate(wires):
        x = drawn(np.random.default_rng(i), kind, int(lengths[0]), "float32")
        reference.encode(codec_in, x, "float32", starts, lengths, wire, i)
    nbytes = layout(codec_out, lengths).nbytes
    for num_wires in (1, 2, 4, 9):
        arguments = codec_in, wires[:num_wires], codec_out, lengths, ..., 7
        written, expected = both(kernels, nbytes, "decode_reduce_encode", *arguments)
        assert written == expected
    assert set(device.launches) == {instances.decode_reduce_encode(*codecs)}


@pytest.mark.parametrize("text", BLOCKS_OF_ALL)
@pytest.mark.parametrize(
    "num_wires", [parameters.MAX_WIRES, parameters.MAX_WIRES + 1, 2 * parameters.MAX_WIRES + 1]
)
def test_more_wires_than_a_launch_takes(device, kernels, text, num_wires):
    codec, lengths, starts = Codec.parse(text), np.array([70, 0, 301]), np.array([3, 80, 90])
    rng = np.random.default_rng(num_wires)
    wires = []
    for i in range(num_wires):
        wires.append(memory(layout(codec, lengths).nbytes, i % 3))
        x = drawn(rng, "special" if i == 50 else "normal", 400, "float32")
        reference.encode(codec, x, "float32", starts, lengths, wires[-1])
    for dtype in instances.DTYPES:
        results = [memory(800 if dtype != "float32" else 1600) for _ in range(2)]
        for chosen, out in zip((kernels, reference), results, strict=True):
            chosen.decode_reduce(codec, wires, starts, lengths, out, dtype, num_wires)
        assert results[0].tobytes() == results[1].tobytes()
    launches = -(-num_wires // parameters.MAX_WIRES)
    assert len(device.launches) == len(instances.DTYPES) * launches
    results = [memory(layout(codec, lengths).nbytes, 1) for _ in range(2)]
    for chosen, out in zip((kernels, reference), results, strict=True):
        chosen.decode_reduce_encode(codec, wires, codec, lengths, out, 5)
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize("text", [*BLOCKS_OF_ALL, "int8:rounding=stochastic"])
@pytest.mark.parametrize("dtype", list(instances.DTYPES))
def test_a_batch_of_messages_is_one_launch(device, kernels, text, dtype):
    codec, rng = Codec.parse(text), np.random.default_rng(9)
    x = drawn(rng, "normal", 5000, dtype, 2)
    places = [(np.array([s, s + 700]), np.array([600, 211])) for s in (0, 4000, 1000, 2503)]
    wires = [memory(layout(codec, lengths).nbytes, i) for i, (_, lengths) in enumerate(places)]
    for seed, (wire, place) in enumerate(zip(wires, places, strict=True)):
        reference.encode(codec, x, dtype, *place, wire, seed)
    out = [kernels.put(np.zeros_like(wire)) for wire in wires]
    batch = [(*place, out[seed], seed) for seed, place in enumerate(places)]
    cuda.encode_batch(codec, kernels.put(x), dtype, batch)
    assert len(device.launches) == 1
    assert [read(memory) for memory in out] == [wire.tobytes() for wire in wires]

    expected = np.zeros_like(x)
    for wire, place in zip(wires, places, strict=True):
        reference.decode(codec, wire, *place, expected, dtype)
    decoded = kernels.put(np.zeros_like(x))
    batch = [(memory, *place) for memory, place in zip(out, places, strict=True)]
    cuda.decode_batch(codec, batch, decoded, dtype)
    assert len(device.launches) == 2
    assert read(decoded) == expected.tobytes()


def read(memory):
    return ctypes.string_at(memory.pointer, memory.size)


def test_rows_beyond_one_launch_and_a_shared_grid(device, kernels):
    codec = Codec.parse("int8:block=32")
    lengths = np.array([40000, *[1] * (2 * parameters.MAX_ROWS), 40000, 0], np.int64)
    starts = np.cumsum(lengths) - lengths
    x = drawn(np.random.default_rng(1), "normal", int(lengths.sum()), "float32")
    wires = [memory(layout(codec, lengths).nbytes) for _ in range(2)]
    for chosen, wire in zip((kernels, reference), wires, strict=True):
        chosen.encode(codec, x, "float32", starts, lengths, wire)
    assert wires[0].tobytes() == wires[1].tobytes()
    assert len(device.launches) == 3


@pytest.mark.parametrize("text", ["int8", "int4", "fp8_e5m2:block=32"])
def test_padding_that_is_not_zero_is_told_by_the_next_call(kernels, text):
    codec, lengths, starts = Codec.parse(text), np.array([33, 0]), np.array([0, 0])
    message = layout(codec, lengths)
    good = memory(message.nbytes)
    reference.encode(codec, memory(132), "float32", starts, lengths, good)
    for first, end in [(message.codes[-1], message.scales[0]), (message.scales[-1], good.nbytes)]:
        for at in (int(first), int(end) - 1):
            bad = good.copy()
            bad[at] = 1
            kernels.decode(codec, bad, starts, lengths, memory(132), "float32")
            with pytest.raises(CodecError, match="padding is not zero"):
                kernels.decode(codec, good, starts, lengths, memory(132), "float32")
            wires = [good, bad, good]
            kernels.decode_reduce(codec, wires, starts, lengths, memory(132), "float32", 1)
            with pytest.raises(CodecError, match="padding is not zero"):
                cuda.check(kernels.device)
            kernels.decode_reduce_encode(codec, wires, codec, lengths, memory(message.nbytes))
            with pytest.raises(CodecError, match="padding is not zero"):
                cuda.check(kernels.device)
            cuda.check(kernels.device)


@pytest.mark.parametrize("chosen", ["device", "numpy"])
def test_wrong_sizes_are_refused_before_anything_is_launched(device, kernels, chosen):
    one, codec = np.array([100]), Codec.parse("int8")
    kernels = kernels if chosen == "device" else reference
    start, x = np.zeros(1, np.int64), memory(400)
    wire = memory(layout(codec, one).nbytes)
    with pytest.raises(ValueError, match="segment 0 is 101 elements from 0"):
        kernels.encode(codec, x, "float32", start, one + 1, wire)
    with pytest.raises(ValueError, match="out has 111 bytes"):
        kernels.encode(codec, x, "float32", start, one, wire[1:][:111])
    with pytest.raises(ValueError, match="wire 1 has 127 bytes"):
        kernels.decode_reduce(codec, [wire, wire[:127]], start, one, x, "float32", 1)
    with pytest.raises(ValueError, match="divisor 0"):
        kernels.decode_reduce(codec, [wire], start, one, x, "float32", 0)
    with pytest.raises(ValueError, match="0 wires given"):
        kernels.decode_reduce_encode(codec, [], codec, one, wire)
    assert device.launches == []


def test_structures_have_the_sizes_that_the_kernels_know(device):
    sizes = device.parameter_nbytes("zc::decode_reduce<float, zc::INT8, false>")
    assert sizes == [
        parameters.LISTS[parameters.ROW].itemsize,
        parameters.WIRES.itemsize,
        parameters.OPTIONS.itemsize,
    ]
    assert sum(sizes) <= 4096
    fused = instances.decode_reduce_encode(Codec.parse("int8"), Codec.parse("int8"))
    assert device.parameter_nbytes(fused)[0] == parameters.LISTS[parameters.PASSED_ROW].itemsize


def test_every_instance_is_taken_by_some_codec():
    codecs = [Codec.parse(text) for text in {case.text for case in cases("smoke")}]
    codecs += [*instances.FAST, *(out for _, out in instances.FAST_PASSES)]
    quantised = [codec for codec in codecs if codec.quantised]
    taken = {instances.reduce_casts(a, b) for a in instances.DTYPES for b in instances.DTYPES}
    taken |= {instances.decode_reduce_encode(a, b) for a in quantised for b in quantised}
    for dtype in instances.DTYPES:
        for codec in quantised:
            taken.add(instances.encode(codec, dtype))
            taken.add(instances.decode(codec, dtype))
            taken.add(instances.decode_reduce(codec, dtype))
    assert taken - {None} == set(instances.every())
