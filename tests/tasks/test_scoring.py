"""Accuracies and their intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from theory_lab.errors import InputError
from theory_lab.estimation.intervals import clopper_pearson
from theory_lab.tasks.scoring import by_question, clustered_mean, exact_interval, proportion


def test_one_question_a_sequence_is_clopper_pearson():
    found = proportion([1, 1, 0, 1, 0], [1] * 5)
    assert (found.low, found.high) == pytest.approx(clopper_pearson(3, 5, 0.05), rel=1e-12)
    assert (found.estimate, found.method) == (0.6, "clopper-pearson")
    assert exact_interval(0, 7, 0.05)[0] == 0.0
    assert exact_interval(7, 7, 0.05)[1] == 1.0


def test_answers_that_stand_and_fall_together_count_once():
    together = proportion([4] * 30 + [0] * 20, [4] * 50)
    alone = proportion([1] * 30 + [0] * 20, [1] * 50)
    # The variance is estimated with one degree of freedom less: within a percent.
    assert together.low == pytest.approx(alone.low, rel=0.02)
    assert together.high == pytest.approx(alone.high, rel=0.02)
    assert together.method == "korn-graubard of 50 sequences"


def test_answers_without_a_common_fate_count_each():
    rng = np.random.default_rng(3)
    found = proportion(rng.binomial(8, 0.5, 400), np.full(400, 8))
    exact = exact_interval(0.5 * 3200, 3200, 0.05)
    assert found.high - found.low == pytest.approx(exact[1] - exact[0], rel=0.15)


@pytest.mark.parametrize("share", [0, 4])
def test_all_alike_tells_as_much_as_the_sequences_do(share):
    found = proportion([share] * 25, [4] * 25)
    assert (found.low, found.high) == pytest.approx(clopper_pearson(25 * share // 4, 25, 0.05), rel=1e-12)


def test_the_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(11)
    trials, sequences, questions = 1500, 40, 6
    covered = 0
    for _ in range(trials):
        chance = rng.beta(0.8, 0.2, sequences)  # mean 0.8; correlation 1/2 within a sequence
        found = proportion(rng.binomial(questions, chance), np.full(sequences, questions))
        covered += found.low <= 0.8 <= found.high
    # At least 95% is claimed asymptotically; it must not be below 93%, to within a chance of 1e-6.
    assert covered >= stats.binom.ppf(1e-6, trials, 0.93)
    naive = 0
    for _ in range(200):
        right = rng.binomial(questions, rng.beta(0.8, 0.2, sequences)).sum()
        low, high = exact_interval(float(right), float(sequences * questions), 0.05)
        naive += low <= 0.8 <= high
    assert naive < 0.85 * 200, "the interval that takes answers for independent does not: the test can fail"


def test_an_answer_is_right_if_all_of_its_tokens_are():
    queries = np.array([-1, 0, 0, -1, 1, 1, 2])
    correct = np.array([False, True, True, True, True, False, True])
    assert by_question(correct, queries) == (2, 3)
    assert by_question(correct[:1], queries[:1]) == (0, 0)
    assert math.isnan(proportion([0], [0]).estimate)


def test_means_over_tokens_know_their_sequences():
    totals, sizes = np.array([2.0, 4.0, 9.0]), np.array([2, 2, 3])
    mean, error = clustered_mean(totals, sizes)
    assert mean == pytest.approx(15 / 7)
    equal = np.array([1.0, 2.0, 4.0, 7.0])
    assert clustered_mean(equal * 5, np.full(4, 5)) == pytest.approx((equal.mean(), equal.std(ddof=1) / 2))
    assert math.isnan(clustered_mean([1.0], [2])[1])
    assert error > 0


def test_levels_are_probabilities():
    for level in (0, 1, True, "x"):
        with pytest.raises(InputError, match="level"):
            proportion([1, 2], [2, 2], level)


def test_the_harness_says_what_is_missing(monkeypatch):
    import sys
    from types import SimpleNamespace

    from theory_lab.tasks.harness import run_harness

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"pip install 'theory-lab\[harness\]'"):
        run_harness(SimpleNamespace(name="m", tokenizer=object()), ["piqa"])
    with pytest.raises(InputError, match="a model with a tokenizer"):
        run_harness(SimpleNamespace(name="m", tokenizer=None), ["piqa"])
