"""`zcomm tune`, run as a user runs it: as a child."""

import json

import pytest

from topology import parse
from zcomm import tuning
from zcomm.tune import OPERATIONS

TUNE = ("-m", "zcomm.cli", "tune")


def test_one_rank_has_nothing_to_tune(launch):
    run = launch(*TUNE)
    assert run.returncode == 1
    assert run.stderr.strip() == (
        "zcomm tune: one rank has nothing to tune: start it as `mpirun -n 4 zcomm tune`"
    )


@pytest.mark.parametrize(
    ("words", "said"), [(("--seconds", "0"), "more than 0"), (("--codecs", "int3"), "int3")]
)
def test_what_cannot_be_measured_is_one_line(launch, words, said):
    run = launch(*TUNE, *words)
    assert run.returncode == 2
    assert said in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_job_of_four_is_measured_and_written(launch, tmp_path):
    env = {"ZCOMM_TUNING": str(tmp_path), "ZCOMM_TOPOLOGY": "2x2"}
    run = launch(*TUNE, "--seconds", "20", "--codecs", "none", "int8", num_ranks=4, env=env)
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.iterdir()
    assert f"written to {path}" in run.stdout
    assert "median error" in run.stdout
    known = tuning.from_json(path.read_text(), parse("2x2", 4), "mpi", str(path))
    measured = {(key.operation, key.route.count("*") > 0) for key in known.curves}
    assert measured == {(name, flat) for name in OPERATIONS for flat in (False, True)}
    assert {"none", "sum", "int8"} == known.machine.speeds.keys()
    document = json.loads(path.read_text())
    assert {"date", "took_seconds", "versions", "device"} < document.keys()
    assert document["took_seconds"] < 30


@pytest.mark.slow
def test_where_files_are_turned_off_nothing_is_measured(launch):
    run = launch(*TUNE, num_ranks=2, env={"ZCOMM_TUNING": "0"})
    assert run.returncode != 0
    assert "ZCOMM_TUNING=0" in run.stderr
