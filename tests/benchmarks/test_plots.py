"""Pictures of results: what is drawn is what the files say, and what cannot be drawn is said."""

import itertools
import json

import pytest
from matplotlib import pyplot

from benchmarks.launch import UsageError
from benchmarks.plots import __main__ as program
from benchmarks.plots import levels, lines, look, sizes, steps


@pytest.fixture(autouse=True)
def _close():
    yield
    pyplot.close("all")


def row_of(name, nbytes, ms, *, library="zcomm", codec=None, floor_ms=None, **more):
    seconds = [x / 1e3 for x in ms]
    item = {
        "kind": "row",
        "operation": "all_gather",
        "dtype": "bfloat16",
        "nbytes": nbytes,
        "name": name,
        "library": library,
        "codec": codec,
        "seconds": seconds,
        "median": sorted(seconds)[len(seconds) // 2],
        "floor": None if floor_ms is None else floor_ms / 1e3,
        "level_nbytes": [300, 400, 500] if library == "zcomm" else None,
        "interface_nbytes": 600,
        "num_nodes": 2,
        "num_ranks": 4,
        "rate": 9.57e8,
    }
    return item | more


ROWS = [
    row_of("zcomm exact", 4096, (3, 1, 2), floor_ms=0.5),
    row_of("zcomm exact", 16384, (6, 5, 7), floor_ms=2),
    row_of("zcomm int8", 4096, (1, 1, 1), codec="int8", floor_ms=0.3),
    row_of("zcomm int8 flat", 4096, (2, 2, 2), codec="int8", floor_ms=0.6),
    row_of("gloo tensor", 4096, (9, 9, 9), library="gloo", floor_ms=0.5),
    row_of("gloo list", 4096, (8, 8, 8), library="gloo", floor_ms=0.5),
    row_of("gloo tensor", 16384, (20, 21, 22), library="gloo", floor_ms=2),
    row_of("gloo list", 16384, (30, 31, 32), library="gloo", floor_ms=2),
]
STEPS = [
    {"name": "first", "compute_s": 1.0, "comm_s": 2.0, "other_s": 0.5},
    {"name": "second", "compute_s": 1.0, "comm_s": 0.25, "other_s": 0.0},
]


def file_of(tmp_path, items, name="lines.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_curves_are_medians_and_the_better_call_of_a_peer():
    found = {curve.name: curve for curve in sizes.curves(ROWS)}
    assert list(found) == ["gloo", "zcomm exact", "zcomm int8 flat", "zcomm int8"]
    assert found["gloo"].median == {4096: 0.008, 16384: 0.021}
    assert found["zcomm exact"].median == {4096: 0.002, 16384: 0.006}
    # Of 1, 2 and 3 ms half lie from 1.5 to 2.5.
    assert found["zcomm exact"].low[4096] == pytest.approx(0.0015)
    assert found["zcomm exact"].high[4096] == pytest.approx(0.0025)
    assert found["zcomm int8"].color == found["zcomm int8 flat"].color
    assert found["zcomm int8"].style != found["zcomm int8 flat"].style


def test_the_floor_of_a_codec_is_that_of_its_best_algorithm():
    assert sizes.floors(ROWS) == {None: {4096: 0.0005, 16384: 0.002}, "int8": {4096: 0.0003}}


def test_lines_of_the_picture_hold_the_medians(tmp_path):
    drawn = sizes.figure([lines.read(file_of(tmp_path, ROWS))])
    (axes,) = drawn.axes
    data = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert ([4096, 16384], [8, 21]) in data
    assert ([4096, 16384], [0.5, 2]) in data
    words = {text.get_text() for text in axes.texts}
    assert {"gloo", "zcomm exact", "wire floor, exact", "wire floor, int8"} <= words


def test_rows_without_a_link_have_no_floor(tmp_path):
    rows = [{**row, "floor": None, "rate": None} for row in ROWS]
    (axes,) = sizes.figure([lines.read(file_of(tmp_path, rows))]).axes
    assert not any("floor" in text.get_text() for text in axes.texts)


@pytest.mark.parametrize(
    "heights", [[0.5, 0.5, 0.5], [0.0, 0.01, 0.9], [1.0, 0.99], [0.3], [], [0.9, 0.91, 0.92, 0.2]]
)
def test_names_are_apart_in_their_order_and_inside(heights):
    moved = sizes.apart(heights, 0.05)
    order = sorted(range(len(heights)), key=lambda which: heights[which])
    for low, high in itertools.pairwise(order):
        assert moved[high] - moved[low] >= 0.05 - 1e-9
    assert all(height <= 1 + 1e-9 for height in moved)


def test_names_that_are_apart_stay():
    assert sizes.apart([0.2, 0.8, 0.5], 0.05) == pytest.approx([0.2, 0.8, 0.5])


def test_bars_are_bytes_between_nodes_and_inside():
    small = [row for row in ROWS if row["nbytes"] == 4096]
    assert levels.bars(small) == [
        levels.Bar("zcomm exact", 700, 500),
        levels.Bar("zcomm int8", 700, 500),
        levels.Bar("zcomm int8 flat", 700, 500),
        levels.Bar("gloo tensor", None, 600),
        levels.Bar("gloo list", None, 600),
    ]


def test_levels_are_drawn_of_one_size(tmp_path):
    read = lines.read(file_of(tmp_path, ROWS))
    (axes,) = levels.figure([read]).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "zcomm exact",
        "gloo tensor",
        "gloo list",
    ]
    with pytest.raises(UsageError, match="-b 5: no messages of that size; there are 4096, 16384"):
        levels.figure([read], 5)


def test_steps_are_stacked(tmp_path):
    (axes,) = steps.figure([lines.read(file_of(tmp_path, STEPS, "1gbit.jsonl"))]).axes
    assert axes.get_title(loc="left") == "1gbit"
    ends = {(round(bar.get_x(), 6), round(bar.get_width(), 6)) for bar in axes.patches}
    assert {(0, 1), (1, 0.5), (1.5, 2), (1, 0), (1, 0.25)} == ends
    assert "3.50 s" in {text.get_text() for text in axes.texts}


@pytest.mark.parametrize("kind", program.KINDS)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_written(tmp_path, kind, suffix, capsys):
    path = file_of(tmp_path, STEPS if kind == "steps" else ROWS)
    output = tmp_path / f"picture.{suffix}"
    assert program.main([kind, str(path), "-o", str(output)]) == 0
    assert output.stat().st_size > 5000
    assert str(output) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("no json\n", "line 1: no JSON object"),
        ('{"kind": "row"}\n[1]\n', "line 2: no JSON object"),
        ('{"kind": "header"}\n', "no rows of benchmarks.wire"),
        ("", "no rows of benchmarks.wire"),
    ],
)
def test_files_of_something_else(tmp_path, content, part, capsys):
    path = tmp_path / "lines"
    path.write_text(content)
    assert program.main(["sizes", str(path), "-o", str(tmp_path / "a.png")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line


def test_what_cannot_be_read_or_written(tmp_path, capsys):
    path = file_of(tmp_path, ROWS)
    missing = tmp_path / "missing"
    for words in (
        ["sizes", str(missing), "-o", str(tmp_path / "a.png")],
        ["sizes", str(path), "-o", str(tmp_path / "a.text")],
        ["sizes", str(path), "-o", str(missing / "a.png")],
    ):
        assert program.main(words) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_sizes_in_words():
    assert [look.size(n) for n in (1, 4096, 3 * 2**19, 2**28, 2**30)] == [
        "1 B", "4 KiB", "1.5 MiB", "256 MiB", "1 GiB",
    ]  # fmt: skip
