"""Intervals keep their promises."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from theory_lab.estimation.base import Sample
from theory_lab.estimation.intervals import (
    beta_mixture,
    binomial_intervals,
    clopper_pearson,
    empirical_bernstein,
    interval,
    student,
)


@pytest.mark.parametrize(("hits", "size"), [(0, 10), (1, 10), (5, 10), (10, 10), (3, 10**6), (10**5, 10**15)])
@pytest.mark.parametrize("error", [0.05, 1e-6])
def test_clopper_pearson_inverts_the_binomial(hits: int, size: int, error: float) -> None:
    low, high = clopper_pearson(hits, size, error)
    if hits:
        assert stats.binom.sf(hits - 1, size, low) == pytest.approx(error / 2, rel=1e-6)
    else:
        assert low == 0
    if hits < size:
        assert stats.binom.cdf(hits, size, high) == pytest.approx(error / 2, rel=1e-6)
    else:
        assert high == 1


@pytest.mark.parametrize(
    ("hits", "size", "prior"),
    [(0, 100, 0.01), (7, 100, 0.05), (100, 100, 0.5), (40_000, 10**13, 1e-9), (3, 10**15, 1e-12)],
)
def test_beta_mixture_against_sixty_digits(hits: int, size: int, prior: float) -> None:
    """At both ends the mixture martingale equals 1/error."""
    error = 1e-4
    with mpmath.workdps(60):
        b = (1 - mpmath.mpf(prior)) / mpmath.mpf(prior)
        mixture = mpmath.log(mpmath.beta(1 + hits, b + size - hits)) - mpmath.log(mpmath.beta(1, b))
        for end in beta_mixture(hits, size, error, prior):
            if 0 < end < 1:
                p = mpmath.mpf(end)
                wealth = mixture - hits * mpmath.log(p) - (size - hits) * mpmath.log1p(-p)
                assert float(wealth) == pytest.approx(-math.log(error), abs=1e-4)


def test_beta_mixture_covers_while_watched() -> None:
    """The chance that the interval EVER misses, over 100 looks, is at most the error: binomial bound at 1e-6."""
    p, error, looks = 0.02, 0.1, 100
    rng = np.random.Generator(np.random.Philox(key=1))
    runs, misses = 200, 0
    for _ in range(runs):
        hits = np.cumsum(rng.binomial(40, p, looks))
        misses += any(
            not low <= p <= high
            for low, high in (beta_mixture(int(h), 40 * (k + 1), error, 0.05) for k, h in enumerate(hits))
        )
    assert misses <= stats.binom.isf(1e-6, runs, error)


def test_clopper_pearson_covers() -> None:
    for p, size in ((0.001, 1000), (0.3, 50)):
        hits = np.random.Generator(np.random.Philox(key=2)).binomial(size, p, 4000)
        ends = {int(h): clopper_pearson(int(h), size, 0.1) for h in np.unique(hits)}
        misses = sum(not ends[int(h)][0] <= p <= ends[int(h)][1] for h in hits)
        assert misses <= stats.binom.isf(1e-6, hits.size, 0.1)


@pytest.mark.parametrize("shape", [(0.5, 0.5), (2.0, 30.0), (30.0, 0.2)])
def test_empirical_bernstein_covers(shape: tuple[float, float]) -> None:
    rng = np.random.Generator(np.random.Philox(key=3))
    x = 3.0 * rng.beta(*shape, size=(2000, 200))
    mean = 3.0 * shape[0] / sum(shape)
    misses = 0
    for row in x:
        low, high = empirical_bernstein(row.mean(), row.var(ddof=1), row.size, 3.0, 0.1)
        misses += not low <= mean <= high
    assert misses <= stats.binom.isf(1e-6, len(x), 0.1)


def test_student_is_the_t_interval() -> None:
    x = np.array([1.0, 2.0, 4.0, 7.0])
    expected = stats.t.interval(0.99, 3, loc=x.mean(), scale=x.std(ddof=1) / 2)
    low, high = student(x.mean(), x.var(ddof=1), 4, 0.01)
    assert high == pytest.approx(expected[1])
    assert low == max(0.0, expected[0])
    assert student(0.0, 0.0, 100, 0.01) == (0.0, math.inf)


def test_scaling_and_methods() -> None:
    hits = Sample("bernoulli", 100, 1000, 7.0, 7.0, scale=10.0)
    found = interval(hits, 0.05)
    assert found.method == "clopper-pearson"
    assert (found.low, found.high) == tuple(10 * end for end in clopper_pearson(7, 1000, 0.05))
    watched = interval(hits, 0.05, look=3, prior=0.1)
    assert watched.method == "beta-mixture"
    assert watched.low < found.low
    assert watched.high > found.high
    weights = Sample("bounded", 1000, 1000, 500.0, 260.0, scale=2.0, ceiling=1.0)
    first, fifth = interval(weights, 0.05, look=1), interval(weights, 0.05, look=5)
    assert first.method == "empirical-bernstein"
    assert fifth.low < first.low
    assert interval(Sample("certain", 1, 1, 0.0, 0.0), 0.05).high == 0.0


def test_looks_spend_no_more_than_the_error() -> None:
    assert sum(6 / (math.pi * k) ** 2 for k in range(1, 100_000)) < 1


def test_intervals_of_many_samples_are_those_of_each() -> None:
    """Equal counts are looked up once and the two ends are found side by side, with the same bits."""
    rng = np.random.default_rng(3)
    hits, misses = rng.integers(0, 60, 6000).astype(float), rng.integers(0, 10**7, 6000).astype(float)
    hits[:9], misses[5:15] = 0.0, 0.0
    hits[5:9] = 2.0
    low, high = binomial_intervals(hits, misses, 1e-6)
    for i in [*range(20), *range(20, 6000, 61)]:
        assert (low[i], high[i]) == clopper_pearson(int(hits[i]), int(hits[i] + misses[i]), 1e-6)
