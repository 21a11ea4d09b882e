"""A job reads its tuning file on rank 0, and all ranks do the same with it."""

import pytest

from topology import cost, from_shape
from zcomm import tuning
from zcomm.tuning import Curve, Key, Tuning

WORLD = from_shape((2, 2))
PROGRAM = "tests/tuning/programs/choices.py"
ROUTES = {
    "all_gather": ("*:none", "1:none,0:none"),
    "reduce_scatter": ("*:none", "0:none,1:none"),
    "all_reduce": ("*:none *:none", "0:none,1:none 1:none,0:none"),
}


def ways(launch, folder):
    env = {"ZCOMM_TOPOLOGY": "2x2", "ZCOMM_TUNING": str(folder)}
    run = launch(PROGRAM, num_ranks=4, env=env, timeout=60)
    assert run.returncode == 0, run.stderr
    lines = {line for line in run.stdout.splitlines() if line}
    assert len(lines) == 1, lines
    return (*(part.strip() for part in lines.pop().split("|")), run.stderr)


@pytest.fixture(scope="module")
def runs(launch, tmp_path_factory):
    """Run the program with each algorithm forced by a file, with a damaged file, and with none."""
    found = {}
    for number, name in enumerate(("flat", "hierarchical")):
        folder = tmp_path_factory.mktemp(name)
        curves = {
            Key(operation, route): Curve((1, 2**20), (1e-6 if index == number else 1.0,) * 2)
            for operation, routes in ROUTES.items()
            for index, route in enumerate(routes)
        }
        path = folder / f"{WORLD.digest()[:16]}-mpi.json"
        known = Tuning(
            WORLD, "mpi", cost.assumed([("node", 2), ("network", 4)]), curves, "measured"
        )
        tuning.write(path, tuning.to_json(known, {"date": "today"}))
        found[name] = ways(launch, folder)
    path.write_text(path.read_text()[:100])
    found["damaged"] = ways(launch, folder)
    found["none"] = ways(launch, tmp_path_factory.mktemp("empty"))
    return found


def test_the_file_decides(runs):
    for name in ("flat", "hierarchical"):
        taken, _, source, _ = runs[name]
        assert taken.split() == [name] * 3
        assert source == "a file of rank 0, measured today"


def test_bits_do_not_depend_on_it(runs):
    assert len({digest for _, digest, _, _ in runs.values()}) == 1


def test_a_damaged_file_is_one_warning_and_as_none(runs):
    assert runs["damaged"][:3] == runs["none"][:3]
    assert runs["none"][2] == "assumed"
    warnings = [line for line in runs["damaged"][3].splitlines() if "WARNING" in line]
    assert len(warnings) == 1
    assert "is ignored" in warnings[0]
    assert "WARNING" not in runs["none"][3]
