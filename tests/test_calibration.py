"""The product as a whole is calibrated: over many seeds it errs no more often than it says, and sees what it must.

The bounds on counts are binomial quantiles at 1e-6, so that no test depends on a lucky seed.
"""

from __future__ import annotations

import pytest
from scipy import stats

from theory_lab.claims import Point, get_claim
from theory_lab.estimation import SAMPLERS, Cell
from theory_lab.estimation.intervals import interval
from theory_lab.experiments import Budget, Settings, run
from theory_lab.streams import Streams

CONTROLS = {
    "beta-below-sigma": {"claims": ("tda-4.3",), "noise": ("gaussian",), "length": (10**4,), "beta": (0.8,)},
    "student-t": {"claims": ("tda-4.3",), "noise": ("student-t(3)",), "length": (10**4,)},
    "correlated-views": {"claims": ("tda-4.6",), "noise": ("gaussian",), "length": (10**4,), "rho": (0.5,)},
    "kappa-halved": {"claims": ("tda-4.3",), "noise": ("two-point",), "length": (10**4,), "bound_scale": 0.5},
}


@pytest.mark.parametrize("control", CONTROLS)
def test_negative_controls_are_flagged(control: str) -> None:
    """At the default budget: at least 99 times in 100, by a test that fails with probability 1e-6 at 99.99%."""
    flagged = sum(
        (run(Settings(seed=seed, **CONTROLS[control]), workers=1).verdict == "VIOLATED").all() for seed in range(100)
    )
    assert flagged >= 99


@pytest.mark.parametrize(
    ("noise", "claim", "seeds"),
    [("two-point", "tda-4.3", 1000), ("gaussian", "tda-4.3", 200), ("spherical", "tda-4.6", 200)],
)
def test_positive_cases_are_never_flagged(noise: str, claim: str, seeds: int) -> None:
    """True cases at the default budget: 1000 seeds of one that attains 99.99% of its bound, fewer of two far below."""
    settings = {"claims": (claim,), "noise": (noise,), "length": (10**4,)}
    for seed in range(seeds):
        assert (run(Settings(seed=seed, **settings), workers=1).verdict != "VIOLATED").all(), seed


@pytest.mark.parametrize(
    ("claim", "estimator", "structure"),
    [
        ("tda-4.3", "direct", {}),
        ("tda-4.3", "tail", {}),
        ("tda-4.3", "importance", {}),
        ("tda-4.6", "direct", {"rho": 0.5}),
        ("tda-4.6", "tail", {"rho": 0.5}),
        ("tda-4.6", "importance", {"rho": 0.5}),
    ],
)
def test_coverage_and_false_alarms(claim: str, estimator: str, structure: dict) -> None:
    """With the bound at the exact value VIOLATED is false: at most alpha of the time; and intervals cover."""
    point = Point("gaussian", 64, **structure)
    truth = get_claim(claim).exact(point)
    runs, error, trials = 1000, 0.1, 200
    missed = above = 0
    for seed in range(runs):
        cell = Cell(get_claim(claim).statistic, point, estimator, seed)
        sampler = SAMPLERS[estimator]
        sample = sampler.pool(cell, [sampler.run_block(cell, 0, trials, Streams(cell.digest, 0))])
        found = interval(sample, error)
        missed += not found.low <= truth <= found.high
        above += found.low > truth
    assert missed <= stats.binom.isf(1e-6, runs, error)
    assert above <= stats.binom.isf(1e-6, runs, error / 2)


def test_false_violations_with_the_bound_at_the_exact_value() -> None:
    """Through the whole product: any VIOLATED over 3 cells, in at most alpha = 5% of 200 runs."""
    lengths = (2, 16, 64)
    false_runs = 0
    for seed in range(200):
        wrong = False
        for length in lengths:
            point = Point("gaussian", length)
            scale = get_claim("tda-4.3").exact(point)
            rows = run(
                Settings(
                    ("tda-4.3",), ("gaussian",), (length,), trials=2000, seed=seed, alpha=0.05 / 3, bound_scale=scale
                ),
                workers=1,
            )
            wrong |= (rows.verdict == "VIOLATED").any()
        false_runs += wrong
    assert false_runs <= stats.binom.isf(1e-6, 200, 0.05)


def test_sequential_runs_decide_and_stay_calibrated() -> None:
    """Stopping when decided does not raise the false alarm rate: bound at the truth, alpha = 5%, 200 runs."""
    point = Point("gaussian", 64)
    scale = get_claim("tda-4.3").exact(point)
    settings = {"claims": ("tda-4.3",), "noise": ("gaussian",), "length": (64,), "alpha": 0.05}
    false = 0
    for seed in range(200):
        rows = run(
            Settings(
                seed=seed,
                bound_scale=scale,
                trials=1 << 16,
                budget=Budget(trials=1 << 17),
                estimator="tail",
                **settings,
            ),
            workers=1,
        )
        false += (rows.verdict == "VIOLATED").any()
    assert false <= stats.binom.isf(1e-6, 200, 0.05)
    easy = run(Settings(budget=Budget(trials=1 << 30), estimator="tail", **settings), workers=1)
    assert easy.verdict.tolist() == ["HOLDS"]
    assert easy.trials[0] < 1 << 18
