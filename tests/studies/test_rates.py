"""Fitted limits."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from theory_lab.studies.rates import fit_trend


def test_recovers_a_line() -> None:
    x = np.log(2.0 ** np.arange(12, 31))
    trend = fit_trend(x, 0.7 + 0.3 * x, np.full(x.size, 1e-9))
    assert trend.slope == pytest.approx(0.3)
    low, high = trend.interval(1e-3)
    assert low <= 0.3 <= high
    assert high - low < 1e-6


def test_agrees_with_ordinary_least_squares() -> None:
    rng = np.random.Generator(np.random.Philox(key=1))
    x = np.linspace(1, 5, 12)
    y = 2 - 0.4 * x + rng.normal(0, 0.3, 12)
    ours, theirs = fit_trend(x, y, np.zeros(12)), stats.linregress(x, y)
    assert ours.slope == pytest.approx(theirs.slope)
    assert ours.standard_error == pytest.approx(theirs.stderr)


def test_interval_covers() -> None:
    """Errors as stated: the interval misses the slope in at most 10% of 2000 runs, up to chance at 1e-6."""
    rng = np.random.Generator(np.random.Philox(key=2))
    x, errors = np.linspace(0, 3, 10), np.linspace(0.1, 0.3, 10)
    misses = 0
    for _ in range(2000):
        low, high = fit_trend(x, 1 + 0.5 * x + rng.normal(0, errors), errors).interval(0.1)
        misses += not low <= 0.5 <= high
    assert misses <= stats.binom.isf(1e-6, 2000, 0.1)


def test_a_curve_widens_the_interval() -> None:
    x = np.linspace(1, 5, 10)
    line, curve = fit_trend(x, x, np.full(10, 1e-6)), fit_trend(x, x + 0.1 * x**2, np.full(10, 1e-6))
    assert curve.standard_error > 100 * line.standard_error


def test_two_points_say_nothing() -> None:
    assert fit_trend([1, 2], [3, 4], [0.1, 0.1]).interval(0.05) == (-np.inf, np.inf)
