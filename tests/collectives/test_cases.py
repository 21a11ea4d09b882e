"""What broke in comparable systems: each quantised case, by its number, with what must come out."""

import numpy as np
import pytest
import torch

from tests.collectives import checks, oracle
from tests.collectives.dtypes import (
    ITEMSIZE,
    as_array,
    assert_bits,
    drawn,
    filled,
    store,
    stored_in,
    widen,
)
from tests.collectives.worlds import algorithms, on, wire
from topology import flat, from_shape, parse
from zcomm import Codec

EVERY_DTYPE = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


@pytest.mark.parametrize("shape", [(2305,), (7, 11), (3, 5, 7), (8, 129), (1, 1)])
def test_q1_shards_of_any_size_and_offset(shape):
    numel = int(np.prod(shape))

    def program(comm):
        shards = [drawn(shape, "float32", 6, rank) for rank in range(comm.size)]
        checks.quantised_gather(comm, shards, "float32", "int8")
        for offset in (1, 3, 5):
            memory = torch.full((numel + 8,), torch.nan)
            view = memory[offset : offset + numel].view(shape)
            view.copy_(as_array(shards[comm.rank], "float32", "torch"))
            result = comm.all_gather(view, codec="int8")
            plain = comm.all_gather(as_array(shards[comm.rank], "float32", "torch"), codec="int8")
            assert torch.equal(result, plain)

    on("2x2", program, min_numel=0)


@pytest.mark.parametrize("world", ["3x2", "2x3"])
def test_q2_six_ranks_and_a_hidden_size_of_8192(world):
    def program(comm):
        fulls = [drawn((6, 8192), "bfloat16", 7, rank) for rank in range(6)]
        checks.quantised_reduce_scatter(comm, fulls, "bfloat16", ("int8", "int4"))
        checks.quantised_gather(comm, [one[:1] for one in fulls], "bfloat16", "int8")

    on(world, program, min_numel=0)


@pytest.mark.parametrize("world", ["2x2", "3+5"])
def test_q4_each_dtype_of_a_list_comes_back_as_it_was(world):
    """And the codec touches only what is floating point."""
    items = [("bfloat16", 300), ("float32", 130), ("int32", 7), ("float16", 1)]

    def program(comm):
        shards = [[drawn((n,), d, 8, rank) for d, n in items] for rank in range(comm.size)]
        mine = [as_array(x, d, "torch") for x, (d, _) in zip(shards[comm.rank], items, strict=True)]
        results = comm.all_gather(mine, codec="int8")
        for number, (dtype, _) in enumerate(items):
            sent = [one[number] for one in shards]
            if dtype != "int32":
                sent = [store(oracle.roundtrip("int8", one, dtype)[0], dtype) for one in sent]
            assert_bits(results[number], np.concatenate(sent), dtype, "torch")

    on(world, program, min_numel=0)


@pytest.mark.parametrize("numel", [6, 42, 294, 378, 384, 390])
@EVERY_DTYPE
def test_q5_two_hops_on_six_ranks(numel, dtype):
    def program(comm):
        fulls = [drawn((numel,), dtype, 9, rank) for rank in range(6)]
        for algorithm in ("hierarchical", "flat"):
            checks.quantised_reduce_scatter(comm, fulls, dtype, ("int4", "int4"), "avg", algorithm)

    on("3x2", program, min_numel=0)


@pytest.mark.parametrize("world", ["1x8", "8"])
def test_q6_sums_of_large_float16_do_not_overflow(world):
    def program(comm):
        rng = np.random.default_rng(10)
        magnitudes = rng.uniform(1e3, 3e4, (8, 4096)) * np.where(rng.random((8, 4096)) < 0.1, -1, 1)
        fulls = [store(row, "float16") for row in magnitudes]
        for codec in ("int8", "int4"):
            codecs = checks.per_level(codec, comm)
            result = checks.quantised_reduce_scatter(comm, fulls, "float16", codecs)
            assert torch.isfinite(result).all()

    on(parse(world, 8), program, min_numel=0)


def test_q7_one_node_quantises_and_says_which_algorithm_ran(caplog):
    caplog.set_level("INFO", logger="zcomm")

    def program(comm):
        full = drawn((512,), "float32", 11, comm.rank)
        comm.reduce_scatter(full, codec="int4")
        chunk = oracle.chunk_nbytes(128, "float32", "int4")
        assert wire(comm, "reduce_scatter") == {0: 3 * chunk}

    on("1x4", program, min_numel=0)
    said = [one.getMessage() for one in caplog.records]
    assert any("reduce_scatter" in one and "1-hop" in one and "int4" in one for one in said), said


