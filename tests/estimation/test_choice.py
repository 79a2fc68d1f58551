"""Which estimator is picked, and how much it draws."""

from __future__ import annotations

import pytest

from theory_lab.claims import Point
from theory_lab.errors import InputError
from theory_lab.estimation import SAMPLERS, Cell, choose, default_trials, validate_estimator


@pytest.mark.parametrize(
    ("statistic", "point", "expected"),
    [
        ("survivors", Point("any", 1000), "worst-case"),
        ("survivors", Point("uniform", 1000), "tail"),
        ("survivors", Point("gaussian", 64), "direct"),
        ("survivors", Point("gaussian", 10**6), "tail"),
        ("survivors", Point("spherical", 10**9), "importance"),
        ("consensus", Point("gaussian", 10**9), "importance"),
        ("consensus", Point("gaussian", 2), "direct"),
    ],
)
def test_auto(statistic: str, point: Point, expected: str) -> None:
    assert choose(statistic, point) == expected


@pytest.mark.parametrize("estimator", SAMPLERS)
@pytest.mark.parametrize("length", [1, 100, 2**20, 2**40])
@pytest.mark.parametrize("structure", [{}, {"rho": 0.9}, {"key_rho": 0.5}], ids=str)
def test_default_trials_are_affordable(estimator: str, length: int, structure: dict) -> None:
    cell = Cell("consensus", Point("laplace", length, **structure), estimator, 0)
    trials = default_trials(cell)
    assert trials >= 1
    assert trials == 1 or trials * SAMPLERS[estimator].seconds_per_trial(cell) <= 1.0


def test_nearest_name() -> None:
    with pytest.raises(InputError, match="did you mean 'tail'"):
        validate_estimator("tial")
