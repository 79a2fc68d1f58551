"""Verdicts: whole runs are wrong no more often than they say, and see what they must.

Every check goes through :func:`theory_lab.experiments.run`, as ``theory-lab check`` does, over neighboring seeds. With
the bound moved onto the exact value (`bound_scale`), VIOLATED is wrong; with the bound a rounding below the exact value
divided by 1 + tolerance, HOLDS is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import special

from theory_lab.claims import CLAIMS, Point, get_claim
from theory_lab.experiments import Budget, Settings, run
from theory_lab.selftest.base import Finding, Setup, at_least, at_most, shared

#: Must come out VIOLATED: the theorem's assumption fails, or the bound is half of what is attained.
CONTROLS: dict[str, dict[str, Any]] = {
    "beta below sigma": {"claims": ("tda-4.3",), "noise": ("gaussian",), "length": (10**4,), "beta": (0.8,)},
    "student-t(3)": {"claims": ("tda-4.3",), "noise": ("student-t(3)",), "length": (10**4,)},
    "correlated views": {"claims": ("tda-4.6",), "noise": ("gaussian",), "length": (10**4,), "rho": (0.5,)},
    "half the bound": {"claims": ("tda-4.3",), "noise": ("two-point",), "length": (10**4,), "bound_scale": 0.5},
}

#: True, the first of them by a ten-thousandth of its bound.
TRUE_CASES = (("two-point", "tda-4.3"), ("gaussian", "tda-4.3"), ("spherical", "tda-4.6"))

#: Where each claim is put to the test; exact values far from 0, so that a few hundred rows say something.
_POINTS: dict[str, dict[str, Any]] = {
    "tda-4.3": {"beta": (0.6,)},
    "tda-4.3-general": {"beta": (0.6,)},
    "tda-4.6": {"beta": (0.4,)},
    "tda-4.6-correlated": {"beta": (0.4,), "rho": (0.5,)},
}
_HEAD_DIMS = tuple(range(16, 32))
_ALPHA = 0.2


def _settings(claim: str, length: int, scale: float, seed: int, **more: Any) -> Settings:
    return Settings(
        (claim,), ("gaussian",), (length,), seed=seed, alpha=_ALPHA, bound_scale=scale, **(_POINTS[claim] | more)
    )


def _ratio(claim: str, length: int, head_dim: int = 64) -> float:
    """Exact value over bound."""
    changes = {name: values[0] for name, values in _POINTS[claim].items()}
    point, found = Point(length=length, head_dim=head_dim, **changes), get_claim(claim)
    exact = found.exact(point)
    assert exact is not None
    return exact / found.bound(point)


@shared
def false_alarms(setup: Setup) -> Iterator[Finding]:
    """Each claim by itself, one cell a run, wrong either way; every estimator."""
    runs = setup.pick(40, 600, 6000)
    for claim, wrong in setup.share([(claim, wrong) for claim in CLAIMS for wrong in ("VIOLATED", "HOLDS")]):
        ratio = _ratio(claim, 64)
        scale = ratio if wrong == "VIOLATED" else ratio / 1.01 * (1 - 1e-9)
        first, found = setup.first_seed(f"false {wrong} {claim}"), 0
        for index in range(runs):
            estimator = ("direct", "tail", "importance")[index % 3]
            settings = _settings(claim, 64, scale, first + index, trials=500, estimator=estimator)
            found += bool((run(settings, workers=1).verdict == wrong).any())
        yield _alarms(f"false {wrong}, {claim}", found, runs)


def _alarms(name: str, found: int, runs: int) -> Finding:
    p = at_least(found, runs, _ALPHA)
    return Finding(name, runs, "runs", f"{found:,} wrong, at most {_ALPHA * runs:,.0f}", p)


def familywise(setup: Setup) -> Iterator[Finding]:
    """Sixteen cells a run, of one exact value: any VIOLATED is wrong. And the cells know nothing of each other.

    For Gaussian noise the threshold grows and shrinks with the scores, so that the head dimension changes the cells but
    not what is counted.
    """
    runs = setup.pick(40, 600, 6000)
    first, wrong, estimates = setup.first_seed("familywise"), 0, np.empty((runs, len(_HEAD_DIMS)))
    ratio = _ratio("tda-4.3", 64)
    for index in range(runs):
        rows = run(
            _settings("tda-4.3", 64, ratio, first + index, trials=500, head_dim=_HEAD_DIMS, estimator="tail"), workers=1
        )
        wrong += bool((rows.verdict == "VIOLATED").any())
        estimates[index] = rows.sort_values("head_dim").estimate.to_numpy(float)
    yield _alarms(f"false VIOLATED in any of {len(_HEAD_DIMS)} cells", wrong, runs)
    # Estimates are means of 32,000 Bernoullis, near enough to normal for Student's law of a correlation.
    pairs = np.asarray(np.corrcoef(estimates, rowvar=False))[np.triu_indices(len(_HEAD_DIMS), 1)]
    worst = float(np.abs(pairs).max())
    p = min(1.0, len(pairs) * _uncorrelated(worst, runs))
    yield Finding("correlation of cells of a run", len(pairs), "pairs", f"largest |r| = {worst:.3f}", p)
    serial = float(np.corrcoef(estimates[1:, 0], estimates[:-1, 0])[0, 1])
    p = _uncorrelated(abs(serial), runs - 1)
    yield Finding("correlation of runs of neighboring seeds", runs, "runs", f"r = {serial:+.3f}", p)
    # The estimates' spread is what binomial counts have: chi-square, two-sided.
    mean = ratio / 64
    z2 = float(((estimates / 64 - mean) ** 2).sum() / (mean * (1 - mean) / (64 * 500)))
    low, high = float(special.chdtr(estimates.size, z2)), float(special.chdtrc(estimates.size, z2))
    yield Finding(
        "spread of estimates over seeds", estimates.size, "cells", f"{z2 / estimates.size:.3f} of a binomial's",
        min(1.0, 2 * min(low, high)),
    )  # fmt: skip


def _uncorrelated(r: float, size: int) -> float:
    """P(|correlation| >= r) of independent normals: t = r sqrt((size - 2) / (1 - r^2)) is Student's."""
    if not r < 1.0:  # NaN too: estimates that never vary
        return 0.0
    return float(2.0 * special.stdtr(size - 2, -r * np.sqrt((size - 2) / (1.0 - r * r))))


