"""Intervals cover as often as they say.

For counts nothing needs to be drawn: the chance that an interval misses is a finite sum, over the counts of a binomial
or, for runs that look again and again, over the paths of its partial sums. Only Student's intervals and the cells of
the estimators themselves are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from scipy import special

from theory_lab.claims import Point, get_claim
from theory_lab.estimation import SAMPLERS, Cell
from theory_lab.estimation.base import Sample
from theory_lab.estimation.intervals import interval
from theory_lab.selftest.base import Finding, Setup, at_least, both_sides, said, shared
from theory_lab.streams import F64, Streams
from theory_lab.studies.rates import fit_trend


def _log_binomial(size: int, p: F64) -> F64:
    """log P(Binomial(size, p) = h), shape (len(p), size + 1)."""
    h = np.arange(size + 1.0)
    ways = special.gammaln(size + 1.0) - special.gammaln(h + 1) - special.gammaln(size - h + 1)
    return ways + special.xlogy(h, p[:, None]) + special.xlog1py(size - h, -p[:, None])


def _ends(sample: Sample, size: int, error: float, look: int = 0, prior: float = 0.0) -> tuple[F64, F64]:
    """Both ends of the interval for every count of hits."""
    found = [
        interval(replace(sample, size=size, trials=size, total=float(h), total_sq=float(h)), error, look, prior)
        for h in range(size + 1)
    ]
    return np.array([each.low for each in found]), np.array([each.high for each in found])


def fixed_size(setup: Setup) -> Iterator[Finding]:
    """The chance to miss, summed over all counts, at the probabilities where it is largest: the intervals' own ends.

    Clopper-Pearson intervals attain error/2 there, on either side, and never exceed it: both are checked, so that an
    interval too short is found and so is one that gives away what it need not.
    """
    sizes = [10, 60, setup.pick(200, 400, 800)]
    for error in (0.2, 0.05, 1e-3):
        for size in sizes:
            low, high = _ends(Sample("bernoulli", 0, 0, 0.0, 0.0), size, error)
            h = np.arange(size + 1)
            # Exactly at an end it still covers; one rounding beyond, it does not.
            at_low, at_high = low[1:], high[:-1]
            above = special.betainc(h[1:].astype(float), size - h[1:] + 1.0, at_low)  # P(count >= h)
            below = special.betaincc(h[:-1] + 1.0, size - h[:-1].astype(float), at_high)  # P(count <= h)
            worst = 2.0 * max(above.max(), below.max()) / error
            least = 2.0 * min(above.min(), below.min()) / error
            good = (
                worst < 1 + 1e-7 and least > 1 - 1e-7 and bool(np.all(np.diff(low) > 0) and np.all(np.diff(high) > 0))
            )
            yield Finding(
                f"clopper-pearson, {size} trials, error {error:g}", 2 * size, "ends",
                f"missed with {worst:.7f} of its error/2 at most, {least:.7f} at least", passed=good,
            )  # fmt: skip


def bounded_values(setup: Setup) -> Iterator[Finding]:
    """Empirical Bernstein, on values 0 and the ceiling, whose variance is largest: at every end, and on a grid."""
    ceiling = 3.0
    for error in (0.2, 1e-3):
        for size in (20, setup.pick(200, 400, 800)):
            model = Sample("bounded", 0, 0, 0.0, 0.0, ceiling=ceiling)
            found = [
                interval(replace(model, size=size, trials=size, total=ceiling * h, total_sq=ceiling**2 * h), error)
                for h in range(size + 1)
            ]
            low = np.array([each.low for each in found]) / ceiling
            high = np.array([each.high for each in found]) / ceiling
            near = np.concatenate([low * (1 - 1e-9), high * (1 + 1e-9), np.linspace(0.001, 0.999, 199)])
            worst = _missed(low, high, near[(near > 0) & (near < 1)], size) / error
            yield Finding(
                f"empirical-bernstein, {size} trials, error {error:g}", len(near), "probabilities",
                f"missed with {said(worst)} of its error at most", passed=worst <= 1.0,
            )  # fmt: skip


def _missed(low: F64, high: F64, p: F64, size: int) -> float:
    """The largest chance, over p, that the interval of a binomial count misses p."""
    worst = 0.0
    for part in np.array_split(p, max(1, len(p) * size >> 20)):
        out = (part[:, None] < low) | (part[:, None] > high)
        worst = max(worst, float((np.exp(_log_binomial(size, part)) * out).sum(axis=1).max(initial=0.0)))
    return worst


@shared
def sequential(setup: Setup) -> Iterator[Finding]:
    """The chance that the interval EVER misses while a run doubles its trials, by dynamic programming over counts."""
    looks = setup.pick(7, 8, 9)
    sizes = [10 << k for k in range(looks)]
    cases = (
        ("beta-mixture", "bernoulli", 0.2, 0.01), ("beta-mixture", "bernoulli", 0.2, 0.3),
        ("beta-mixture", "bernoulli", 1e-3, 0.05), ("empirical-bernstein, looks", "bounded", 0.2, 0.0),
    )  # fmt: skip
    p = np.concatenate([np.geomspace(1e-3, 0.1, setup.pick(8, 20, 60)), np.linspace(0.15, 0.95, setup.pick(6, 17, 49))])
    for name, model, error, prior in setup.share(cases):
        empty = Sample(model, 0, 0, 0.0, 0.0, ceiling=1.0 if model == "bounded" else math.inf)  # type: ignore[arg-type]
        ends = [_ends(empty, size, error, look, prior) for look, size in enumerate(sizes, start=1)]
        worst = max(_ever_missed(ends, sizes, float(q)) for q in p) / error
        about = f", prior {prior:g}" if prior else ""
        yield Finding(
            f"{name}{about}, {looks} looks, error {error:g}", len(p), "probabilities",
            f"ever missed with {said(worst)} of its error at most", passed=worst <= 1.0,
        )  # fmt: skip


def _ever_missed(ends: list[tuple[F64, F64]], sizes: list[int], p: float) -> float:
    """P(some look's interval misses p): mass that leaves, look by look."""
    mass, drawn, left = np.array([1.0]), 0, 0.0
    for (low, high), size in zip(ends, sizes, strict=True):
        step = np.exp(_log_binomial(size - drawn, np.array([p]))[0])
        mass = np.convolve(mass, step)
        out = (low > p) | (high < p)
        left += float(mass[out].sum())
        mass[out] = 0.0
        drawn = size
    return left


def students(setup: Setup) -> Iterator[Finding]:
    """Student's intervals of normal rows miss exactly as often as they say; those of trends at most so."""
    runs, size, error = setup.pick(10_000, 100_000, 1_000_000), 12, 0.1
    rng, missed = setup.generator("student"), 0
    for _ in range(runs // 1000):
        x = rng.normal(9.0, 1.0, (1000, size))
        for total, square in zip(x.sum(1), (x * x).sum(1), strict=True):
            found = interval(Sample("rows", size, size, float(total), float(square)), error)
            missed += not found.low <= 9.0 <= found.high
    p = both_sides(missed, runs, error)
    yield Finding("student, normal rows", runs, "intervals", f"{missed:,} missed, {error * runs:,.0f} expected", p)
    runs, at = runs // 10, np.log([4.0, 8.0, 16.0, 32.0, 64.0])
    missed, noise = 0, setup.generator("trend").normal(0.0, 0.1, (runs, len(at)))
    for row in noise:
        low, high = fit_trend(at.tolist(), (1.0 + 0.5 * at + row).tolist(), [0.1] * len(at)).interval(error)
        missed += not low <= 0.5 <= high
    p = at_least(missed, runs, error)
    yield Finding("trend, exact lines", runs, "intervals", f"{missed:,} missed, at most {error * runs:,.0f}", p)


@shared
def cells(setup: Setup) -> Iterator[Finding]:
    """Intervals of cells as they are drawn cover the exact value; and their lower ends rarely exceed it."""
    runs, error, trials = setup.pick(250, 4000, 40_000), 0.1, 200
    points = (
        ("tda-4.3", {"beta": 0.6}), ("tda-4.6", {"beta": 0.3}), ("tda-4.6", {"beta": 0.4, "rho": 0.5}),
        ("tda-4.3", {"beta": 0.6, "key_rho": 0.2}),
    )  # fmt: skip
    for claim, changes, name in setup.share([(*each, name) for each in points for name in SAMPLERS]):
        sampler = SAMPLERS[name]
        point = Point("gaussian", 64).with_(**changes)
        truth = get_claim(claim).exact(point)
        assert truth is not None
        first, missed, above = setup.first_seed(f"cells {claim} {changes} {name}"), 0, 0
        for seed in range(first, first + runs):
            cell = Cell(get_claim(claim).statistic, point, name, seed)
            sample = sampler.pool(cell, [sampler.run_block(cell, 0, trials, Streams(cell.digest, 0))])
            found = interval(sample, error)
            missed += not found.low <= truth <= found.high
            above += found.low > truth
        what = f"{claim}{''.join(f', {key} {value:g}' for key, value in changes.items())}, {name}"
        most = f"at most {error * runs:,.0f}"
        yield Finding(f"covered, {what}", runs, "cells", f"{missed:,} missed, {most}", at_least(missed, runs, error))
        p = at_least(above, runs, error / 2)
        yield Finding(f"exceeded, {what}", runs, "cells", f"{above:,} above, at most {error * runs / 2:,.0f}", p)


CHECKS = (fixed_size, bounded_values, sequential, students, cells)
