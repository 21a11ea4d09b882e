"""Pieces and windows change no bit and no count, whatever the sizes, the nodes and the delays."""

import time

import numpy as np
import pytest
import torch

import zcomm
from tests.collectives import oracle
from tests.collectives.dtypes import as_array, assert_bits, drawn, stored_in
from tests.collectives.nodes import cut_small, share_memory, slow, uncut
from tests.collectives.worlds import WORLDS, Never, algorithms, caught, on, wire
from tests.marks import one_in
from zcomm import CollectiveTimeout, hops, pieces
from zcomm.collectives import all_gather, reduce_scatter
from zcomm.layout import Layout, Segment
from zcomm.pieces import slot_nbytes
from zcomm.transports.windows import Windows, window_nbytes

NUMEL = 4096 * 19 + 77
"""Of a shard: more pieces than slots, and a last one that is no whole block."""

CODECS = {"none": None, "int8": "int8", "int4": "int4", "turned": "int8:transform=hadamard"}
NODES = ("1x4", "2x2", "4x1", "3+5", "2x2x2", "permuted")


def operations(comm, codec, dtype="bfloat16", kind="torch", numel=NUMEL):
    """Return the stored results of every operation and algorithm on one rank.

    What "auto" takes may depend on sizes of pieces, and results of codecs on the algorithm.
    """
    shard = as_array(drawn((numel,), dtype, 5, comm.rank), dtype, kind)
    full = as_array(drawn((numel * comm.size,), dtype, 6, comm.rank), dtype, kind)
    results = []
    for algorithm in sorted(set(algorithms(comm.topology)) - {"auto"}):
        results.append(comm.all_gather(shard, codec=codec, algorithm=algorithm))
        results.append(comm.reduce_scatter(full, codec=codec, op="avg", algorithm=algorithm))
        reduced = as_array(drawn((3 * numel,), dtype, 7, comm.rank), dtype, kind)
        results.append(comm.all_reduce(reduced, codec=codec, algorithm=algorithm))
    return [stored_in(result)[0].copy() for result in results]


def whole(monkeypatch, world, codec, **options):
    with monkeypatch.context() as patch:
        uncut(patch)
        return on(world, lambda comm: operations(comm, codec, **options), min_numel=0)


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one == other).all()


@pytest.mark.parametrize(("world", "codec"), one_in(4, NODES, list(CODECS)))
def test_q15_pieces_and_windows_change_no_bit(monkeypatch, world, codec):
    expected = whole(monkeypatch, world, CODECS[codec])
    cut_small(monkeypatch)
    share_memory(monkeypatch, WORLDS[world])
    found = on(world, lambda comm: operations(comm, CODECS[codec]), min_numel=0)
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_q15_exact_results_are_those_of_the_oracle(monkeypatch, dtype):
    cut_small(monkeypatch)
    share_memory(monkeypatch, WORLDS["2x2"])

    def program(comm):
        fulls = [drawn((4 * NUMEL,), dtype, 8, rank) for rank in range(comm.size)]
        mine = as_array(fulls[comm.rank], dtype, "numpy")
        total = oracle.reduced(fulls, dtype, comm.topology)
        part = slice(comm.rank * NUMEL, (comm.rank + 1) * NUMEL)
        assert_bits(comm.reduce_scatter(mine), total[part], dtype)
        assert_bits(
            comm.all_gather(mine[:NUMEL]), np.concatenate([f[:NUMEL] for f in fulls]), dtype
        )
        assert_bits(comm.all_reduce(mine.copy()), total, dtype)

    on("2x2", program)


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_windows_across_levels(monkeypatch, level):
    """A node may hold several levels, and hops of two levels then share a slot."""
    expected = whole(monkeypatch, "2x2x2", "int8")
    cut_small(monkeypatch)
    share_memory(monkeypatch, WORLDS["2x2x2"], level)
    assert_same(on("2x2x2", lambda c: operations(c, "int8"), min_numel=0), expected)


@pytest.mark.parametrize("rank", [0, 3])
def test_s3_a_slow_rank(monkeypatch, rank):
    expected = whole(monkeypatch, "2x2", "int4")
    cut_small(monkeypatch)
    share_memory(monkeypatch, WORLDS["2x2"])
    with slow(monkeypatch, rank):
        assert_same(on("2x2", lambda c: operations(c, "int4"), min_numel=0), expected)


