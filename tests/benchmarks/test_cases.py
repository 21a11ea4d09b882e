"""Sizes, factors and sweeps: the rules that people know from the NCCL tests, in numbers."""

import pytest

from benchmarks.collectives.cases import DATA_TYPES, OPERATIONS, Case, count_of, sweep


@pytest.mark.parametrize(
    ("operation", "num_ranks", "factor"),
    [
        ("all_reduce", 4, 1.5),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 2, 0.5),
        ("all_to_all", 8, 0.875),
        ("broadcast", 5, 1.0),
        ("all_reduce", 1, 0.0),
        ("all_gather", 1, 0.0),
    ],
)
def test_bus_bandwidth_is_algorithm_bandwidth_times_the_factor(operation, num_ranks, factor):
    case = Case(OPERATIONS[operation], DATA_TYPES["float"], 16, num_ranks)
    assert case.busbw(100.0) == 100.0 * factor


@pytest.mark.parametrize(
    ("dtype", "nbytes", "num_ranks", "count"),
    [
        ("float", 8, 8, 0),  # less than 16 bytes a rank: the row has size 0
        ("float", 1048576, 4, 65536),
        ("float", 100, 4, 4),  # 25 elements, 6 a rank, down to 16 bytes
        ("half", 1000, 3, 160),  # 500 elements, 166 a rank, down to a multiple of 8
        ("bfloat16", 1000, 3, 160),
        ("double", 100, 3, 4),  # 12 elements, 4 a rank
        ("int8", 100, 3, 32),
        ("uint64", 47, 1, 4),
    ],
)
def test_chunks_are_rounded_down_to_16_bytes(dtype, nbytes, num_ranks, count):
    dtype = DATA_TYPES[dtype]
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        operation = OPERATIONS[name]
        found = count_of(operation, dtype, nbytes, num_ranks)
        case = Case(operation, dtype, found, num_ranks)
        assert found == count
        assert case.size == count * num_ranks * dtype.itemsize
        assert case.size <= nbytes


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_a_buffer_that_is_not_cut_has_all_its_elements(name):
    found = count_of(OPERATIONS[name], DATA_TYPES["float"], 103, 4)
    assert found == 25
    assert Case(OPERATIONS[name], DATA_TYPES["float"], found, 4).size == 100


def test_a_sweep_multiplies_or_adds_and_includes_the_end():
    assert sweep(8, 128, factor=2, step=1) == [8, 16, 32, 64, 128]
    assert sweep(8, 100, factor=3, step=1) == [8, 24, 72]
    assert sweep(100, 400, factor=None, step=100) == [100, 200, 300, 400]
    assert sweep(7, 7, factor=None, step=1) == [7]


def test_data_types_have_the_size_that_their_name_says():
    sizes = {name: dtype.itemsize for name, dtype in DATA_TYPES.items()}
    assert sizes == {
        "int8": 1,
        "uint8": 1,
        "int32": 4,
        "uint32": 4,
        "int64": 8,
        "uint64": 8,
        "half": 2,
        "bfloat16": 2,
        "float": 4,
        "double": 8,
    }