@shared
def sequential(setup: Setup) -> Iterator[Finding]:
    """Runs that stop when they are decided, with the bound at the exact value: up to nine looks."""
    runs = setup.pick(40, 600, 6000)
    for claim, estimator in setup.share((("tda-4.3", "tail"), ("tda-4.6", "importance"))):
        ratio, first, wrong, looked = _ratio(claim, 64), setup.first_seed(f"sequential {claim}"), 0, 0
        for index in range(runs):
            settings = _settings(
                claim, 64, ratio, first + index, trials=1 << 14, budget=Budget(trials=1 << 15), estimator=estimator
            )
            rows = run(settings, workers=1)
            wrong += bool((rows.verdict == "VIOLATED").any())
            looked += int(rows.trials.sum())
        yield _alarms(f"false VIOLATED in a sequential run, {claim}, {estimator}", wrong, runs)


@shared
def power(setup: Setup) -> Iterator[Finding]:
    """Negative controls are VIOLATED in at least 99 of 100 runs at the default budget."""
    runs = setup.pick(6, 100, 1000)
    for name, changes in setup.share(list(CONTROLS.items())):
        first = setup.first_seed(f"control {name}")
        found = sum(
            bool((run(Settings(seed=first + i, **changes), workers=1).verdict == "VIOLATED").all()) for i in range(runs)
        )
        yield Finding(f"control, {name}", runs, "runs", f"{found:,} VIOLATED", at_most(found, runs, 0.99))


@shared
def true_cases(setup: Setup) -> Iterator[Finding]:
    """True cases at the default budget and error rate are not VIOLATED, and an easy one is HOLDS."""
    runs = setup.pick(6, 100, 1000)
    for noise, claim in setup.share(TRUE_CASES):
        first = setup.first_seed(f"true {noise} {claim}")
        verdicts = [
            run(Settings((claim,), (noise,), (10**4,), seed=first + i), workers=1).verdict.iloc[0] for i in range(runs)
        ]
        wrong, held = verdicts.count("VIOLATED"), verdicts.count("HOLDS")
        p = at_least(wrong, runs, 1e-3)
        yield Finding(f"true case, {claim}, {noise}", runs, "runs", f"{wrong:,} VIOLATED", p)
        yield Finding(f"decided, {claim}, {noise}", runs, "runs", f"{held:,} HOLDS", at_most(held, runs, 0.99))


CHECKS = (false_alarms, familywise, sequential, power, true_cases)
