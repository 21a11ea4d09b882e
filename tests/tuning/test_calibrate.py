"""From what operations took back to the constants of a machine that is known here."""

import math

import pytest

from topology import from_shape
from topology.cost import Link, Machine, Speed
from zcomm.calibrate import factors, scaled, scales
from zcomm.hops import make, parse_codecs
from zcomm.layout import Layout
from zcomm.prediction import predict

WORLD = from_shape((2, 2))
SPEEDS = {"none": Speed(8e9, 8e9), "sum": Speed(6e9, 6e9), "int8": Speed(3e9, 4e9)}
TRUE = Machine(
    (Link(2e-4, 1.5e9, 4e-10), Link(4e-4, 6e7, 3e-9)),
    SPEEDS,
    call=2e-4,
    piece=8e-5,
    message=3e-5,
)
WRONG = [2.0, 0.6, 1.5, 0.5, 1.7, 0.4, 0.7, 1.3, 0.5, 2.0]


def plans(sizes):
    for operation in ("all_gather", "reduce_scatter"):
        for codec in ("none", "int8"):
            for algorithm in ("flat", "hierarchical"):
                for numel in sizes:
                    layout = Layout.even("bfloat16", numel, 4)
                    codecs = parse_codecs(codec, 2)
                    yield make(
                        operation,
                        [layout],
                        WORLD,
                        codecs=codecs,
                        algorithm=algorithm,
                        op="sum",
                        reduce_dtype=None,
                    )


def figures_of(machine, sizes):
    return [((plan,), predict(machine, plan, "mpi")) for plan in plans(sizes)]


def errors(machine, figures):
    return [abs(predict(machine, one[0], "mpi") / seconds - 1) for one, seconds in figures]


def test_names_belong_to_the_constants():
    names = scales(TRUE)
    assert len(names) == len(WRONG)
    for index, name in enumerate(names):
        by = [1.0] * len(names)
        by[index] = 3.0
        changed = scaled(TRUE, by)
        if name.endswith("level 1"):
            assert changed.links[0] == TRUE.links[0]
            assert getattr(changed.links[1], name.split()[0]) == pytest.approx(
                3 * getattr(TRUE.links[1], name.split()[0])
            )
        elif name == "speed of codecs":
            assert changed.speeds["int8"].decode == pytest.approx(3 * SPEEDS["int8"].decode)
        elif name in ("call", "piece", "message"):
            assert getattr(changed, name) == pytest.approx(3 * getattr(TRUE, name))


def test_wrong_constants_come_to_predict_what_was_measured_and_what_was_not():
    start = scaled(TRUE, WRONG)
    measured = figures_of(TRUE, (2**19, 2**21, 2**23))
    assert max(errors(start, measured)) > 0.4
    found = scaled(start, factors(start, measured, "mpi"))
    assert max(errors(found, measured)) < 0.06
    between = figures_of(TRUE, (3 * 2**18, 3 * 2**20, 3 * 2**21))
    assert max(errors(found, between)) < 0.1


def test_right_constants_stay_and_nothing_measured_changes_nothing():
    measured = figures_of(TRUE, (2**21,))
    assert all(abs(math.log(one)) < 0.02 for one in factors(TRUE, measured, "mpi"))
    assert factors(TRUE, [], "mpi") == [1.0] * len(WRONG)