def test_s3_asynchronous_back_to_back(monkeypatch):
    """Buffers are dropped and given out again while operations are on their way."""
    cut_small(monkeypatch)
    share_memory(monkeypatch, WORLDS["2x2"])

    def program(comm):
        works = []
        for call in range(6):
            shard = as_array(drawn((NUMEL,), "float32", call, comm.rank), "float32", "numpy")
            works.append(comm.all_gather(shard, async_op=True))
            del shard
            full = as_array(drawn((4 * NUMEL,), "float32", call, comm.rank), "float32", "numpy")
            works.append(comm.reduce_scatter(full, async_op=True))
            del full
        for call in range(6):
            shards = [drawn((NUMEL,), "float32", call, rank) for rank in range(4)]
            assert_bits(works[2 * call].wait(), np.concatenate(shards), "float32")
            fulls = [drawn((4 * NUMEL,), "float32", call, rank) for rank in range(4)]
            total = oracle.reduced(fulls, "float32", comm.topology)
            part = slice(comm.rank * NUMEL, (comm.rank + 1) * NUMEL)
            assert_bits(works[2 * call + 1].wait(), total[part], "float32")

    on("2x2", program)


def test_many_communicators_use_the_same_windows(monkeypatch):
    cut_small(monkeypatch)
    share_memory(monkeypatch, WORLDS["2x2"])

    def program(comm):
        odd = comm.split(comm.rank % 2, -comm.rank)
        for call in range(3):
            for group in (comm, comm.level(0), comm.rail(1), odd):
                ranks = group.all_gather_values(np.array([comm.rank])).ravel()
                shard = as_array(drawn((NUMEL,), "float32", call, comm.rank), "float32", "numpy")
                shards = [drawn((NUMEL,), "float32", call, int(rank)) for rank in ranks]
                assert_bits(group.all_gather(shard), np.concatenate(shards), "float32")

    on("2x2", program)


def uneven(size):
    """Shards of very different length, one of them empty, in segments of every kind."""
    shards, at = [], 0
    for rank in range(size):
        lengths = () if rank == 1 else (4096 * 3 * (rank + 1), 0, 17, 4096 * 5 + rank)
        segments = []
        for length in lengths:
            segments.append(Segment(at, length))
            at += length + 3
        shards.append(tuple(segments))
    return Layout("float32", tuple(shards))


@pytest.mark.parametrize(
    ("world", "codec"), one_in(2, ["2x2", "3+5"], [None, "int8", "int4:block=64"])
)
def test_layouts_of_uneven_shards(monkeypatch, world, codec):
    def program(comm):
        layout = uneven(comm.size)
        second = Layout.cut("bfloat16", 4096 * 7 * comm.size + 5, comm.size)
        layouts, extents = [layout, second], [layout.extent, second.extent]
        shards = [
            as_array(
                drawn((one.shard_numel(comm.rank),), one.dtype, 9, comm.rank), one.dtype, "torch"
            )
            for one in layouts
        ]
        fulls = [
            as_array(
                np.zeros(n, "float32" if one.dtype == "float32" else "uint16"), one.dtype, "torch"
            )
            for one, n in zip(layouts, extents, strict=True)
        ]
        comm.traffic.reset()
        comm.gather_layout(shards, fulls, layouts, codec=codec)
        gathered = [stored_in(full)[0].copy() for full in fulls]
        comm.reduce_layout(fulls, shards, layouts, codec=codec)
        sent = {op: wire(comm, op) for op in ("all_gather", "reduce_scatter")}
        codecs = hops.parse_codecs(codec, len(comm.topology.levels))
        for operation, nbytes in sent.items():
            made = hops.make(operation, layouts, comm.topology, codecs=codecs)
            planned = made.wire_nbytes(comm.rank)
            assert nbytes == {level: n for level, n in planned.items() if n}
        return gathered + [stored_in(shard)[0].copy() for shard in shards]

    with monkeypatch.context() as patch:
        uncut(patch)
        expected = on(world, program, min_numel=0)
    cut_small(monkeypatch)
    share_memory(monkeypatch, WORLDS[world])
    assert_same(on(world, program, min_numel=0), expected)


