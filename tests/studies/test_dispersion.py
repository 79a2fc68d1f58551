"""Dispersion of TRA and TDA against a naive simulation, and what the studies must find."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy import stats

import theory_lab
from theory_lab.claims import Point
from theory_lab.errors import InputError
from theory_lab.streams import Streams, cell_digest
from theory_lab.studies import STUDIES, Finding, Request
from theory_lab.studies.tda import row_entropies, tda_rows, tra_rows

SIGMAS = float(stats.norm.isf(1e-8))


def streams(name: str, block: int = 0) -> Streams:
    return Streams(cell_digest({"test": name}, 0), block)


def naive_entropy(weights: np.ndarray) -> np.ndarray:
    total = weights.sum(axis=1, keepdims=True)
    p = weights / np.where(total > 0, total, 1)
    return -(p * np.log(np.where(p > 0, p, 1))).sum(axis=1)


def test_row_entropies() -> None:
    owner = np.array([0, 0, 2, 2, 2])
    weights = np.array([1.0, 1.0, 0.0, 3.0, 0.0])
    np.testing.assert_allclose(row_entropies(owner, weights, 4, np.array([])), [math.log(2), 0, 0, 0])
    np.testing.assert_allclose(row_entropies(owner, weights, 4, np.array([1.0])),
                               [math.log(3), 0, -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), 0])  # fmt: skip


@pytest.mark.parametrize("n", [3, 40, 300])
def test_against_naive_simulation(n: int) -> None:
    """The plainest possible rows, from NumPy's own normals: means agree within their errors, for one and two views."""
    rows, lam, beta = 20_000, 0.6, 0.6
    point = Point("gaussian", n, beta=beta)
    relevant = np.array([0.01, 0.002])
    rng = np.random.Generator(np.random.PCG64(3))
    views = rng.normal(0, 1 / 8, (2, rows, n))
    first, second = np.maximum(views - point.tau, 0) ** 2
    extra = np.broadcast_to(relevant, (rows, 2))
    for mine, weights in (
        (tra_rows(point, rows, streams(f"tra {n}"), relevant), first),
        (
            tda_rows(point, lam, rows, streams(f"tda {n}"), streams(f"tda {n}", 1), relevant),
            np.abs(first - lam * second),
        ),
    ):
        naive = naive_entropy(np.concatenate([weights, extra], axis=1))
        spread = math.sqrt(mine.var() / rows + naive.var() / rows)
        assert abs(mine.mean() - naive.mean()) < SIGMAS * spread
        # Rows without a survivor share one value, up to rounding.
        assert stats.ks_2samp(mine.round(9), naive.round(9)).pvalue > 1e-9


@pytest.mark.parametrize("study", ["tra-dispersion", "tda-4.7"])
def test_verdicts(study: str) -> None:
    asked = {"noise": ["gaussian", "two-point", "laplace"], "length": [2**k for k in (6, 12, 14, 16, 18, 20, 22)]}
    rows = theory_lab.check(study, **asked, trials=4000, workers=1)
    assert len(rows) == 3 * 8
    met = rows[rows.assumptions == "met"]
    assert (met.verdict == "HOLDS").all()
    assert met.length.isna().sum() == 2
    control = rows[rows.noise == "laplace"]
    assert (control[control.length >= 2**14].verdict == "VIOLATED").all()
    assert control[control.length.isna()].estimate.iloc[0] > 0.2


def test_weak_threshold_is_a_control_and_disperses() -> None:
    rows = theory_lab.check(
        "tra-dispersion", noise="gaussian", beta=0.5, length=[2**k for k in range(12, 22)], workers=1
    )
    assert (rows.assumptions == "beta < sigma").all()
    assert rows[rows.length.isna()].verdict.tolist() == ["VIOLATED"]


def test_lambda_matters_and_is_reported() -> None:
    rows = theory_lab.check("tda-4.7", noise="gaussian", lam=[0.1, 0.9], length=[64], trials=4000, workers=1)
    assert rows["lambda"].tolist() == [0.1, 0.9]
    assert rows.noise.tolist() == ["gaussian, lambda 0.1", "gaussian, lambda 0.9"]
    assert rows.estimate.nunique() == 2


