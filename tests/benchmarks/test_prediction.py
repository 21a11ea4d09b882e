"""The program that compares the cost model with what operations take; its seconds mean nothing."""

import pytest

import zcomm
from benchmarks import launch
from benchmarks.prediction import Row, parse, run
from topology import from_shape


def test_an_error_is_a_part_of_what_was_measured():
    row = Row("all_gather", "int8", 2**20, "flat", measured=0.002, predicted=0.003)
    assert row.error == pytest.approx(0.5)
    assert str(row).split() == ["1024", "all_gather", "int8", "flat", "2.000", "3.000", "+50.0%"]


@pytest.mark.parametrize(("limit", "code"), [("1e12", 0), ("0", 1)])
def test_every_way_has_a_row_and_the_limit_decides(limit, code, capsys):
    words = ["--sizes", "64K", "--codecs", "none", "int8", "--seconds", "0.01", "--limit", limit]
    options = parse(words)
    codes = zcomm.run_local(lambda comm: run(options, comm), 4, from_shape((2, 2)), min_numel=0)
    assert codes == [code] * 4
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    operations = ("all_gather", "reduce_scatter", "all_reduce")
    assert {tuple(row[1:4]) for row in rows} == {
        (operation, codec, how)
        for operation in operations
        for codec in ("none", "int8")
        for how in ("flat", "hierarchical")
    }
    assert lines[-1].startswith("# over ")


def test_constants_of_the_same_job(capsys):
    words = ["--sizes", "64K", "--codecs", "none", "--seconds", "0.01", "--tune", "0.5"]
    options = parse([*words, "--limit", "1e12"])
    zcomm.run_local(lambda comm: run(options, comm), 2, from_shape((2, 1)), min_numel=0)
    assert capsys.readouterr().out.splitlines()[0].endswith("; measured now")


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(launch.UsageError, match="--rounds 0: at least 1"):
        parse(["--rounds", "0"])
    with pytest.raises(launch.UsageError, match=r"--tune -1\.0: more than 0"):
        parse(["--tune", "-1"])
