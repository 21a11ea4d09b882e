"""Marks for the cases of a matrix."""

import itertools

import pytest


def slow(*values):
    """Return a case that only the slow tier runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def one_in(count, *axes):
    """Return all combinations of the axes' values, of which one in ``count`` is fast.

    A value that is a tuple stands for several arguments.

    A combination is fast when the sum of its positions is a multiple of ``count``: every value of
    every axis is then in a fast one, provided that two axes have ``count`` values or more.
    """
    cases = []
    for positions in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[position] for axis, position in zip(axes, positions, strict=True)]
        flat = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
        cases.append(slow(*flat) if sum(positions) % count else pytest.param(*flat))
    return cases