def test_same_bits_and_seeds() -> None:
    piece = STUDIES["tda-4.7"].plan(Request(noise=("gaussian",), length=(64, 128), trials=500))[0]
    work = STUDIES["tda-4.7"].work
    assert work(piece, 1) == work(piece, 1)
    assert work(piece, 1) != work(piece, 2)
    for finding in work(piece, 1):
        assert repr(Finding.from_json(finding.to_json())) == repr(finding)


def test_impossible_points_are_refused() -> None:
    with pytest.raises(InputError, match="head_dim"):
        theory_lab.check("tra-dispersion", noise="spherical", head_dim=1)


def test_table1_is_measured() -> None:
    pytest.importorskip("torch", reason="the mechanisms are torch modules")
    rows = theory_lab.check("tda-table1", workers=1)
    assert (rows.verdict == "HOLDS").all(), rows[rows.verdict != "HOLDS"][["noise", "note"]]
    stated = rows[rows.method.str.contains("measured: ") & ~rows.method.str.contains("all four")]
    assert sorted({subject.split(":")[0] for subject in stated.noise}) == ["softmax", "tda", "tra"]
    assert len(stated) == 12


def test_table1_without_torch_is_skipped_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from theory_lab import cases
    from theory_lab.settings import Settings

    monkeypatch.setattr(cases.importlib.util, "find_spec", lambda name: None)
    pieces, skipped = cases.build_pieces(Settings())
    assert not any(piece.study == "tda-table1" for piece in pieces)
    assert any("tda-table1" in line and "torch" in line for line in skipped)
    with pytest.raises(InputError, match="needs torch"):
        cases.build_pieces(Settings(claims=("tda-table1",)))


def test_own_mechanisms_join_and_may_fail() -> None:
    """One registered in this process is measured here, whatever the workers know; one that fails spares the others."""
    pytest.importorskip("torch", reason="the mechanisms are torch modules")
    from theory_lab.attention import register, unregister
    from theory_lab.attention.softmax import Softmax

    class Mine(Softmax):
        """A copy of softmax."""

    class Broken(Softmax):
        """Cannot be made."""

        @classmethod
        def sample(cls, *_: object, **__: object):
            raise RuntimeError("boom")

    sent = []

    class Elsewhere(ThreadPoolExecutor):
        def submit(self, function, task):
            sent.append(dict(task.piece.arguments)["mechanism"])
            return super().submit(function, task)

    register("mine", Mine)
    register("broken", Broken)
    try:
        with Elsewhere(1) as workers:
            rows = theory_lab.check("tda-table1", executor=workers)
    finally:
        unregister("mine")
        unregister("broken")
    assert "softmax" in sent
    assert not {"mine", "broken"} & set(sent)
    assert rows[rows.noise == "mine"].verdict.tolist() == ["HOLDS"]
    broken = rows[rows.noise == "broken"].iloc[0]
    assert broken.verdict == "INCONCLUSIVE"
    assert "RuntimeError: boom" in broken.note
    assert len(rows) == 32


def test_named_claims_with_nothing_to_check_are_refused() -> None:
    for claim, asked in (
        ("ours-slack", {"noise": "student-t(3)"}),
        ("ours-sharp-threshold", {"noise": "rademacher"}),
        ("ours-independence-horizon", {"rho": -0.5}),
        ("tda-4.7", {"noise": "any"}),
    ):
        with pytest.raises(InputError, match="nothing to check"):
            theory_lab.check(claim, **asked)
    with pytest.raises(InputError, match="survivors"):
        theory_lab.check("tda-4.7", noise="gaussian", kappa=1e12)


def test_ignored_options_are_named() -> None:
    from theory_lab.cases import build_pieces
    from theory_lab.settings import Settings

    said = build_pieces(Settings(claims=("tda-4.7",), noise=("gaussian",), rho=(0.9,), length=(64,)))[1]
    assert said == ["tda-4.7 does not depend on rho, which it ignores"]
    assert build_pieces(Settings(claims=("tda-4.6",), noise=("gaussian",), rho=(0.9,), length=(64,)))[1] == []
