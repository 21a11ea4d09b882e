"""The same checks under mpirun at any number of ranks; and what only MPI has: limits, nodes."""

import os

import numpy as np
import pytest

import zcomm
from tests.collectives import checks, oracle
from tests.collectives.dtypes import KINDS, as_array, drawn, stored_in
from tests.collectives.worlds import wire
from zcomm import CollectiveMismatch, hops
from zcomm.layout import Layout, Segment
from zcomm.transports.rounds import MOST_SIZES

EVERY_KIND = pytest.mark.parametrize(("kind", "dtype"), KINDS)
SOME_KINDS = pytest.mark.parametrize(
    ("kind", "dtype"), [("numpy", "float32"), ("torch", "bfloat16"), ("torch", "float16")]
)


@pytest.fixture(
    scope="module", params=["auto", "flat", "nodes"], ids=["discovered", "one node", "two levels"]
)
def comm(request):
    """A communicator over all ranks, on three topologies; every codec is used, however small."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    spec = {"auto": "auto", "flat": f"1x{size}", "nodes": "2x2" if size == 4 else f"{size}x1"}
    with zcomm.init(topology=spec[request.param], min_numel=0, abort=False) as made:
        assert made.size == size
        yield made


@pytest.mark.mpi
@EVERY_KIND
def test_all_gather(comm, kind, dtype):
    for shape in checks.SHAPES:
        checks.every_algorithm(comm, checks.all_gather, kind, dtype, shape)


@pytest.mark.mpi
@SOME_KINDS
def test_reduce_scatter(comm, kind, dtype):
    for op in ("sum", "avg"):
        for shape in ((3,), (0,), (40, 3)):
            checks.every_algorithm(comm, checks.reduce_scatter, kind, dtype, op, shape)
        checks.reduce_scatter(comm, kind, dtype, op, (9,), algorithm="ordered")


@pytest.mark.mpi
@EVERY_KIND
def test_all_reduce(comm, kind, dtype):
    for op in oracle.possible_ops(dtype):
        checks.every_algorithm(comm, checks.all_reduce, kind, dtype, op, (13,))
    checks.every_algorithm(comm, checks.all_reduce, kind, dtype, oracle.possible_ops(dtype)[0], ())


@pytest.mark.mpi
def test_all_reduce_of_many_elements(comm):
    checks.every_algorithm(comm, checks.all_reduce, "torch", "bfloat16", "sum", (70_001,))


@pytest.mark.mpi
@EVERY_KIND
def test_all_to_all_and_broadcast(comm, kind, dtype):
    for shape in ((1,), (0,), (3, 2)):
        checks.all_to_all(comm, kind, dtype, shape)
        for root in range(comm.size):
            checks.broadcast(comm, kind, dtype, shape, root)


@pytest.mark.mpi
@SOME_KINDS
def test_send_and_recv(comm, kind, dtype):
    for shape in ((), (0,), (5,), (70_001,)):
        checks.send_and_recv(comm, kind, dtype, shape)


@pytest.mark.mpi
def test_barrier_and_control_values(comm):
    for turn in range(10):
        comm.barrier()
        rows = comm.all_gather_values(np.array([turn, comm.rank]))
        assert rows.tolist() == [[turn, rank] for rank in range(comm.size)]


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_lists_of_several_dtypes(comm, kind):
    checks.every_algorithm(comm, checks.lists, kind)


@pytest.mark.mpi
def test_async_operations(comm):
    options = {"async_op": True}
    checks.every_algorithm(comm, checks.all_gather, "torch", "bfloat16", (37,), **options)
    checks.every_algorithm(comm, checks.reduce_scatter, "numpy", "float32", "avg", (37,), **options)
    checks.every_algorithm(comm, checks.all_reduce, "torch", "float16", "sum", (37,), **options)
    checks.broadcast(comm, "torch", "complex64", (5,), comm.size - 1, **options)
    works = [
        comm.all_reduce(
            as_array(drawn((500 + i,), "float32", i, comm.rank), "float32", "torch"), **options
        )
        for i in range(20)
    ]
    for i, work in enumerate(works):
        inputs = [drawn((500 + i,), "float32", i, rank) for rank in range(comm.size)]
        expected = oracle.reduced(inputs, "float32", comm.topology)
        assert (stored_in(work.wait())[0] == expected).all()


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("codec", ["int8", "int4:block=64"])
def test_quantised(comm, dtype, codec):
    codecs = (codec,) * len(comm.topology.levels)
    for numel in (0, 1, 391, 5000):
        fulls = [drawn((numel * comm.size,), dtype, 40, rank) for rank in range(comm.size)]
        if comm.size > 1:
            for algorithm in ("flat", "hierarchical"):
                checks.quantised_reduce_scatter(comm, fulls, dtype, codecs, algorithm=algorithm)
        gathered = comm.all_gather(as_array(fulls[comm.rank], dtype, "torch"), codec=codec)
        checks.same_everywhere(comm, gathered)
        reduced = comm.all_reduce(as_array(fulls[comm.rank], dtype, "torch"), codec=codec)
        checks.same_everywhere(comm, reduced)


@pytest.mark.mpi
def test_bytes_are_those_of_the_plan(comm):
    for codec in (None, "int8", "int4"):
        for algorithm in ("flat", "hierarchical"):
            comm.traffic.reset()
            comm.all_gather(np.zeros(1000, np.float32), codec=codec, algorithm=algorithm)
            codecs = hops.parse_codecs(codec, len(comm.topology.levels))
            layout = Layout.even("float32", 1000 * comm.size, comm.size)
            made = hops.make(
                "all_gather", [layout], comm.topology, codecs=codecs, algorithm=algorithm
            )
            assert wire(comm, "all_gather") == made.wire_nbytes(comm.rank)


@pytest.mark.mpi(min_size=2)
def test_a_difference_is_said_on_all_ranks_and_the_job_goes_on(comm):
    with pytest.raises(CollectiveMismatch, match="all_gather"):
        comm.all_gather(np.zeros(8 + (comm.rank == 0)))
    checks.all_gather(comm, "numpy", "float32", (3,))


def small(comm):
    comm.all_reduce(np.zeros(8, np.float32))


def large(comm):
    comm.all_reduce(np.zeros(70_001, np.float32))


def encoded(comm):
    comm.all_gather(np.zeros(70_001, np.float32), codec="int8")


CALLS = {
    "small and large": (small, large, "float32.8..*float32.70001.|float32.70001..*float32.8."),
    "large and small": (large, small, "float32.8..*float32.70001.|float32.70001..*float32.8."),
    "op": (small, lambda c: c.all_reduce(np.zeros(8, np.float32), op="max"), "sum.*max|max.*sum"),
    "dtype": (small, lambda c: c.all_reduce(np.zeros(8)), "float64"),
    "codec": (encoded, lambda c: c.all_gather(np.zeros(70_001, np.float32)), "int8"),
    "encoded and none": (encoded, lambda c: c.barrier(), "barrier"),
    "order": (
        lambda c: (small(c), c.broadcast(np.zeros(8))),
        lambda c: (c.broadcast(np.zeros(8)), small(c)),
        "broadcast",
    ),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", CALLS)
def test_messages_of_other_sizes_are_found_out(comm, case):
    usual, other, words = CALLS[case]
    for odd in range(comm.size):
        usual(comm)
        other(comm)
        with pytest.raises(CollectiveMismatch, match=words):
            (other if comm.rank == odd else usual)(comm)
    checks.all_gather(comm, "numpy", "float32", (3,))


def gather_and_broadcast(comm, kind, dtype, numel, turn):
    shards = [drawn((numel,), dtype, turn, rank) for rank in range(comm.size)]
    x = as_array(shards[comm.rank], dtype, kind)
    expected = b"".join(shard.tobytes() for shard in shards)
    assert stored_in(comm.all_gather(x))[0].tobytes() == expected
    comm.broadcast(x, turn % comm.size)
    assert stored_in(x)[0].tobytes() == shards[turn % comm.size].tobytes()


@pytest.mark.mpi
@EVERY_KIND
def test_calls_that_are_alike(comm, kind, dtype):
    for turn in range(3):
        gather_and_broadcast(comm, kind, dtype, 64, turn)


@pytest.mark.mpi
def test_calls_of_more_sizes_than_requests_are_kept_for(comm):
    for numel in range(1, MOST_SIZES + 10):
        gather_and_broadcast(comm, "numpy", "float32", numel, 0)


@pytest.mark.mpi
def test_groups(comm):
    for group in (comm.level(0), comm.rail(1), comm.split(comm.rank % 2, -comm.rank)):
        checks.every_algorithm(group, checks.all_reduce, "torch", "bfloat16", "sum", (37,))
        checks.every_algorithm(group, checks.all_gather, "numpy", "float32", (37,))


@pytest.mark.mpi
def test_init_again_after_close():
    for _ in range(3):
        with zcomm.init(abort=False) as made:
            checks.all_reduce(made, "numpy", "float32", "sum", (3,))
    with pytest.raises(zcomm.ZcommError, match="closed"):
        made.barrier()


@pytest.mark.mpi(min_size=2)
def test_t1_messages_above_the_limit_are_sent_in_parts(monkeypatch):
    """4000 bytes: 1000 float32 elements. Also on both sides of the limit, and counts of zero."""
    monkeypatch.setenv("ZCOMM_MESSAGE_LIMIT", "4000")
    with zcomm.init(min_numel=0, abort=False) as made:
        for numel in (999, 1000, 1001, 2000, 12_345, 0):
            checks.every_algorithm(made, checks.all_gather, "numpy", "float32", (numel,))
            checks.every_algorithm(made, checks.all_reduce, "torch", "bfloat16", "sum", (numel,))
            checks.every_algorithm(made, checks.reduce_scatter, "torch", "float32", "avg", (numel,))
            checks.all_to_all(made, "numpy", "int64", (numel,))
            checks.broadcast(made, "torch", "bfloat16", (numel,), made.size - 1)
            checks.send_and_recv(made, "torch", "float32", (numel,))
        shards = [drawn((9001,), "float32", 41, rank) for rank in range(made.size)]
        gathered = made.all_gather(shards[made.rank], codec="int4")
        for rank, one in enumerate(shards):
            expected = oracle.roundtrip("int4", one, "float32")[0]
            assert (gathered[rank * 9001 :][:9001] == expected).all()
        empty_shards(made)


def empty_shards(comm):
    """Gather and reduce where only the last rank owns something."""
    import torch

    from tests.collectives.dtypes import assert_bits

    mine = [(Segment(0, 5000),) if rank == comm.size - 1 else () for rank in range(comm.size)]
    layout = Layout("float32", tuple(mine))
    value = drawn((5000,), "float32", 42, comm.size - 1)
    shard = as_array(value if comm.rank == comm.size - 1 else value[:0], "float32", "torch")
    full = torch.full((5000,), torch.nan)
    comm.gather_layout([shard], [full], [layout])
    assert_bits(full, value, "float32")
    comm.reduce_layout([full], [shard], [layout], op="avg")
    if comm.rank == comm.size - 1:
        values = [value] * comm.size
        assert_bits(shard, oracle.reduced(values, "float32", comm.topology, "avg"), "float32")


@pytest.mark.parametrize("num_ranks", [4])
def test_t2_ranks_placed_round_robin(launch, mpi_vendor, num_ranks):
    """MPICH plays two nodes, even and odd ranks; they are discovered, and results are right."""
    if mpi_vendor != "MPICH":
        pytest.skip(f"{mpi_vendor} cannot play several nodes on one; tests/cluster does")
    ended = launch(
        "-m",
        "pytest",
        "--with-mpi",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/collectives/test_mpi.py::test_round_robin_nodes_are_discovered",
        num_ranks=num_ranks,
        env={"MPIR_CVAR_ODD_EVEN_CLIQUES": "1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout


@pytest.mark.mpi(min_size=4)
def test_round_robin_nodes_are_discovered():
    if os.environ.get("MPIR_CVAR_ODD_EVEN_CLIQUES") != "1":
        pytest.skip("a child of test_t2_ranks_placed_round_robin")
    with zcomm.init(min_numel=0, abort=False) as made:
        nodes = made.topology.levels[0].groups
        assert nodes == (
            tuple(range(0, made.size, 2)),
            tuple(range(1, made.size, 2)),
        )
        checks.every_algorithm(made, checks.all_gather, "torch", "bfloat16", (37,))
        checks.every_algorithm(made, checks.reduce_scatter, "torch", "bfloat16", "avg", (37,))
        checks.every_algorithm(made, checks.all_reduce, "numpy", "float32", "sum", (37,))
        fulls = [drawn((made.size * 300,), "float32", 43, rank) for rank in range(made.size)]
        how = {"algorithm": "hierarchical"}
        checks.quantised_reduce_scatter(made, fulls, "float32", ("int8", "int4"), **how)
