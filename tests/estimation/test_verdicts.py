"""Verdicts: from the interval alone, and rarely wrong over a whole run."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from theory_lab.errors import InputError
from theory_lab.estimation.intervals import Interval, clopper_pearson
from theory_lab.estimation.verdicts import VERDICTS, Test, Verdict, decide, judge


def binomial_test(hits: int, size: int, bound: float) -> Test:
    return Test(bound, lambda error: Interval(*clopper_pearson(hits, size, error), "clopper-pearson"))


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 0.5, "HOLDS"),
        (0.1, 1.0, "HOLDS"),
        (0.1, 1.01, "HOLDS"),
        (0.1, 1.0101, "INCONCLUSIVE"),
        (1.0, 1.2, "INCONCLUSIVE"),
        (1.0000001, 1.2, "VIOLATED"),
        (0.0, 0.0, "HOLDS"),
    ],
)
def test_judge(low: float, high: float, verdict: str) -> None:
    assert VERDICTS[int(judge(low, high, 1.0, 0.01))] == verdict


def test_holm_steps_down() -> None:
    """Decided cells leave more of alpha to the rest: the third test is decided only after the others are."""
    asked: list[list[float]] = [[], [], []]

    def watched(index: int, needs: float) -> Test:
        def interval(error: float) -> Interval:
            asked[index].append(error)
            return Interval(2.0, 3.0, "") if error >= needs else Interval(0.0, 3.0, "")

        return Test(1.0, interval)

    found = decide([watched(0, 0.001), watched(1, 0.001), watched(2, 0.025)], 0.03, 0.0)
    assert [d.verdict for d in found] == ["VIOLATED"] * 3
    assert asked[0] == [pytest.approx(0.01)]
    assert asked[2] == [pytest.approx(0.01), pytest.approx(0.03)]
    assert found[2].error == pytest.approx(0.03)
    stuck = decide([watched(0, 0.001), watched(1, 0.5)], 0.03, 0.0)
    assert stuck[1].verdict is Verdict.INCONCLUSIVE
    assert stuck[1].error == pytest.approx(0.03)


def test_certain_cells_cost_nothing() -> None:
    sure = Test(1.0, lambda error: Interval(0.5, 0.5, "exact"), random=False)
    found = decide([sure, sure, binomial_test(5, 100, 0.5)], 0.01, 0.01)
    assert found[0].error == 0.0
    assert found[2].error == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("alpha", "tolerance", "field"),
    [(0, 0.01, "alpha"), (1, 0.01, "alpha"), (0.1, -1, "tolerance"), (0.1, float("nan"), "tolerance")],
)
def test_levels(alpha: float, tolerance: float, field: str) -> None:
    with pytest.raises(InputError, match=field):
        decide([], alpha, tolerance)


def test_familywise_error_with_true_bounds_and_false_ones() -> None:
    """20 cells a run whose bound is the truth and 20 far from it, 1000 runs: any false verdict in at most alpha of
    the runs, and the easy cells decided."""
    rng = np.random.Generator(np.random.Philox(key=4))
    alpha, size, p, runs = 0.05, 500, 0.1, 1000
    false_runs = easy = 0
    hits = rng.binomial(size, p, (runs, 40))
    for row in hits:
        tests = [binomial_test(int(h), size, p) for h in row[:20]]
        tests += [binomial_test(int(h), size, 0.3) for h in row[20:]]
        found = decide(tests, alpha, tolerance=0.0)
        # With tolerance 0 and the bound equal to the truth HOLDS is right, and VIOLATED wrong.
        false_runs += any(d.verdict == "VIOLATED" for d in found)
        easy += sum(d.verdict == "HOLDS" for d in found[20:])
    assert false_runs <= stats.binom.isf(1e-6, runs, alpha)
    assert easy > 0.99 * 20 * runs


def test_false_holds_rate() -> None:
    """The truth lies just above (1 + tolerance) times the bound: HOLDS in at most alpha of the runs."""
    rng = np.random.Generator(np.random.Philox(key=5))
    alpha, size, p = 0.05, 2000, 0.1
    wrong = sum(
        decide([binomial_test(int(h), size, p / 1.0101)], alpha, 0.01)[0].verdict == "HOLDS"
        for h in rng.binomial(size, p, 4000)
    )
    assert wrong <= stats.binom.isf(1e-6, 4000, alpha)
