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


def test_a_constant_that_nothing_depends_on_stays_as_it_is():
    found = least_squares(lambda p: np.array([p[0] - 2]), np.array([0.5, 7.0]))
    assert found == pytest.approx([2, 7])


def test_a_part_of_the_figures_predicts_the_others():
    """Of 18 B, where it is one: with one link and eight known, what two and four give."""
    all_links = Simulator([f for f in FIGURES if f.billions == 18], prefetch=0)
    known = all_links.part(lambda figure: figure.links in (1, 8))
    others = all_links.part(lambda figure: figure.links not in (1, 8))
    assert (len(known.figures), len(others.figures)) == (8, 6)
    assert {figure.links for figure in others.figures} == {2, 4}
    assert list(others.tflops(FITTED)) == list(all_links.tflops(FITTED)[4:10])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--prefetch -1", "--prefetch -1"),
        ("--fit-to links", "some of billions=18,49,91,138, tokens=1024,2048, links=1,2,4,8"),
        ("--fit-to links=1,3", "'links=1,3'"),
        ("--fit-to tokens=1024,2048", "not all"),
        ("--keep --fit-to links=1", "not allowed with"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, words, message):
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