@EVERY_DTYPE
def test_q8_every_cluster_of_eight_is_inside_its_bound_of_one_mean(dtype):
    fulls = [drawn((8, 200), dtype, 12, rank) for rank in range(8)]

    def program(comm):
        checks.quantised_reduce_scatter(comm, fulls, dtype, ("int8", "int4"), "avg", "auto")
        mine = as_array(fulls[comm.rank], dtype, "torch")
        weight = comm.reduce_scatter(mine, op="avg", codec="int4")
        bias = comm.reduce_scatter(mine.reshape(-1), op="avg", codec="int4")
        assert weight.shape == (1, 200)
        assert torch.equal(weight.reshape(-1), bias)

    for world in ("2x4", "4x2", "2x2x2"):
        topology = parse(world, 8)
        if len(topology.levels) == 2:
            on(topology, program, min_numel=0)

    def one_codec(comm):
        for codec in ("int8", "int4"):
            checks.quantised_reduce_scatter(comm, fulls, dtype, checks.per_level(codec, comm))

    for world in ("8x1", "1x8", "2x2x2"):
        on(parse(world, 8), one_codec, min_numel=0)


Q9_SIZES = (2, 3, 6, 8, 41, 47, 55, 64)


@pytest.mark.parametrize("size", Q9_SIZES)
def test_q9_equal_values_come_back_exactly(size):
    """1/W times W is not 1 for 41, 47, 55: the mean must be a division."""
    inner = next((n for n in (8, 4, 3, 2) if size % n == 0), 1)
    topology = flat(size) if inner in (1, size) else from_shape((inner, size // inner))

    def program(comm):
        for value in (1.0, -1.0):
            for dtype, codec in (("float32", "int4"), ("bfloat16", "int8")):
                full = filled((size * 3,), dtype, "torch", value)
                part = comm.reduce_scatter(full, op="avg", codec=codec)
                assert (part == value).all()
                assert part.shape == (3,)
            assert (comm.all_reduce(torch.full((5,), value), op="avg", codec="int8") == value).all()

    on(topology, program, min_numel=0)


@pytest.mark.slow
@pytest.mark.parametrize("size", sorted(set(range(2, 65)) - set(Q9_SIZES)))
def test_q9_at_every_size(size):
    test_q9_equal_values_come_back_exactly(size)


@pytest.mark.parametrize("world", ["2x3", "3+5"])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_q9_a_mirrored_input_gives_the_mirrored_result(world, codec):
    def program(comm):
        # One hop: the sums of a first hop often hold +m and -m, and then the sign of m decides.
        x = torch.from_numpy(drawn((comm.size * 333,), "float32", 13, comm.rank))
        for call in (comm.all_gather, comm.reduce_scatter):
            mirrored = call(-x, codec=codec, algorithm="flat")
            assert torch.equal(mirrored, -call(x, codec=codec, algorithm="flat"))

    on(world, program, min_numel=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("world", ["2x2", "3x2", "1x4", "3+5"])
@EVERY_DTYPE
def test_q10_one_bad_value_makes_its_block_nan(bad, world, dtype):
    block, numel = 128, 400  # blocks 0-127, 128-255, 256-383, 384-399 of every rank's part

    def program(comm):
        fulls = [drawn((comm.size, numel), dtype, 14, rank) for rank in range(comm.size)]
        fulls[1] = fulls[1].copy()
        fulls[1][2, 200] = store(bad, dtype)
        mine = as_array(fulls[comm.rank], dtype, "torch")
        for algorithm in algorithms(comm.topology):
            part = comm.reduce_scatter(mine, op="avg", codec="int4", algorithm=algorithm)
            hit = np.zeros(numel, bool)
            if comm.rank == 2:
                hit[block : 2 * block] = True
            found = stored_in(part)[0].reshape(-1)
            assert (np.isnan(widen(found, dtype)) == hit).all()
            (nan,) = store(np.array([np.nan], np.float32), dtype).view(bits_of(dtype))
            assert (found.view(bits_of(dtype))[hit] == nan).all()
        gathered = comm.all_gather(mine[2], codec="int4")
        found = widen(stored_in(gathered)[0], dtype).reshape(comm.size, numel)
        hit = np.zeros((comm.size, numel), bool)
        hit[1, block : 2 * block] = True
        assert (np.isnan(found) == hit).all()
        reduced = comm.all_reduce(mine, codec="int4")
        assert not torch.isfinite(reduced).all()
        checks.same_everywhere(comm, reduced)

    on(world, program, min_numel=0)


def bits_of(dtype):
    return f"uint{8 * ITEMSIZE[dtype]}"


def test_q12_odd_shapes_leave_nothing_unwritten():
    run_poisoned([(2, 3, 50), (8, 51, 41)], "2x2")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_q12_large_shapes():
    run_poisoned([(2, 3, 50_000), (8, 512, 4096)], "2x2")


def run_poisoned(shapes, world):
    codec = Codec.parse("int8")

    def program(comm):
        for shape in shapes:
            inputs = [
                np.resize(drawn((65_537,), "bfloat16", 15, rank), shape)
                for rank in range(comm.size)
            ]
            flat_inputs = [one.reshape(-1) for one in inputs]
            numel = flat_inputs[0].size // comm.size
            out = filled((numel,), "bfloat16", "torch", np.nan)
            at = oracle.even_slices(numel * comm.size, comm.size)[comm.rank]
            mine = as_array(inputs[comm.rank], "bfloat16", "torch")
            comm.reduce_scatter(mine.reshape(-1), out, op="avg", codec=("int8", "int4"))
            chunks = [one[at] for one in flat_inputs]
            expected = oracle.Quantised(chunks, "bfloat16", comm.topology, ("int8", "int4"))
            assert_bits(out, expected.stored, "bfloat16")
            checks.assert_inside(stored_in(out)[0], expected, "bfloat16")
            space = filled((comm.size * shape[0], *shape[1:]), "bfloat16", "torch", np.nan)
            comm.all_gather(mine, space, codec="int8")
            checks.same_everywhere(comm, space)
            for rank, one in enumerate(flat_inputs if comm.rank == 0 else []):
                wire = codec.encode(as_array(one, "bfloat16", "torch"))
                part = space[rank * shape[0] : (rank + 1) * shape[0]].reshape(-1)
                assert torch.equal(part, codec.decode(wire, one.size, torch.bfloat16))

    on(world, program, min_numel=0)


@pytest.mark.parametrize(("codec", "low", "high"), [("int8", -128, 127), ("int4", -8, 7)])
@pytest.mark.parametrize("world", ["1x4", "4x1", "3+5"])
def test_q13_values_on_the_grid_are_exact(codec, low, high, world):
    def program(comm):
        rng = np.random.default_rng([16, comm.rank])
        full = rng.integers(low, high, (comm.size, 512), endpoint=True).astype(np.float32)
        full[:, ::32] = low  # every block has the extreme that sets the step to one
        scale = np.float32(2.0 ** -(comm.rank % 3))
        gathered = comm.all_gather(full[0] * scale, codec=codec)
        plain = comm.all_gather(full[0] * scale)
        assert gathered.tobytes() == plain.tobytes()
        quantised = comm.reduce_scatter(full, codec=codec, algorithm="flat")
        assert quantised.tobytes() == comm.reduce_scatter(full, algorithm="flat").tobytes()

    on(world, program, min_numel=0)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_q14_finite_values_stay_finite(codec):
    def program(comm):
        for dtype, values in (
            ("float16", [65504.0, 65300.0, -65504.0, 65281.0]),
            ("float32", [3.4028234e38, -3.4028234e38, 3.3e38, 1.0]),
            ("bfloat16", [3.3895314e38, -3.3895314e38, 3.3e38, 1.0]),
        ):
            shard = store(np.array(values * 16), dtype)
            gathered = checks.quantised_gather(comm, [shard] * comm.size, dtype, codec)
            assert torch.isfinite(gathered).all()
            full = as_array(np.tile(shard, comm.size), dtype, "torch")
            # In one hop: a partial sum that overflows would make its block NaN in the next.
            total = comm.reduce_scatter(full, op="sum", codec=codec, algorithm="flat")
            assert torch.isposinf(total[0])
            assert torch.isneginf(total[2 if dtype == "float16" else 1])

    on("2x2", program, min_numel=0)


def test_s1_a_mean_of_float16_through_a_codec():
    def program(comm):
        for value in (3e4, -3e4):
            x = filled((64,), "float16", "torch", value)
            mean = checks.quantised_reduce_scatter(
                comm, [stored_in(x)[0]] * 8, "float16", ("int8", "int8")
            )
            assert torch.isfinite(mean).all()

    on(from_shape((4, 2)), program, min_numel=0)
