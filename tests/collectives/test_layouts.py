"""gather_layout and reduce_layout: shards of many segments, several dtypes in one message."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collectives import checks, oracle
from tests.collectives.dtypes import (
    as_array,
    assert_bits,
    drawn,
    filled,
    raw,
    store,
    stored_in,
)
from tests.collectives.worlds import WORLDS, algorithms, on, used, wire
from zcomm.layout import Layout, Segment

SOME_WORLDS = ("1x1", "2", "2x2", "2x3", "round-robin", "1+2 round-robin", "2x2x2")
DTYPES = ("float32", "bfloat16", "float16")
POISON = 77


@st.composite
def layouts(draw, size, dtype, longest=40):
    """Segments at random places, in random order, dealt to random ranks; some of them empty."""
    lengths = draw(st.lists(st.integers(0, longest), max_size=8))
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    segments, end = [], 0
    for length, gap in zip(lengths, gaps, strict=True):
        segments.append(Segment(end + gap, length))
        end += gap + length
    shards = [[] for _ in range(size)]
    for segment in draw(st.permutations(segments)):
        shards[draw(st.integers(0, size - 1))].append(segment)
    return Layout(dtype, tuple(map(tuple, shards)))


@st.composite
def messages(draw):
    world = draw(st.sampled_from(SOME_WORLDS))
    size = WORLDS[world].size
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    algorithm = draw(st.sampled_from(algorithms(WORLDS[world])))
    codec = draw(st.sampled_from([None, "int8:block=32", "int4:block=32"]))
    seed = draw(st.integers(0, 2**32 - 1))
    return world, [draw(layouts(size, dtype)) for dtype in dtypes], algorithm, codec, seed


def extent(layout):
    return max((s.start + s.numel for shard in layout.shards for s in shard), default=0)


def places(shard):
    return np.concatenate(
        [np.arange(s.start, s.start + s.numel) for s in shard] or [np.zeros(0, int)]
    )


def decoded(codec, stored, dtype, shard):
    """Return what receivers of a shard hold, segment by segment."""
    if codec is None:
        return stored
    parts = np.split(stored, np.cumsum([s.numel for s in shard])[:-1]) if shard else []
    values = [store(oracle.roundtrip(codec, part, dtype)[0], dtype) for part in parts]
    return np.concatenate([stored[:0], *values])


@settings(max_examples=60)
@given(messages())
def test_gather_writes_the_segments_and_nothing_else(message):
    world, every, algorithm, codec, seed = message
    trivial = WORLDS[world].size == 1

    def program(comm):
        shards, fulls, expected = [], [], []
        for number, layout in enumerate(every):
            dtype = layout.dtype
            held = [
                drawn((layout.shard_numel(rank),), dtype, seed + number, rank)
                for rank in range(comm.size)
            ]
            mine = np.concatenate([held[comm.rank], store(np.full(3, POISON), dtype)])
            shards.append(as_array(mine, dtype, "torch"))  # longer: the rest is ignored
            fulls.append(filled((extent(layout) + 4,), dtype, "torch", POISON))
            whole = store(np.full(extent(layout) + 4, POISON), dtype)
            for rank, shard in enumerate(layout.shards):
                sent = None if trivial else codec
                whole[places(shard)] = decoded(sent, held[rank], dtype, shard)
            expected.append(whole)
        options = {"codec": codec, "algorithm": algorithm, "min_numel": 0}
        result = comm.gather_layout(shards, fulls, every, **options)
        for number, layout in enumerate(every):
            assert result[number] is fulls[number]
            assert_bits(fulls[number], expected[number], layout.dtype)

    on(world, program)


@settings(max_examples=60)
@given(messages(), st.sampled_from(["sum", "avg"]), st.booleans())
def test_reduce_writes_the_own_segments_compactly(message, op, wide):
    world, every, algorithm, codec, seed = message

    def program(comm):
        fulls, shards, expected = [], [], []
        for number, layout in enumerate(every):
            dtype = layout.dtype
            held = [
                drawn((extent(layout) + 2,), dtype, seed + number, rank)
                for rank in range(comm.size)
            ]
            out_dtype = "float32" if wide else dtype
            fulls.append(as_array(held[comm.rank], dtype, "torch"))
            shard = layout.shards[comm.rank]
            numel = layout.shard_numel(comm.rank)
            shards.append(filled((numel + 3,), out_dtype, "torch", POISON))
            chunks = [one[places(shard)] for one in held]
            value = reduced(comm.topology, chunks, dtype, op, algorithm, codec, out_dtype, shard)
            rest = store(np.full(3, POISON), out_dtype)
            expected.append((np.concatenate([value, rest]), out_dtype))
        options = {"op": op, "codec": codec, "algorithm": algorithm, "min_numel": 0}
        result = comm.reduce_layout(fulls, shards, every, **options)
        for number, (value, out_dtype) in enumerate(expected):
            assert result[number] is shards[number]
            assert_bits(shards[number], value, out_dtype)

    on(world, program)


def reduced(topology, chunks, dtype, op, algorithm, codec, out_dtype, shard):
    if codec is None:
        return oracle.reduced(chunks, dtype, topology, op, out_dtype=out_dtype)
    codecs = (codec,) * len(topology.levels)
    nesting, codecs = checks.flattened(topology, algorithm, codecs)
    lengths = [segment.numel for segment in shard] or [0]
    return oracle.Quantised(chunks, dtype, nesting, codecs, op, out_dtype, lengths).stored


@pytest.mark.parametrize("world", ["2x2", "2x3"])
def test_all_items_are_one_message(world):
    def program(comm):
        every = [
            Layout("float32", tuple((Segment(300 * r, 300),) for r in range(comm.size))),
            Layout(
                "bfloat16",
                tuple((Segment(10 * r, 0), Segment(10 * r, 10)) for r in range(comm.size)),
            ),
        ]
        shards = [filled((300,), "float32", "torch"), filled((10,), "bfloat16", "torch")]
        fulls = [
            filled((300 * comm.size,), "float32", "torch"),
            filled((10 * comm.size,), "bfloat16", "torch"),
        ]
        hops = used(comm.topology, "auto")
        comm.traffic.reset()
        comm.gather_layout(shards, fulls, every, codec="int8", min_numel=0)
        chunk = oracle.chunk_nbytes(300, "float32", "int8") + oracle.chunk_nbytes(
            10, "bfloat16", "int8"
        )
        sent = oracle.gather_nbytes(comm.topology, comm.rank, chunk, hops)
        assert wire(comm, "all_gather") == sent
        comm.reduce_layout(fulls, shards, every, codec="int8", min_numel=0)
        sent = oracle.reduce_nbytes(comm.topology, comm.rank, [chunk] * 2, hops)
        assert wire(comm, "reduce_scatter") == sent
        assert {
            counter.calls for (op, _), counter in comm.traffic.snapshot().items() if op != "guard"
        } == {1}

    on(world, program)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_q11_a_parameter_looks_the_same_wherever_it_travels(codec):
    """Alone, first, last, among others, cut at whole blocks, at another number of ranks."""
    parameter = drawn((1000,), "float32", 20, 0)
    expected = store(oracle.roundtrip(codec, parameter, "float32")[0], "float32")
    pieces = [Segment(0, 256), Segment(256, 512), Segment(768, 232)]

    def travel(world, before, after, cut):
        size = WORLDS[world].size
        segments = [
            Segment(s.start + before, s.numel) for s in (pieces if cut else [Segment(0, 1000)])
        ]
        others = [Segment(0, before), Segment(before + 1000, after)]
        shards = [[] for _ in range(size)]
        for number, segment in enumerate([others[0], *segments, others[1]]):
            shards[number % size].append(segment)
        layout = Layout("float32", tuple(map(tuple, shards)))
        whole = np.concatenate(
            [drawn((before,), "float32", 21, 0), parameter, drawn((after,), "float32", 22, 0)]
        )

        def program(comm):
            full = torch.zeros(before + 1000 + after)
            mine = as_array(whole[places(layout.shards[comm.rank])], "float32", "torch")
            comm.gather_layout([mine], [full], [layout], codec=codec, min_numel=0)
            assert_bits(full[before : before + 1000], expected, "float32")

        on(world, program)

    for world in ("2", "2x2", "2x3", "3+5"):
        for before, after in ((0, 0), (0, 77), (77, 0), (130, 311)):
            travel(world, before, after, cut=False)
            travel(world, before, after, cut=True)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_q11_a_gradient_too(codec):
    """Its mean does not depend on what it shares a message with, nor on which rank owns it."""
    gradients = [drawn((1000,), "bfloat16", 23, rank) for rank in range(4)]

    def program(comm):
        seen = []
        for before in (0, 33):
            for owner in range(4):
                mine = [Segment(before, 1000)]
                shards = [mine if rank == owner else [] for rank in range(4)]
                if before:
                    shards[owner].insert(0, Segment(0, before))
                layout = Layout("bfloat16", tuple(map(tuple, shards)))
                noise = drawn((before,), "bfloat16", owner, comm.rank)
                full = as_array(np.concatenate([noise, gradients[comm.rank]]), "bfloat16", "torch")
                shard = filled((layout.shard_numel(comm.rank),), "float32", "torch", np.nan)
                comm.reduce_layout([full], [shard], [layout], codec=codec, min_numel=0)
                if comm.rank == owner:
                    seen.append(raw(stored_in(shard[before:])[0]))
        return seen

    seen = [one for owned in on("2x2", program) for one in owned]
    assert len(seen) == 8
    assert all((one == seen[0]).all() for one in seen)


def test_a_small_message_is_quantised_only_where_the_caller_says_so():
    def program(comm):
        layout = Layout.even("float32", 400, 4)
        shard, full = torch.ones(100), torch.zeros(400)
        for options, codec in (({}, None), ({"min_numel": 0}, "int8"), ({"min_numel": 401}, None)):
            comm.traffic.reset()
            comm.gather_layout([shard], [full], [layout], codec="int8", algorithm="flat", **options)
            chunk = oracle.chunk_nbytes(100, "float32", codec)
            assert wire(comm, "all_gather") == {0: chunk, 1: 2 * chunk}

    on("2x2", program)


def test_a_message_of_no_items_and_of_empty_shards():
    def program(comm):
        assert comm.gather_layout([], [], []) == []
        assert comm.reduce_layout([], [], []) == []
        nothing = Layout("float32", ((),) * comm.size)
        full = torch.full((3,), 5.0)
        comm.gather_layout([torch.empty(0)], [full], [nothing], codec="int8", min_numel=0)
        comm.reduce_layout([full], [torch.empty(0)], [nothing], codec="int8", min_numel=0)
        assert full.tolist() == [5.0] * 3

    on("2x2", program)


WRONG = {
    "counts": (lambda c, layout: c.gather_layout([], [torch.zeros(8)], [layout]), "0 shards.*1"),
    "a short shard": (
        lambda c, layout: c.gather_layout([torch.zeros(1)], [torch.zeros(8)], [layout]),
        r"\b1\b.*\b2\b",
    ),
    "a short full": (
        lambda c, layout: c.gather_layout([torch.zeros(2)], [torch.zeros(7)], [layout]),
        r"\b7\b.*\b8\b",
    ),
    "another dtype": (
        lambda c, layout: c.gather_layout(
            [torch.zeros(2).half()], [torch.zeros(8).half()], [layout]
        ),
        "float16.*float32|float32.*float16",
    ),
    "a layout of another world": (
        lambda c, layout: c.gather_layout(
            [torch.zeros(8)], [torch.zeros(8)], [Layout.even("float32", 8, 2)]
        ),
        r"\b2\b.*\b4\b|\b4\b.*\b2\b",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_arrays_that_do_not_fit_their_layout(case):
    call, message = WRONG[case]

    def program(comm):
        with pytest.raises(ValueError, match=message):
            call(comm, Layout.even("float32", 8, 4))

    on("2x2", program)