@pytest.mark.parametrize(
    ("world", "codec"), one_in(4, NODES, [None, "int8", "int4", "int8:block=4096"])
)
def test_executed_bytes_are_planned_bytes(monkeypatch, world, codec):
    cut_small(monkeypatch)
    share_memory(monkeypatch, WORLDS[world])

    def program(comm):
        layout = Layout.even("bfloat16", NUMEL * comm.size, comm.size)
        codecs = hops.parse_codecs(codec, len(comm.topology.levels))
        shard = as_array(drawn((NUMEL,), "bfloat16", 1, comm.rank), "bfloat16", "torch")
        full = as_array(drawn((NUMEL * comm.size,), "bfloat16", 1, comm.rank), "bfloat16", "torch")
        for algorithm in algorithms(comm.topology):
            for operation, x in (("all_gather", shard), ("reduce_scatter", full)):
                comm.traffic.reset()
                getattr(comm, operation)(x, codec=codec, algorithm=algorithm)
                made = hops.make(
                    operation, [layout], comm.topology, codecs=codecs, algorithm=algorithm
                )
                assert len(made.pieces) > 8
                assert wire(comm, operation) == made.wire_nbytes(comm.rank)
                calls = {c.calls for (n, _), c in comm.traffic.snapshot().items() if n == operation}
                assert calls == {1}

    on(world, program, min_numel=0)


def test_pieces_hold_every_element_once_and_cut_whole_blocks(monkeypatch):
    cut_small(monkeypatch)
    layouts = [uneven(4), Layout.even("bfloat16", 4 * 9000, 4)]
    codecs = hops.parse_codecs("int8:block=4096", 2)
    made = hops.make("reduce_scatter", layouts, WORLDS["2x2"], codecs=codecs)
    for item, layout in enumerate(layouts):
        for rank in range(4):
            pieces = [
                (piece, piece.items.index(item)) for piece in made.pieces if item in piece.items
            ]
            parts = [(p, s) for p, i in pieces for s in p.plan.layouts[i].shards[rank]]
            cut = iter(segment for _, segment in parts)
            for segment in layout.shards[rank]:
                at = segment.start
                while at < segment.start + segment.numel:
                    part = next(cut)
                    assert part.start == at
                    assert (at - segment.start) % 4096 == 0
                    at += part.numel
                assert at == segment.start + segment.numel
            assert next(cut, None) is None
            held = 0
            for piece, i in pieces:
                assert piece.firsts[rank][i] == held
                held += piece.plan.layouts[i].shard_numel(rank)


def test_random_rounding_is_one_piece(monkeypatch):
    """Its draws count from the start of a segment."""
    cut_small(monkeypatch)
    codecs = hops.parse_codecs("int8:rounding=stochastic", 2)
    layout = Layout.even("float32", 4 * NUMEL, 4)
    made = hops.make("all_gather", [layout], WORLDS["2x2"], codecs=codecs)
    assert len(made.pieces) == 1
    share_memory(monkeypatch, WORLDS["2x2"])
    codec = "int8:rounding=stochastic"
    found = on("2x2", lambda comm: operations(comm, codec), min_numel=0)
    assert_same(found, whole(monkeypatch, "2x2", codec))


