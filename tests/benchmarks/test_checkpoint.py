"""``benchmarks.checkpoint`` measures what it says, loads what it saved, leaves nothing behind."""

import pytest

from benchmarks.checkpoint import parse
from benchmarks.launch import UsageError

pytestmark = pytest.mark.slow


def test_the_program(launch, tmp_path):
    folder = tmp_path / "saves"
    words = ("--params", "2M", "-n", "2", "--folder", folder)
    run = launch("-m", "benchmarks.checkpoint", *words, num_ranks=2)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "25 MB in 2 files" in lines[0]  # 12 bytes of 2^21 parameters
    rows = [[*map(float, line.split())] for line in lines if not line.startswith("#")]
    assert len(rows) == 2
    for plain, copy, save, held, behind in rows:
        assert min(plain, copy, save, held) > 0
        assert behind >= held
    (summary,) = [line for line in lines if line.startswith("# save")]
    median = sum(row[2] for row in rows) / 2
    assert float(summary.split()[2]) == pytest.approx(median, abs=0.0011)
    # Seconds are printed to a thousandth, rates to one MB/s.
    megabytes, rate = 12 * 2**21 / 1e6, float(summary.split()[4])
    assert megabytes / (median + 0.0011) - 0.5 <= rate <= megabytes / (median - 0.0011) + 0.5
    assert not folder.exists()


def test_mistakes(tmp_path):
    with pytest.raises(UsageError, match="-n 0: at least 1"):
        parse(["-n", "0"])
    with pytest.raises(UsageError, match="--params 1000: at least 1048576"):
        parse(["--params", "1000"])
