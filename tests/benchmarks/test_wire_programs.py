"""benchmarks.wire under mpirun: rows of every variant, right clocks, and wrong results found."""

import json
import time

import numpy as np
import pytest

from tests.benchmarks.test_programs import words_of_ranks

WIRE = ["-m", "benchmarks.wire"]
SMALL = ["-b", "64K", "-n", "2"]
SPOILT = """
import sys
from benchmarks import launch
from benchmarks.wire import options, run

def spoil(variant, arrays):
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1 and variant.name == {name!r}:
        arrays.out[7] = 1000

def spoilt(parsed, comm):
    return run.run(parsed, comm, spoil=spoil)

sys.exit(launch.main("benchmarks.wire", options.parse, spoilt, sys.argv[1:]))
"""


def rows_of(text):
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def test_rows_of_all_variants_and_operations(launch, tmp_path):
    path = tmp_path / "lines"
    words = ["all_gather", "reduce_scatter", "all_reduce", *SMALL, "-d", "float", "-J", path]
    done = launch(*WIRE, *words, num_ranks=2)
    assert done.returncode == 0, done.stderr
    items = [json.loads(line) for line in path.read_text().splitlines()]
    assert items[0]["schema"] == "zcomm.wire/1"
    rows = [item for item in items if item["kind"] == "row"]
    names = {}
    for row in rows:
        names.setdefault(row["operation"], []).append(row["name"])
        assert row["num_wrong"] == 0
        assert len(row["seconds"]) == 2
        assert 0 < min(row["seconds"]) <= row["median"] <= max(row["seconds"])
        assert row["nbytes"] == 65536
        # One machine: no link, so no floor, and nothing is sent to other nodes.
        assert row["floor"] is None
    both = ["gloo tensor", "gloo list", "MPI"]
    assert names == {
        "all_gather": ["zcomm exact", "zcomm int8", *both],
        "reduce_scatter": ["zcomm exact", "zcomm int4", *both],
        "all_reduce": ["zcomm exact", "zcomm int8", "gloo", "MPI"],
    }
    assert len(rows_of(done.stdout)) == len(rows)


@pytest.mark.slow
def test_what_mpi_cannot_do_is_absent_with_its_reason(launch):
    done = launch(*WIRE, "reduce_scatter", *SMALL, "--peers", "mpi", num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert "# MPI: absent, MPI has no bfloat16 to sum" in done.stdout
    assert len(rows_of(done.stdout)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zcomm int8", "zcomm exact", "gloo tensor", "MPI"])
def test_a_wrong_element_of_any_variant_is_found(launch, name):
    done = launch("-c", SPOILT.format(name=name), "all_gather", *SMALL, num_ranks=2)
    assert done.returncode != 0
    assert "# Wrong elements: 1 FAILED" in done.stdout
    (wrong,) = (row for row in rows_of(done.stdout) if row[-1] != "0")
    assert " ".join(wrong[1:]).startswith(name)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--algorithm", "fast"], "fast"),
        (["--codec", "int8,int4"], "takes one codec"),
        (["-b", "16"], "less than 16 bytes for each of 2 ranks"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_done_is_one_line_and_exit_code_2(launch, words, part):
    done = launch(*WIRE, "all_gather", *SMALL, *words, num_ranks=2)
    assert done.returncode == 2
    (line,) = words_of_ranks(done.stderr).splitlines()
    assert line.startswith("benchmarks.wire: ")
    assert part in line


@pytest.mark.mpi
def test_a_call_lasts_from_its_instant_to_the_last_rank():
    from mpi4py import MPI

    from benchmarks.wire import instant

    world = MPI.COMM_WORLD
    pace = instant.Pace(world, shared=True)
    naps = [0.001 * (1 + rank) for rank in range(world.size)]
    start, end = pace.time(lambda: time.sleep(naps[world.rank]))
    starts = world.allgather(start)
    assert starts == [start] * world.size
    (seconds,) = instant.durations(world, np.array([start]), np.array([end]))
    assert world.allgather(seconds) == [seconds] * world.size
    assert seconds >= max(naps)
    assert end - start >= naps[world.rank]


@pytest.mark.mpi
def test_without_a_shared_clock_the_slowest_rank_counts():
    from mpi4py import MPI

    from benchmarks.wire import instant

    world = MPI.COMM_WORLD
    pace = instant.Pace(world, shared=False)
    start, own = pace.time(lambda: time.sleep(0.001 * (1 + world.rank)))
    assert start == 0
    (seconds,) = instant.durations(world, np.array([start]), np.array([own]))
    assert seconds >= 0.001 * world.size
    assert seconds >= own
