"""``benchmarks.swap`` moves what it says, checks it, and leaves nothing behind."""

import json
import shutil
import statistics

import pytest

from benchmarks.launch import UsageError
from benchmarks.swap import Fio, Row, parse

SMALL = ("--size", "768K", "--tensor", "256K", "--block", "64K", "-n", "2")
slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("words", [(), ("--unaligned",)])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_program(launch, tmp_path, num_ranks, words):
    folder, file = tmp_path / "disk", tmp_path / "rows.jsonl"
    folder.mkdir()
    words = ("--path", folder, "--json", file, *SMALL, *words)
    run = launch("-m", "benchmarks.swap", *words, num_ranks=num_ranks)
    assert run.returncode == 0, run.stderr
    assert "# every tensor came back as it was" in run.stdout
    assert list(folder.iterdir()) == []
    lines = [line.split() for line in run.stdout.splitlines() if not line.startswith("#")]
    settings, *rows = map(json.loads, file.read_text().splitlines())
    assert (settings["ranks"], settings["size"], settings["turns"]) == (num_ranks, 768 << 10, 2)
    moved = {"write": 768 << 10, "read": 768 << 10, "step": 1536 << 10}
    for line, row in zip(lines, rows, strict=True):
        assert [line[0], line[1]] == [str(row["nbytes"]), row["pattern"]]
        assert row["nbytes"] == num_ranks * moved[row["pattern"]]
        assert float(line[2]) == pytest.approx(statistics.median(row["ours"]), abs=0.0005)
        assert len(row["ours"]) == 2
        assert len(row["fio"]) == (2 if shutil.which("fio") else 0)
    assert ("fio is missing" in run.stdout) == (shutil.which("fio") is None)


def test_a_row_without_fio_says_so():
    words = str(Row(8, "read", [1.0, 3.0, 2.0], [])).split()
    assert words == ["8", "read", "2.000", "N/A", "N/A", "1.00-3.00"]
    assert "2.000   4.000   0.50" in str(Row(8, "read", [2.0], [4.0]))


def test_fio_is_asked_for_the_same(tmp_path):
    words = Fio(parse(["--path", str(tmp_path), *SMALL, "--depth", "3"]), direct=True)._words
    wanted = {"--size=786432", "--bs=65536", "--iodepth=3", "--direct=1", "--overwrite=1"}
    assert wanted <= set(words)


def test_mistakes():
    for words, text in (
        (["--size", "100M"], "--size 104857600 --tensor 67108864: .* three tensors"),
        (["--size", "128M"], "three tensors or more"),
        (["--block", "1000"], "--block 1000: a multiple of 4096 that divides --tensor 67108864"),
        (["--block", "12K"], "divides --tensor"),
        (["-n", "0"], "0 is less than 1"),
    ):
        with pytest.raises(UsageError, match=text):
            parse(words)
