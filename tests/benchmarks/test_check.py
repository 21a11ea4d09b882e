"""Checks: all right results pass on every played topology, and a single wrong bit is found."""

import pytest

import zcomm
from benchmarks.collectives.cases import DATA_TYPES, OPERATIONS, Case
from benchmarks.collectives.check import check
from benchmarks.collectives.options import parse
from benchmarks.collectives.perform import perform
from benchmarks.collectives.run import run
from tests.benchmarks import corruptions


def options_of(text):
    return parse(text.split())


def outcome_of(case, spec, size, operation=perform):
    outcomes = zcomm.run_local(
        lambda comm: check(comm, case, operation, rounds=1, seed=3), size, spec, min_numel=0
    )
    assert [repr(outcome) for outcome in outcomes] == [repr(outcomes[0])] * size
    return outcomes[0]


def case_of(name, dtype="float", *, num_ranks=4, op="sum", codec=None, count=1000):
    operation = OPERATIONS[name]
    how = {"op": op if operation.reduces else None, "root": 1 if operation.rooted else None}
    return Case(operation, DATA_TYPES[dtype], count, num_ranks, codec=codec, **how)


@pytest.mark.parametrize(
    ("spec", "size"), [("2x2", 4), ("2x3", 6), ("1x4", 4), ("4x1", 4), ("2+1", 3)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float"])
@pytest.mark.parametrize("codec", [None, "int4", ("int8", "int4")])
def test_what_zcomm_computes_is_right(spec, size, dtype, codec):
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        used = codec[-1] if name == "all_gather" and isinstance(codec, tuple) else codec
        case = case_of(name, dtype, num_ranks=size, op="avg", codec=used)
        assert outcome_of(case, spec, size).num_wrong == 0


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_every_type_and_reduction_is_right_without_a_codec(dtype, op):
    for name in OPERATIONS:
        assert outcome_of(case_of(name, dtype, op=op), "2x2", 4).num_wrong == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_size_of_nothing_is_right(name):
    assert outcome_of(case_of(name, count=0), "2x2", 4).num_wrong == 0


@pytest.mark.parametrize(
    ("name", "codec"),
    [(name, None) for name in OPERATIONS]
    + [(name, "int8") for name, operation in OPERATIONS.items() if operation.takes_codec],
)
def test_one_wrong_bit_on_one_rank_is_one_wrong_element_of_each_pass(name, codec):
    case = case_of(name, codec=codec)
    assert outcome_of(case, "2x2", 4, corruptions.one_bit).num_wrong == 2


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_an_element_that_is_not_written_is_wrong(name):
    assert outcome_of(case_of(name), "2x2", 4, corruptions.unwritten).num_wrong == 2
    everything = {"all_gather": 4000, "reduce_scatter": 1000, "all_to_all": 4000}[name]
    case = case_of(name, "int8", op="max")
    # 127 is the poison and may be right; integers have one pass.
    wrong = outcome_of(case, "2x2", 4, corruptions.never_run).num_wrong
    assert 0.9 * 4 * everything < wrong <= 4 * everything


def test_errors_are_those_of_the_float64_result():
    case = case_of("all_gather", codec="int4", count=4096)
    found = outcome_of(case, "2x2", 4)
    # docs/numerics.md: int4 in blocks of 128 has a relative mean square error of 0.0107 on a normal
    # distribution; these data are a little flatter. The largest error is at most a step: an eighth.
    assert 0.05 < found.rms_error < 0.0107**0.5
    assert found.rms_error < found.max_error < 1 / 8
    exact = outcome_of(case_of("all_gather", count=4096), "2x2", 4)
    assert (exact.max_error, exact.rms_error) == (0.0, 0.0)
    rounded = outcome_of(case_of("all_reduce", "bfloat16", count=4096), "2x2", 4)
    assert 0 < rounded.rms_error < 2**-7


def test_the_program_fails_when_an_element_is_wrong(capsys):
    options = options_of("reduce_scatter -b 1K -e 1K -n 1 -w 0 --codec int8")
    codes = zcomm.run_local(
        lambda comm: run(options, comm, perform=corruptions.one_bit), 4, "2x2", min_numel=0
    )
    printed = capsys.readouterr().out
    assert codes == [1, 1, 1, 1]
    assert "# Wrong elements: 2 FAILED" in printed
    row = next(line.split() for line in printed.splitlines() if not line.startswith("#"))
    assert row[8] == "2"


def test_unchecked_rows_do_not_fail(capsys):
    options = options_of("all_gather -b 1K -e 1K -n 1 -w 0 -c 0")
    codes = zcomm.run_local(lambda comm: run(options, comm, perform=corruptions.one_bit), 2, "1x2")
    assert codes == [0, 0]
    assert "# Wrong elements: not checked" in capsys.readouterr().out
