"""The check of single calls: right results pass, and what is spoilt is counted."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import zcomm
from benchmarks.collectives.cases import DATA_TYPES, OPERATIONS, Case
from benchmarks.collectives.perform import perform
from benchmarks.wire import check
from benchmarks.wire.variants import Arrays
from tests.marks import one_in

OPERATION_NAMES = ("all_gather", "reduce_scatter", "all_reduce")


def case_of(name, codec, *, dtype="bfloat16", count=1000, num_ranks=4, algorithm="auto"):
    operation = OPERATIONS[name]
    op = "sum" if operation.reduces else None
    return Case(operation, DATA_TYPES[dtype], count, num_ranks, op, None, codec, algorithm)


def wrong_of(case, spec="2x2", spoil=lambda rank, out: None):
    """Run a case on threads, spoil its results, and return the wrong elements of every rank."""
    data = check.Data(case.dtype, case.num_ranks)
    numel = case.count if case.operation.name == "all_gather" else case.numel

    def run(comm):
        arrays = Arrays(case, data.source(comm.rank, numel))
        arrays.poison()
        in_place = case.operation.in_place
        perform(comm, case, *((arrays.out, None) if in_place else (arrays.source, arrays.out)))
        spoil(comm.rank, arrays.out)
        return check.num_wrong(case, comm.topology, data, comm.rank, arrays.out)

    return zcomm.run_local(run, case.num_ranks, spec, min_numel=0)


@pytest.mark.parametrize(
    ("name", "codec", "dtype", "algorithm"),
    one_in(
        3,
        OPERATION_NAMES,
        [None, "int8", "int4"],
        ["bfloat16", "float", "half"],
        ["flat", "hierarchical"],
    ),
)
def test_right_results_pass(name, codec, dtype, algorithm):
    case = case_of(name, codec, dtype=dtype, count=4104, algorithm=algorithm)
    assert wrong_of(case) == [0] * 4


@pytest.mark.parametrize("name", OPERATION_NAMES)
@pytest.mark.parametrize("codec", [None, "int4"])
def test_right_results_of_large_chunks_pass(name, codec):
    """Larger than the windows, and than the pattern."""
    num_ranks, spec = 2, "2x1"
    whole = check.PATTERN + 3 * check.WINDOW + 8
    count = whole if OPERATIONS[name].chunked else 2 * whole
    assert wrong_of(case_of(name, codec, count=count, num_ranks=num_ranks), spec) == [0, 0]


@pytest.mark.parametrize("name", OPERATION_NAMES)
@pytest.mark.parametrize("codec", [None, "int8", "int4"])
def test_one_element_that_is_not_written(name, codec):
    def spoil(rank, out):
        if rank == 3:
            out[-1] = torch.nan

    found = wrong_of(case_of(name, codec), spoil=spoil)
    assert [min(number, 1) for number in found] == [0, 0, 0, 1]


def test_one_unit_of_a_gather_without_codec():
    def spoil(rank, out):
        if rank == 1:
            out.view(torch.int16)[1234] ^= 1

    assert wrong_of(case_of("all_gather", None), spoil=spoil) == [0, 1, 0, 0]


@pytest.mark.parametrize("codec", [None, "int8"])
def test_chunks_in_the_wrong_order(codec):
    def spoil(rank, out):
        if rank == 0:
            out.copy_(out.view(4, -1)[[1, 0, 2, 3]].reshape(-1))

    found = wrong_of(case_of("all_gather", codec), spoil=spoil)
    assert found[0] > 1500
    assert found[1:] == [0, 0, 0]


@pytest.mark.parametrize("codec", [None, "int4"])
def test_a_rank_that_is_missing_in_the_sum(codec):
    case = case_of("reduce_scatter", codec)
    data = check.Data(case.dtype, 4)

    def spoil(rank, out):
        if rank == 2:
            out -= torch.from_numpy(data.values(1, 2000, 3000)).to(out.dtype)

    found = wrong_of(case, spoil=spoil)
    assert found[2] > 100  # where the input that is missing is beyond the bound
    assert found[:2] + found[3:] == [0, 0, 0]


def test_garbage_between_the_windows():
    """There a quantised result is compared with the largest bound of the windows."""
    place = check.WINDOW + 4096

    def spoil(rank, out):
        if rank == 1:
            out[place] = 1000

    case = case_of("reduce_scatter", "int4", count=6 * check.WINDOW, num_ranks=2)
    assert not any(start <= place < stop for start, stop in check.windows(case.count))
    assert wrong_of(case, "2x1", spoil) == [0, 1]


@pytest.mark.parametrize("numel", [0, 1, 4096, 3 * check.WINDOW, 3 * check.WINDOW + 1, 10**6 + 7])
def test_windows_begin_at_blocks_and_hold_both_ends(numel):
    found = check.windows(numel)
    assert all(start % 4096 == 0 and start < stop <= numel for start, stop in found)
    if numel:
        assert found[0][0] == 0
        assert found[-1][1] == numel


def test_data_repeat_after_a_prime():
    data = check.Data(DATA_TYPES["float"], 2)
    far = data.values(1, check.PATTERN - 3, check.PATTERN + 5)
    near = data.values(1, 0, 5)
    np.testing.assert_array_equal(far[3:], near)
    source = data.source(1, check.PATTERN + 5)
    np.testing.assert_array_equal(source[-8:].numpy(), far)
    assert not np.array_equal(near, data.values(0, 0, 5))


def test_the_source_of_an_operation_in_place_survives():
    case = case_of("all_reduce", None, count=64)
    arrays = Arrays(replace(case, num_ranks=1), torch.ones(64, dtype=torch.bfloat16))
    arrays.prepare()
    arrays.out.mul_(2)
    arrays.prepare()
    assert arrays.out.eq(1).all()
