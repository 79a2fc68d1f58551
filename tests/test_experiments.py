"""From settings to rows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

import theory_lab
from theory_lab.claims import CLAIMS, Point
from theory_lab.errors import InputError
from theory_lab.experiments import COLUMNS, Budget, Settings, build_cases, build_pieces, prepare, run


def test_default_sweep_covers_what_it_says() -> None:
    cases = build_cases(Settings())
    assert {piece.study for piece in build_pieces(Settings())[0]} >= {"tra-dispersion", "tda-4.7", "ours-slack"}
    assert {case.claim.id for case in cases} == {"tda-4.3", "tda-4.6"}
    assert len({case.point.noise for case in cases}) == 10
    lengths = {case.point.length for case in cases}
    assert (min(lengths), max(lengths)) == (2, 2**30)


def test_every_default_cell_is_precise() -> None:
    """Relative error of every default cell at most 3%, and every row agrees with its exact value."""
    rows = theory_lab.check(["tda-4.3", "tda-4.6"], workers=1)
    assert list(rows.columns) == list(COLUMNS)
    assert rows.relative_error.max() <= 0.03
    assert not (rows.verdict == "INCONCLUSIVE").any()
    assert set(rows[rows.verdict == "VIOLATED"].noise) == {"student-t(3)", "laplace"}
    assert (rows[rows.assumptions == "met"].verdict == "HOLDS").all()
    random = rows[rows.standard_error > 0]
    z = (random.estimate - random.exact) / np.maximum(random.standard_error, 1e-12 * random.exact)
    assert np.abs(z).max() < 6
    assert (rows.ci_low <= rows.estimate).all()
    assert (rows.estimate <= rows.ci_high * (1 + 1e-12)).all()


def test_a_bound_that_cannot_be_computed_is_found_before_anything_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(point: Point) -> float:
        raise InputError("kappa", point.kappa, "none is")

    broken = dataclasses.replace(CLAIMS["tda-4.3"], id="broken", bound=bound)
    monkeypatch.setitem(CLAIMS, "broken", broken)
    monkeypatch.setattr("theory_lab.settings.find", CLAIMS.get)
    with pytest.raises(InputError, match="none is"):
        prepare(Settings(("broken",), ("gaussian",), (10,)))


@pytest.mark.parametrize(
    "extreme",
    [
        {"kappa": 1e100, "bound_scale": 1e300},
        {"kappa": 1e10, "tolerance": 1e308},
        {"kappa": 1e-100, "beta": 1e-40, "bound_scale": 1e-200},
        {"kappa": 1e-100, "beta": 1e50, "sigma": 1e-90},
        {"kappa": 1e100, "beta": 1e50, "sigma": 1e90},
    ],
    ids=str,
)
def test_what_no_float_holds_is_infinite_without_a_warning(extreme: dict[str, float]) -> None:
    rows = theory_lab.check(
        list(CLAIMS), noise=["gaussian", "two-point", "any"], length=[1, 10**15], trials=5, **extreme
    )
    assert len(rows) == 24
    assert not rows[["estimate", "bound", "ci_low", "ci_high"]].isna().any().any()
    enough = [(1 + extreme.get("tolerance", 0.01)) * bound for bound in rows.bound.tolist()]
    expected = np.select([rows.ci_low > rows.bound, rows.ci_high <= enough], ["VIOLATED", "HOLDS"], "INCONCLUSIVE")
    assert (rows.verdict == expected).all()


def test_general_forms_join_where_they_say_something_else() -> None:
    cases = build_cases(Settings(noise=("gaussian",), length=(100,), beta=(1.0, 0.8), rho=(0.0, 0.3)))
    found = {(c.claim.id, c.point.beta, c.point.rho) for c in cases}
    assert ("tda-4.3-general", 0.8, 0.0) in found
    assert ("tda-4.3-general", 1.0, 0.0) not in found
    assert ("tda-4.6-correlated", 1.0, 0.3) in found
    assert ("tda-4.6-correlated", 1.0, 0.0) not in found


def test_parameters_that_do_not_matter_make_no_rows() -> None:
    rows = theory_lab.check("tda-4.3", noise="gaussian", length=10, rho=[0.0, 0.5], trials=1000)
    assert len(rows) == 1
    assert math.isnan(rows.rho[0])


def test_one_cell_serves_two_claims() -> None:
    rows = theory_lab.check(["tda-4.3", "tda-4.3-general"], noise="gaussian", length=10, beta=0.8, trials=1000)
    assert rows.estimate.nunique() == 1
    assert rows.bound.nunique() == 2


@pytest.mark.parametrize("estimator", ["direct", "tail", "importance", "exact", "worst-case"])
def test_selectable_estimators(estimator: str) -> None:
    noise = None if estimator == "worst-case" else "gaussian"
    rows = theory_lab.check("tda-4.6", noise=noise, length=[2, 8], estimator=estimator, trials=200_000)
    assert (rows.estimator == estimator).all()
    if estimator == "worst-case":
        assert (rows.noise == "any").all()
        assert (rows.ci_low <= rows.ci_high).all()
        assert rows.method.str.startswith("sandwich").all()
    else:
        np.testing.assert_allclose(rows.estimate, rows.exact, rtol=0.35)


def test_worst_case_of_a_million_keys() -> None:
    row = theory_lab.check("tda-4.3", length=10**6, estimator="worst-case").iloc[0]
    assert row.ci_low == pytest.approx(0.999999, abs=1e-8)
    assert row.ci_low <= row.ci_high <= 1.0
    assert "gap to the certificate" in row.note


def test_kappa_above_length_is_legal() -> None:
    rows = theory_lab.check(noise=["gaussian", "two-point", "any"], length=3, kappa=5, trials=1000)
    assert (rows.verdict == "HOLDS").all()


def test_sequential_stops_when_decided_or_spent() -> None:
    spent = theory_lab.check(
        "tda-4.3", noise="two-point", length=10**6, estimator="tail", budget=Budget(trials=200_000)
    )
    assert spent.verdict.tolist() == ["INCONCLUSIVE"]
    assert spent.trials[0] <= 200_000
    assert spent.method.tolist() == ["beta-mixture"]
    enough = theory_lab.check("tda-4.3", noise="two-point", length=10**6, estimator="tail", budget=Budget(seconds=60))
    assert enough.verdict.tolist() == ["HOLDS"]
    rare = theory_lab.check("tda-4.6", noise="gaussian", length=10**6, budget=Budget(seconds=60))
    assert rare.verdict.tolist() == ["HOLDS"]
    assert rare.method.tolist() == ["empirical-bernstein"]


def test_sequential_resumes_to_the_same_rows(tmp_path) -> None:
    asked = {
        "claims": ["tda-4.3", "tda-4.6"],
        "noise": ["gaussian", "two-point"],
        "length": [2, 10**4],
        "budget": Budget(trials=10**7),
    }
    results = [name for name in COLUMNS if name != "seconds"]
    first = theory_lab.check(**asked, out=tmp_path / "r")
    again = theory_lab.check(**asked, out=tmp_path / "r", resume=True)
    pd.testing.assert_frame_equal(first[results], again[results], check_exact=True)
    pd.testing.assert_frame_equal(first[results], theory_lab.check(**asked)[results], check_exact=True)


def test_no_time_left_gives_what_there_is() -> None:
    rows = theory_lab.check("tda-4.3", noise="gaussian", length=[10, 100], budget=Budget(seconds=1e-9))
    assert rows.verdict.tolist() == ["INCONCLUSIVE"] * 2
    assert rows.trials.tolist() == [0, 0]
    assert rows.ci_high.tolist() == [10, 100]


def test_interrupt_hands_over_finished_rows() -> None:
    class Impatient(theory_lab.experiments.Silent):
        def __init__(self) -> None:
            self.finished = 0

        def advance(self, finished: int, work: float) -> None:
            self.finished += finished
            if self.finished == 2:
                raise KeyboardInterrupt

    partial: list[pd.DataFrame] = []
    settings = Settings(("tda-4.3",), ("gaussian",), (2, 4, 8, 16), trials=1000)
    with pytest.raises(KeyboardInterrupt):
        run(settings, workers=1, progress=Impatient(), on_partial=partial.append)
    assert len(partial[0]) == 2
    assert set(partial[0].verdict) == {"HOLDS"}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("length", 1.5),
        ("length", "x"),
        ("length", []),
        ("kappa", "a"),
        ("kappa", 0),
        ("trials", 0),
        ("trials", True),
        ("head_dim", 2.5),
        ("estimator", "guess"),
        ("seed", -3),
        ("alpha", 1.5),
        ("noise", "nope"),
        ("claims", "nope"),
        ("bound_scale", -1.0),
        ("workers", 0),
        ("alpha", None),
        ("alpha", "x"),
        ("budget", "soon"),
        ("budget", 3),
        ("executor", "x"),
        ("out", 3),
        ("out", ""),
        ("rho", 2),
        ("key_rho", 1),
        ("sigma", 1e-200),
    ],
)
def test_bad_arguments(argument: str, value: object) -> None:
    with pytest.raises(InputError):
        theory_lab.check(**{"noise": "gaussian", "length": 10, "trials": 100, argument: value})


def test_bad_budget() -> None:
    with pytest.raises(InputError, match="budget"):
        Budget(trials=0)


def test_dependent_keys_get_honest_intervals() -> None:
    """By linearity the expectation is that of independent keys; rows of dependent ones must not mislead."""
    asked = {"claims": "tda-4.3", "noise": "gaussian", "length": 2**20, "key_rho": 0.9, "bound_scale": 0.05}
    auto = theory_lab.check(**asked)
    assert auto.estimator.tolist() == ["importance"]
    assert auto.verdict.tolist() == ["VIOLATED"]  # 0.0733 against 0.05
    for seed in range(10):
        rows = theory_lab.check(**asked, estimator="tail", seed=seed, trials=100_000)
        assert rows.method.tolist() == ["empirical-bernstein"]
        assert rows.ci_low[0] <= rows.exact[0] <= rows.ci_high[0]
        assert rows.verdict[0] != "HOLDS"


@pytest.mark.parametrize(
    ("claim", "point"),
    [
        ("tda-4.3", {"noise": "two-point", "beta": 10, "length": 2**20}),
        ("tda-4.3", {"noise": "any", "beta": 7, "length": 2**20}),
        ("tda-4.3", {"noise": "any", "sigma": 1e5, "length": 2}),
        ("tda-4.3", {"noise": "two-point", "sigma": 1e-3, "length": 1024}),
        ("tda-4.6", {"noise": "gaussian", "beta": 20, "rho": 0.5, "length": 1024}),
        ("tda-4.6", {"noise": "laplace", "sigma": 1e-6, "rho": -0.99, "length": 1024}),
        ("tda-4.3-general", {"noise": "gaussian", "beta": 100, "length": 1000}),
        ("tda-4.3", {"noise": "gaussian", "beta": 0, "length": 2**40}),
        ("tda-4.6", {"noise": "student-t(1.1)", "key_rho": 0.3, "rho": 0.4, "length": 2**30}),
    ],
)
def test_extreme_constants(claim: str, point: dict) -> None:
    rows = theory_lab.check(claim, **point)
    row = rows.iloc[0]
    assert np.isfinite([row.estimate, row.ci_low, row.ci_high]).all()
    assert row.ci_low <= row.estimate <= row.ci_high * (1 + 1e-12)
    assert row.verdict in ("HOLDS", "VIOLATED")


def test_numpy_numbers_and_text_budgets() -> None:
    rows = theory_lab.check("tda-4.3", noise="gaussian", length=np.int64(10), seed=np.int64(3), trials=np.int64(50))
    assert rows.trials.tolist() == [50]
    assert theory_lab.check("tda-4.3", noise="gaussian", length=10, trials=1e3).trials.tolist() == [1000]
    assert len(theory_lab.check("tda-4.3", noise="gaussian", length=10, budget="5s")) == 1


def test_huge_requests_are_refused_at_once() -> None:
    with pytest.raises(InputError, match="combinations"):
        theory_lab.check(kappa=range(1, 1001), beta=range(1, 1001), length=range(1, 1001))
    with pytest.raises(InputError, match="trials"):
        theory_lab.check("tda-4.3", noise="gaussian", length=10, trials=4 * 10**18)


def test_raw_scores_with_a_mean_are_outside_the_assumptions(tmp_path) -> None:
    np.save(tmp_path / "s.npy", np.random.Generator(np.random.Philox(key=9)).normal(0.3, 0.02, 5000))
    rows = theory_lab.check("tda-4.3", noise=f"file:{tmp_path / 's.npy'},raw", length=8)
    assert "mean" in rows.assumptions[0]
