"""Programs of the native kernels: the bits of the functions, on whatever memories they are run."""

import numpy as np
import pytest

from zcomm.codecs import Codec, reference

native = pytest.importorskip("zcomm.codecs.native")

CODECS = ("none", "bf16", "int8", "int4:block=64", "int8:transform=hadamard", "fp8_e4m3")
STARTS, LENGTHS = np.array([3, 700], np.int64), np.array([600, 131], np.int64)
NUMEL = int(LENGTHS.sum())


def bound(*memories):
    rows = np.zeros((len(memories), 2), np.int64)
    for row, memory in enumerate(memories):
        native.bind(rows, row, memory)
    return rows


def values(seed, numel=900):
    drawn = np.random.default_rng(seed).standard_normal(numel).astype(np.float32)
    return drawn.view(np.uint8)


def message(codec, seed):
    wire = np.zeros(codec.wire_nbytes(NUMEL, segments=tuple(LENGTHS.tolist())), np.uint8)
    reference.encode(codec, values(seed), "float32", STARTS, LENGTHS, wire)
    return wire


@pytest.mark.parametrize("text", CODECS)
def test_one_program_on_several_memories(text):
    codec = Codec.parse(text)
    nbytes = message(codec, 0).size
    program = native.Program()
    program.encode(codec, (0, 0, -1), "float32", STARTS, LENGTHS, (1, 16, 16 + nbytes))
    program.decode(codec, (1, 16, 16 + nbytes), STARTS, LENGTHS, (2, 0, -1), "bfloat16")
    program.copy((1, 16, 20), (1, 0, 4))
    for seed in range(3):
        x, slot, out = values(seed), np.full(nbytes + 32, 7, np.uint8), np.full(1800, 9, np.uint8)
        assert program.run(bound(x, slot, out), ())
        expected = message(codec, seed)
        assert (slot[16:-16] == expected).all()
        assert (slot[:4] == expected[:4]).all()
        assert (slot[4:16] == 7).all()
        assert (slot[-16:] == 7).all()
        decoded = np.full(1800, 9, np.uint8)
        reference.decode(codec, expected, STARTS, LENGTHS, decoded, "bfloat16")
        assert (out == decoded).all()


@pytest.mark.parametrize("text", CODECS)
def test_sums(text):
    codec, into = Codec.parse(text), Codec.parse("int4:block=32")
    wires = [message(codec, seed) for seed in range(3)]
    size = wires[0].size
    nbytes = into.wire_nbytes(NUMEL, segments=tuple(LENGTHS.tolist()))
    program = native.Program()
    chunks = [(number, 0, size) for number in (2, 0, 1)]
    program.decode_reduce(codec, chunks, STARTS, LENGTHS, (3, 0, -1), "float32", 3)
    program.decode_reduce_encode(codec, chunks, into, LENGTHS, (4, 0, nbytes))
    total, packed = np.zeros(3600, np.uint8), np.zeros(nbytes, np.uint8)
    assert program.run(bound(*wires, total, packed), ())
    ordered = [wires[2], wires[0], wires[1]]
    expected = np.zeros_like(total)
    reference.decode_reduce(codec, ordered, STARTS, LENGTHS, expected, "float32", 3)
    assert (total == expected).all()
    expected = np.zeros_like(packed)
    reference.decode_reduce_encode(codec, ordered, into, LENGTHS, expected)
    assert (packed == expected).all()


def test_every_job_has_its_seed():
    codec = Codec.parse("int8:rounding=stochastic")
    nbytes = codec.wire_nbytes(NUMEL, segments=tuple(LENGTHS.tolist()))
    program = native.Program()
    for number in (1, 2):
        program.encode(codec, (0, 0, -1), "float32", STARTS, LENGTHS, (number, 0, nbytes))
    x, first, second = values(1), np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    assert program.run(bound(x, first, second), (11, (1 << 64) - 1))
    for wire, seed in ((first, 11), (second, (1 << 64) - 1)):
        expected = np.zeros_like(wire)
        reference.encode(codec, x, "float32", STARTS, LENGTHS, expected, seed)
        assert (wire == expected).all()


@pytest.mark.parametrize(
    "region", [(2, 0, 4), (-1, 0, 4), (1, -1, 3), (1, 3, 2), (1, 0, 101), (1, 100, 104)]
)
def test_regions_that_are_not_there_are_not_touched(region):
    memories = [np.full(100, number, np.uint8) for number in (1, 2)]
    for source, target in ((region, (0, 0, 4)), ((0, 0, 4), region)):
        program = native.Program()
        program.copy(source, target)
        assert not program.run(bound(*memories), ())
    assert all((memory == number).all() for number, memory in enumerate(memories, 1))


def test_copies_of_different_length_and_rows_that_are_not_there():
    memories = [np.zeros(8, np.uint8), np.ones(8, np.uint8)]
    program = native.Program()
    program.copy((0, 0, 4), (1, 0, 5))
    assert not program.run(bound(*memories), ())
    with pytest.raises(IndexError):
        native.bind(np.zeros((1, 2), np.int64), 1, memories[0])
