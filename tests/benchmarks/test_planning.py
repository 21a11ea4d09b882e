"""The fit to the ZeRO++ paper: the solver against known answers, the constants against figures."""

import dataclasses

import numpy as np
import pytest

from benchmarks.planning.__main__ import TARGET_LARGEST, TARGET_RMS, main, report
from benchmarks.planning.fit import Simulator, fit, least_squares
from benchmarks.planning.published import FIGURES
from zero.simulate import FITTED


def test_least_squares_of_a_line_are_those_of_numpy():
    x = np.linspace(0, 1, 20)
    y = 3 * x - 1 + np.cos(40 * x)
    slope, offset = np.polyfit(x, y, 1)
    found = least_squares(lambda p: p[0] * x + p[1] - y, np.array([0.0, 0.0]))
    assert found == pytest.approx([slope, offset], abs=1e-4)


def test_least_squares_find_the_end_of_a_curved_valley():
    found = least_squares(
        lambda p: np.array([10 * (p[1] - p[0] ** 2), 1 - p[0]]), np.array([-1.2, 1.0])
    )
    assert found == pytest.approx([1, 1], abs=1e-3)


def test_the_smallest_model_is_within_the_target_with_the_constants_of_zcomm_plan():
    figures = [figure for figure in FIGURES if figure.billions == 18]
    errors = Simulator(figures, prefetch=0).errors(FITTED)
    assert len(errors) == 14
    assert np.abs(errors).max() <= TARGET_LARGEST


@pytest.mark.slow
def test_the_constants_of_zcomm_plan_are_what_fits_best_and_meet_the_targets(capsys):
    simulator = Simulator(FIGURES, prefetch=0)
    found = fit(simulator)
    assert dataclasses.astuple(FITTED) == pytest.approx(dataclasses.astuple(found), abs=2e-3)
    assert report(simulator, FITTED) == 0
    errors = simulator.errors(FITTED)
    assert np.sqrt(np.mean(errors**2)) <= TARGET_RMS
    assert f"of {len(FIGURES)} figures" in capsys.readouterr().out


def test_wrong_arguments_are_one_line(capsys):
    assert main(["--prefetch", "-1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
