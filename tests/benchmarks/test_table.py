"""The table: what parsers of the NCCL tests' output look for is where they look for it."""

import json

import pytest

import topology
import zcomm
from benchmarks.collectives import record, table
from benchmarks.collectives.cases import DATA_TYPES, OPERATIONS, Case
from benchmarks.collectives.check import Outcome
from benchmarks.collectives.measure import Timing
from benchmarks.collectives.options import parse
from benchmarks.collectives.run import run
from benchmarks.collectives.table import Result

RIGHT = Outcome(num_wrong=0, max_error=2.5e-3, rms_error=1.5e-3)


def options_of(text):
    return parse(text.split())


def result_of(name, *, outcome=RIGHT, op=None, root=None):
    operation = OPERATIONS[name]
    count = 262144 // 4 if operation.chunked else 262144
    case = Case(operation, DATA_TYPES["float"], count, 4, op=op, root=root, codec=None)
    timing = Timing(31.23e-6, 40e-6, 1e-6, 2e-6, 3.5e-6, 1000, 2000, 12000)
    return Result(case, timing, outcome)


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (31.234, 7, "31.23"),
        (12345.67, 7, "12345.7"),
        (123456.7, 7, "123457"),
        (123456789.0, 7, "1e+08"),
        (0.0, 6, "0.00"),
        (1234.5, 6, "1234.5"),
    ],
)
def test_a_number_has_as_many_decimals_as_fit(value, width, text):
    assert table.number(value, width) == text


def test_a_row_out_of_place():
    cells = table.row(result_of("all_gather")).split()
    size, time = 1048576, 31.23e-6
    assert cells[:5] == ["1048576", "65536", "float", "none", "-1"]
    assert cells[5:9] == [
        "31.23",
        f"{size / time / 1e9:.2f}",
        f"{size / time / 1e9 * 0.75:.2f}",
        "0",
    ]
    assert cells[9:13] == ["N/A"] * 4
    assert cells[13:] == ["1000", "2000", "4.00", "1.00", "2.00", "3.50", "2.5e-03", "1.5e-03"]


def test_a_row_in_place_has_its_figures_in_the_second_placement():
    cells = table.row(result_of("all_reduce", op="avg")).split()
    assert cells[:5] == ["1048576", "262144", "float", "avg", "-1"]
    assert cells[5:9] == ["N/A"] * 4
    assert cells[9:13] == ["31.23", "33.58", "50.36", "0"]
    assert table.row(result_of("broadcast", root=3)).split()[3:5] == ["none", "3"]


def test_an_unchecked_row_says_so():
    cells = table.row(result_of("all_gather", outcome=None)).split()
    assert cells[8] == "N/A"
    assert cells[-2:] == ["N/A", "N/A"]


def test_titles_stand_over_their_columns():
    _, titles, units = table.header()
    row = table.row(result_of("all_gather"))
    assert len(titles) == len(row)
    assert all(line.startswith("#") for line in table.header())
    assert row.index("1048576") + len("1048576") == titles.index("size") + len("size")
    assert units[: len("#        (B)")].strip("# ") == "(B)"
    names = titles[1:].split()
    assert names[:5] == ["size", "count", "type", "redop", "root"]
    assert names[5:9] == names[9:13] == ["time", "algbw", "busbw", "#wrong"]


def test_what_is_printed_without_comments_is_the_rows(capsys):
    options = options_of("all -b 128 -e 512 -f 2 -n 1 -w 0 --codec int8")
    codes = zcomm.run_local(lambda comm: run(options, comm), 2, "2x1", min_numel=0)
    printed = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in printed if not line.startswith("#")]
    assert codes == [0, 0]
    assert len(rows) == 3 * len(OPERATIONS)
    assert [row[0] for row in rows[:3]] == ["128", "256", "512"]
    assert all(len(row) == 21 for row in rows)
    # 64 elements a rank: codes in 64 bytes, one scale in 16.
    assert rows[0][13:15] == ["0", "32"]


def test_json_lines_hold_every_row_and_no_stranger_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "swordfish")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = parse(
        ["all_reduce", "-b", "64", "-e", "128", "-f", "2", "-n", "1", "-J", f"{tmp_path}/x"]
    )
    with record.open_new(options) as file:
        zcomm.run_local(
            lambda comm: run(options, comm, file=file if comm.rank == 0 else None), 2, "1x2"
        )
    text = (tmp_path / "x").read_text()
    header, *rows, summary = map(json.loads, text.splitlines())
    assert header["kind"] == "header"
    assert header["ranks"] == 2
    assert header["topology"]["digest"] == topology.parse("1x2", 2).digest()
    assert header["environment"]["OMP_NUM_THREADS"] == "1"
    assert "swordfish" not in text
    assert [row["size"] for row in rows] == [64, 128]
    assert all(row["outcome"]["num_wrong"] == 0 for row in rows)
    assert all(row["busbw"] == pytest.approx(row["algbw"], rel=1e-12) for row in rows)
    assert summary["num_wrong"] == 0


def test_a_file_of_results_is_never_overwritten(tmp_path):
    (tmp_path / "x").write_text("kept")
    options = parse(["all_reduce", "-J", f"{tmp_path}/x"])
    with pytest.raises(ValueError, match="File exists"):
        record.open_new(options)
    assert (tmp_path / "x").read_text() == "kept"
