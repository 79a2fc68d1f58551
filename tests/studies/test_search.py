"""The adversarial search: it covers the structures it promises, finds rare counterexamples, and shrinks them."""

from __future__ import annotations

import numpy as np
import pytest

from theory_lab.studies.base import Piece
from theory_lab.studies.search import GENERATORS, describe, generate, mutate, search, shrink


def streams(seed: int = 0, **arguments: object):
    return Piece.of("search-test", **arguments).streams(seed)


def test_generators_cover_what_they_promise():
    cases = generate(streams()[0], 4096, 2, 8)
    z = cases[:, 0]
    visible = (z > -np.inf).sum(1)
    assert visible.min() == 1
    assert 0.03 < (visible == 1).mean() < 0.2
    assert 0.1 < (visible < 8).mean() < 0.4
    assert np.nanmax(np.where(z > -np.inf, np.abs(z), np.nan)) > 1e8  # huge
    assert (np.where(z > -np.inf, np.abs(z), 0.0).max(1) < 1e-4).any()  # tiny
    full = np.sort(z[visible == 8], 1)
    gaps = np.diff(full, axis=1)
    assert ((gaps == 0).any(1)).mean() > 0.1  # ties
    close = (gaps > 0) & (gaps <= 4 * np.spacing(np.abs(full[:, 1:])))
    assert close.any(1).mean() > 0.05  # nearly equal
    assert ((cases[:, 1:] > 0) & (cases[:, 1:] < 1)).all()


@pytest.mark.parametrize("make", GENERATORS, ids=lambda g: g.__name__)
def test_generators_are_finite(make):
    z = make(streams()[0], 300, 5)
    assert z.shape == (300, 5)
    assert np.isfinite(z).all()


def test_mutation_keeps_cases_legal():
    stream = streams()[0]
    cases = generate(stream, 512, 3, 4)
    for _ in range(20):
        cases = mutate(stream, cases)
        assert (cases[:, 0] > -np.inf).any(1).all()
        assert not np.isnan(cases).any()
        assert ((cases[:, 1:] > 0) & (cases[:, 1:] < 1)).all()


def test_climbing_reaches_what_generation_misses():
    # Only within 1e-7 of 1/3 does this break: a chance of about 1e-6 a case.
    def margin(cases):
        return -np.abs(cases[:, 1] - 1 / 3).min(1)

    bound = -1e-7
    assert search(margin, streams(), 2000, bound, rounds=0).margin < bound
    found = search(margin, streams(), 2000, bound, rounds=40)
    assert found.broken
    assert found.margin > bound


def test_shrinking_drops_tokens_and_rounds_numbers():
    # Breaks as soon as two keys are more than 3 apart; two keys and round numbers are enough.
    def margin(cases):
        z = cases[:, 0]
        return z.max(1) - np.where(z > -np.inf, z, np.inf).min(1)

    found = search(margin, streams(), 500, 3.0)
    assert found.broken
    z = found.case[0]
    assert (z > -np.inf).sum() == 2
    assert z.max() == 0.0
    assert z[z > -np.inf].min() == -4.0
    assert describe(z) in ("(0, -4)", "(-4, 0)")
    assert (found.case[1] == 0.5).all()


def test_shrinking_never_leaves_the_counterexamples():
    def margin(cases):
        return np.where(cases[:, 0, 0] == 0.25, 1.0, 0.0)

    case = np.array([[0.25, 1.5, -np.inf], [0.3, 0.4, 0.5]])
    small = shrink(margin, case, 0.0)
    assert margin(small[None])[0] > 0


def test_cases_outside_the_assumptions_do_not_count():
    def margin(cases):
        return np.where(cases[:, 1, 0] < 0.5, 0.0, np.nan)

    found = search(margin, streams(), 1000, 0.0, rounds=0)
    assert found.cases >= 1000
    assert not found.broken
    assert search(lambda cases: np.full(len(cases), np.nan), streams(), 100, 0.0).cases == 0


def test_same_seed_same_bits():
    def margin(cases):
        return cases[:, 0].max(1) * cases[:, 1, 0]

    first, again = (search(margin, streams(7), 300, 1e300) for _ in range(2))
    assert first.margin == again.margin
    np.testing.assert_array_equal(first.case, again.case)
    assert search(margin, streams(8), 300, 1e300).margin != first.margin
