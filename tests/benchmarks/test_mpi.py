"""The collective benchmark on any number of MPI ranks: right results, and planted mistakes."""

import pytest

import zcomm
from benchmarks.collectives.options import parse
from benchmarks.collectives.run import run
from tests.benchmarks import corruptions


@pytest.fixture(scope="module", params=["discovered", "nodes"])
def comm(request):
    """A communicator over all ranks that uses every codec, however small the message."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    spec = "auto" if request.param == "discovered" else "2x2" if size == 4 else f"{size}x1"
    with zcomm.init(topology=spec, min_numel=0, abort=False) as made:
        yield made


def run_quickly(comm, text, **how):
    return run(parse(f"{text} -b 1K -e 16K -f 16 -n 2 -w 1".split()), comm, **how)


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["int8", "half", "bfloat16", "double"])
def test_every_operation_is_right(comm, dtype, capfd):
    assert run_quickly(comm, f"all -o all -d {dtype}") == 0
    rows = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("#")]
    num_reductions = 4 if dtype == "int8" else 5
    # all_gather, all_to_all, broadcast, and two that reduce; two sizes each.
    assert len(rows) == (2 * (3 + 2 * num_reductions) if comm.rank == 0 else 0)


@pytest.mark.mpi
@pytest.mark.parametrize("codec", ["int8", "int4:block=64", "int8,int4", "bf16"])
@pytest.mark.parametrize("algorithm", ["auto", "flat", "hierarchical"])
def test_every_codec_is_right(comm, codec, algorithm):
    for dtype in ("float", "bfloat16"):
        text = f"all -o avg -d {dtype} --codec {codec} --algorithm {algorithm}"
        assert run_quickly(comm, text) == 0


@pytest.mark.mpi
@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
def test_one_wrong_bit_fails_on_all_ranks(comm, operation, capfd):
    assert run_quickly(comm, operation, perform=corruptions.one_bit) == 1
    # Two sizes, and two passes of checks each.
    assert ("# Wrong elements: 4 FAILED" in capfd.readouterr().out) == (comm.rank == 0)
