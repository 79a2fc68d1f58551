"""Results that the papers do not have."""

from __future__ import annotations

import math

import numpy as np
import pytest

import theory_lab
from theory_lab.claims import Point
from theory_lab.claims.tda import exact_consensus, exact_survivors
from theory_lab.studies.ours import effective_beta, independence_horizon, sharp_threshold


def test_slack_is_the_exact_value() -> None:
    rows = theory_lab.check("ours-slack", length=[100, 10**6], workers=1)
    mine = rows[(rows.noise == "gaussian") & (rows.length == 100)].iloc[0]
    assert mine.estimate == pytest.approx(exact_survivors(Point("gaussian", 100)))
    assert f"{1 / mine.estimate:.4g} times" in mine.note
    any_law = rows[(rows.noise == "any") & (rows.length == 10**6)].iloc[0]
    assert any_law.estimate == pytest.approx(0.999999, abs=1e-8)
    assert (rows.verdict == "HOLDS").all()


@pytest.mark.parametrize("noise", ["gaussian", "spherical", "uniform", "beta(2)", "truncated-normal(2)"])
@pytest.mark.parametrize("length", [3, 100, 10**6])
def test_sharp_threshold_solves_its_equation(noise: str, length: int) -> None:
    tau = sharp_threshold(noise, length)
    assert length * Point(noise, length).law().tail(tau) == pytest.approx(1.0, rel=1e-9)
    beta = effective_beta(noise, length)
    assert Point(noise, length, beta=beta).tau == pytest.approx(tau, rel=1e-12)
    assert beta < 1


def test_sharp_threshold_of_atoms_is_refused() -> None:
    with pytest.raises(TypeError):
        sharp_threshold("rademacher", 100)


def test_effective_beta_of_gaussians_tends_to_one_from_below() -> None:
    betas = [effective_beta("gaussian", n) for n in (10, 10**3, 10**6, 10**9, 10**12)]
    assert betas == sorted(betas)
    assert 0.9 < betas[-1] < 1


@pytest.mark.parametrize("rho", [0.1231, 0.3, 0.5, 0.9])
def test_horizon_is_where_the_bound_is_crossed(rho: float) -> None:
    n = independence_horizon(rho)
    below, above = (Point("gaussian", max(2, round(n * f)), rho=rho) for f in (0.98, 1.02))
    if below.length < above.length:
        assert exact_consensus(below) * below.length < 1
    assert exact_consensus(above) * above.length > 1


def test_horizon_falls_with_correlation() -> None:
    horizons = [independence_horizon(rho) for rho in (0.05, 0.0752, 0.1231, 0.3, 0.5, 0.9)]
    assert horizons == sorted(horizons, reverse=True)
    assert independence_horizon(0.0) == independence_horizon(-0.5) == math.inf


def test_horizon_study() -> None:
    rows = theory_lab.check("ours-independence-horizon", rho=[0.0752, 0.3], workers=1)
    assert rows.verdict.tolist() == ["HOLDS", "HOLDS", "VIOLATED"]
    assert "longer than any row" in rows.note[0]
    np.testing.assert_allclose(rows.estimate[1:], rows.exact[1:].astype(float), rtol=0.02)


def test_survivor_law() -> None:
    rows = theory_lab.check("ours-survivor-law", workers=1)
    assert (rows[rows.assumptions == "met"].verdict == "HOLDS").all()
    assert (rows[rows.assumptions != "met"].verdict == "VIOLATED").all()
    asked = theory_lab.check("ours-survivor-law", noise="gaussian", length=64, workers=1)
    assert (asked.assumptions == "met").all()
    assert asked.estimate[0] == pytest.approx(asked.exact[0], rel=0.01)