@pytest.mark.parametrize("sharing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_stops_in_the_middle_is_named(monkeypatch, sharing):
    monkeypatch.setenv("ZCOMM_TIMEOUT", "1.5")
    cut_small(monkeypatch)
    if sharing:
        share_memory(monkeypatch, WORLDS["2x2"])
    never = Never()
    real = zcomm.collectives.courier.Posted.send

    def stops(self, *arguments):
        if self._channel.rank == 1 and self._number == 3:
            never.wait()
        real(self, *arguments)

    monkeypatch.setattr(zcomm.collectives.courier.Posted, "send", stops)
    ended = []

    @caught
    def program(comm):
        try:
            comm.reduce_scatter(np.zeros(4 * NUMEL, np.float32))
        finally:
            # Not before: who waits for rank 1 may come after one that waits for another.
            ended.append(comm.rank)
            if len(ended) == 3:
                never.over()

    errors = on("2x2", program)
    late = [str(error) for error in errors if isinstance(error, CollectiveTimeout)]
    assert any("waited 1.5 s in reduce_scatter for rank 1" in text for text in late)


@pytest.mark.parametrize("sharing", [False, True])
def test_a_rank_that_fails_in_the_middle_ends_all(monkeypatch, sharing):
    cut_small(monkeypatch)
    if sharing:
        share_memory(monkeypatch, WORLDS["2x2"])
    real = zcomm.collectives.courier.Posted.send

    def fails(self, *arguments):
        if self._channel.rank == 2 and self._number == 3:
            raise ArithmeticError("in the middle")
        real(self, *arguments)

    monkeypatch.setattr(zcomm.collectives.courier.Posted, "send", fails)
    start = time.monotonic()
    with pytest.raises(ArithmeticError, match="in the middle"):
        on("2x2", lambda comm: comm.all_gather(np.zeros(NUMEL, np.float32)))
    assert time.monotonic() - start < 20


def test_a_slot_is_free_when_all_readers_have_released_it():
    memories = [np.zeros(window_nbytes(3), np.uint8) for _ in range(3)]
    owner, first, second = (Windows(memories, (4, 7, 9), me) for me in range(3))
    assert not first.arrived(4, 2)
    for _ in range(3):
        assert owner.free(2, 8)
        owner.slot(4, 2, 8)[:] = 5
        owner.publish(2, 7)
        owner.publish(2, 9)
        assert first.arrived(4, 2)
        assert not first.arrived(4, 3)
        assert (first.slot(4, 2, 8) == 5).all()
        assert not owner.free(2, 8)
        first.release(4, 2)
        assert owner.readers() == [9]
        assert not owner.free(2, 8)
        assert not owner.free(0, 4)  # cut otherwise, it lies over what is still read
        second.release(4, 2)
        assert owner.free(0, 4)
        assert owner.free(2, 8)
        assert not first.arrived(4, 2)


@pytest.mark.parametrize("world", ["2", "1x4", "2x2", "2x3", "2x2x2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", [None, "int8", "int4"])
def test_pieces_fit_the_slots_of_a_node(world, dtype, codec):
    topology = WORLDS[world]
    codecs = hops.parse_codecs(codec, len(topology.levels))
    near = frozenset(topology.group(0, 0)) - {0}
    written = {"reduce_scatter": reduce_scatter.regions, "all_gather": all_gather.regions}
    for numel in (1 << 15, 1 << 18, 12345678, 1 << 24):
        layout = Layout.even(dtype, numel * topology.size, topology.size)
        for operation, regions in written.items():
            made = hops.make(operation, [layout], topology, codecs=codecs)
            for piece in made.pieces:
                assert regions(piece.plan, 0, near)[1] <= slot_nbytes(made)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("codec", [None, "int8"])
def test_one_plan_serves_other_arrays_at_every_call(monkeypatch, kind, codec):
    """What is kept of a call holds no array: each is freed, and another one is given."""
    expected = {call: whole_calls(monkeypatch, codec, kind, call) for call in range(4)}
    cut_small(monkeypatch)
    share_memory(monkeypatch, WORLDS["2x2"])

    def program(comm):
        found = [both(comm, codec, kind, call, out=call != 2) for call in range(4)]
        assert comm._shelf._ready  # later calls are those that were kept
        return found

    for rank, calls in enumerate(on("2x2", program, min_numel=0)):
        for call, found in enumerate(calls):
            assert_same([found], [expected[call][rank]])


def test_what_is_kept_tells_calls_apart(monkeypatch):
    """Options, a list of one array, a list of codecs, another dtype of the result, min_numel."""
    cut_small(monkeypatch)

    def program(comm):
        shard = as_array(drawn((NUMEL,), "bfloat16", 1, comm.rank), "bfloat16", "torch")
        full = as_array(drawn((4 * NUMEL,), "bfloat16", 2, comm.rank), "bfloat16", "torch")
        found = []
        for _ in range(2):
            for codec in (None, "int8", ["int8", "int8"], ("int8", "int8")):
                found.append(comm.all_gather(shard, codec=codec))
                found.append(comm.all_gather([shard], codec=codec)[0])
                for op in ("sum", "avg"):
                    for dtype in (torch.bfloat16, torch.float32):
                        out = torch.empty(NUMEL, dtype=dtype)
                        assert comm.reduce_scatter(full, out, op=op, codec=codec) is out
                        found.append(out)
                out = torch.empty(4 * NUMEL, dtype=torch.float32)
                found.append(comm.all_gather(shard, out, codec=codec))
            comm.min_numel = 1 << 40
        first, second = found[: len(found) // 2], found[len(found) // 2 :]
        exact, quantised = first[: len(first) // 4], first[len(first) // 4 : len(first) // 2]
        for call in range(4):  # quantised ones are exact where the message is too small for it
            assert_same([second[call * len(exact) :][: len(exact)]], [exact])
        for call in range(1, 4):
            assert_same([first[call * len(exact) :][: len(exact)]], [quantised])
        assert not (exact[0] == quantised[0]).all()
        assert not (exact[2] == exact[4]).all()

    on("2x2", program, min_numel=0)


def whole_calls(monkeypatch, codec, kind, call):
    with monkeypatch.context() as patch:
        uncut(patch)
        return on("2x2", lambda comm: both(comm, codec, kind, call, out=False), min_numel=0)


def both(comm, codec, kind, call, *, out):
    """Return the stored results of a gather and a reduction of arrays that nobody holds after."""
    dtype = "bfloat16" if kind == "torch" else "float32"  # NumPy has no bfloat16
    shard = as_array(drawn((NUMEL,), dtype, call, comm.rank), dtype, kind)
    full = as_array(drawn((4 * NUMEL,), dtype, 50 + call, comm.rank), dtype, kind)
    places = [as_array(drawn((n,), dtype, 0, 0), dtype, kind) for n in (4 * NUMEL, NUMEL)]
    gathered = comm.all_gather(shard, places[0] if out else None, codec=codec)
    reduced = comm.reduce_scatter(full, places[1] if out else None, codec=codec)
    assert not out or (gathered is places[0] and reduced is places[1])
    return [stored_in(result)[0].copy() for result in (gathered, reduced)]


def test_plans_that_alternate_share_slots_and_scratch(monkeypatch):
    cut_small(monkeypatch)
    share_memory(monkeypatch, WORLDS["2x2"])

    def program(comm):
        cases = [(n, codec) for n in (NUMEL, 4096 * 3, NUMEL + 5) for codec in ("int4", None)]
        alone = {case: operations(comm, case[1], numel=case[0]) for case in cases}
        for order in (reversed(cases), cases):
            for case in order:
                assert_same([operations(comm, case[1], numel=case[0])], [alone[case]])

    on("2x2", program, min_numel=0)


def test_the_first_pieces_and_the_last_are_smaller():
    layout = Layout.even("bfloat16", 1 << 22, 4)
    made = hops.make("all_gather", [layout], WORLDS["2x2"])
    sizes = [piece.plan.messages(0, 0)[0].wire_nbytes for piece in made.pieces]
    largest = max(sizes)
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[0] <= largest / 3
    assert sizes[-1] <= largest / 2
    assert sum(sizes) == 2 << 20


def test_pieces_are_larger_where_a_shard_is_long():
    def largest(topology, numel, codec=None):
        layout = Layout.even("bfloat16", numel, 4)
        codecs = hops.parse_codecs(codec, len(WORLDS[topology].levels))
        made = hops.make("all_gather", [layout], WORLDS[topology], codecs=codecs)
        sizes = [piece.plan.messages(0, 0)[0].wire_nbytes for piece in made.pieces]
        assert sum(sizes) >= made.messages(0, 0)[0].wire_nbytes
        return max(sizes)

    step = 2 * pieces.CUT
    assert largest("2x2", 1 << 21) <= pieces.USUAL_NBYTES + step
    assert largest("2x2", 1 << 25, "int8") > pieces.USUAL_NBYTES + step
    assert 0.75 * pieces.LARGEST_NBYTES < largest("4x1", 1 << 25) <= pieces.LARGEST_NBYTES + step
