"""ETA's claims: verdicts at reduced cost, controls violated, and bugs in the mechanism caught."""

from __future__ import annotations

import numpy as np
import pytest

from theory_lab.estimation.verdicts import VERDICTS, Verdict, judge
from theory_lab.studies import eta_bounds as bounds
from theory_lab.studies import eta_rows as rows
from theory_lab.studies.base import Finding, Piece, Request
from theory_lab.studies.eta import STUDIES
from theory_lab.studies.search import generate, search

torch = pytest.importorskip("torch")

BY_ID = {study.id: study for study in STUDIES}


def run(study_id: str, seed: int = 0, trials: int = 800) -> list[Finding]:
    study = BY_ID[study_id]
    return [f for piece in study.plan(Request(trials=trials)) for f in study.work(piece, seed)]


def verdict(finding: Finding) -> Verdict:
    return VERDICTS[int(judge(finding.low, finding.high, finding.bound, 0.0))]


def streams(seed: int = 0):
    return Piece.of("test").streams(seed)


@pytest.mark.parametrize("study_id", BY_ID)
def test_claims_hold_and_controls_do_not(study_id):
    findings = run(study_id)
    for finding in findings:
        want = Verdict.HOLDS if finding.assumptions == "met" else Verdict.VIOLATED
        assert verdict(finding) == want, finding
    assert any(f.assumptions != "met" for f in findings)


def test_default_plans_search_enough_cases():
    def total(study_id):
        return sum(dict(p.arguments)["trials"] for p in BY_ID[study_id].plan(Request()))

    assert total("eta-block-bound") >= 100_000
    assert total("eta-floor") >= 100_000
    # Three forms of the statement for either reading, each searched on its own.
    forms = {dict(p.arguments)["reading"]: dict(p.arguments)["trials"] for p in BY_ID["eta-hard-soft"].plan(Request())}
    assert 3 * (forms["logit"] + forms["weight"]) >= 100_000


def test_head_dimensions_can_be_asked_for():
    pieces = BY_ID["eta-block-bound"].plan(Request(head_dim=(8, 96), trials=20))
    made = [(p["bound"], p["dim"]) for p in pieces]
    assert len(set(made)) == len(made) == 10
    for piece in pieces:
        for finding in BY_ID["eta-block-bound"].work(piece, 0):
            assert finding.assumptions != "met" or verdict(finding) == Verdict.HOLDS


@pytest.mark.parametrize("study_id", BY_ID)
def test_same_seed_same_bits(study_id):
    first, again = (run(study_id, 3, 64) for _ in range(2))
    assert [f.to_json() for f in first] == [f.to_json() for f in again]
    assert [Finding.from_json(f.to_json()).to_json() for f in first] == [f.to_json() for f in first]


# ---- block bounds ------------------------------------------------------------------------------------


def test_rounding_to_bfloat16_is_torchs():
    x = generate(streams()[0], 500, 1, 8)[:, 0]
    x = np.where(np.isfinite(x), x, 0.0).astype(np.float32)
    want = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(bounds.round_bf16(x), want)


def test_products_are_exact():
    cases = generate(streams()[0], 300, 4, 16)
    q, k = bounds.decode(cases, unit=False)
    products = q[:, None] * k
    exact = q[:, None].astype(float) * k.astype(float)
    normal = np.abs(exact) > 2.0**-120
    np.testing.assert_array_equal(products[normal].astype(float), exact[normal])


@pytest.mark.parametrize("order", bounds.ORDERS)
@pytest.mark.parametrize("dim", [5, 16, 64])
def test_orders_of_accumulation_sum_everything(order, dim):
    terms = np.floor(streams()[0].uniforms(3 * dim).reshape(3, dim) * 1000.0).astype(np.float32)
    np.testing.assert_array_equal(bounds.accumulate(terms, order), terms.sum(1))


def test_orders_of_accumulation_differ():
    terms = (streams()[0].uniforms(200 * 64).reshape(200, 64) - 0.5).astype(np.float32)
    sums = [bounds.accumulate(terms, order) for order in bounds.ORDERS]
    for i, first in enumerate(sums):
        for second in sums[i + 1 :]:
            assert (first != second).any()


@pytest.mark.parametrize("name", bounds.BOUNDS)
def test_bounds_are_bounds_in_float64(name):
    cases = generate(streams(1)[0], 500, 4, 16)
    q, k = bounds.decode(cases, unit=name == "cap")
    exact = np.einsum("bd,bkd->bk", q.astype(float), k.astype(float)).max(1)
    assert (bounds.BOUNDS[name](q, k, 1.0).astype(float) >= exact).all()


def test_tighter_bounds_are_tighter():
    cases = generate(streams(1)[0], 2000, 4, 16)
    q, k = bounds.decode(cases, unit=False)
    plain = bounds.norm_bound(q, k, 0.0)
    for name in ("channel", "center"):
        assert (bounds.BOUNDS[name](q, k, 0.0) < 0.9 * plain).any(), name


@pytest.mark.parametrize(
    "mutant",
    [
        lambda q, k, m: bounds.norm_bound(q, k[:, :1], m),
        lambda q, k, m: bounds.channel_bound(q, k[:, ::2], m),
        lambda q, k, m: bounds.center_bound(q, k, m) * np.float32(0.999),
        lambda q, k, m: bounds.norm_bound(q, k, 0.0) * np.float32(1.0 + 2.0**-23),
    ],
    ids=["first-key", "every-other-key", "scaled", "one-ulp-of-margin"],
)
def test_wrong_bounds_are_caught(mutant):
    found = search(bounds.shortfall(mutant, 1.0, unit=False), streams(), 2000, 0.0, rows=4, width=16)
    assert found.broken


def test_the_reference_screen_would_be_caught_without_its_margin(monkeypatch):
    from theory_lab.attention import eta

    def bare(q, k, tau, block, *, scale=None):
        lengths = torch.linalg.vector_norm(k.double(), dim=-1).amax(-1)
        bound = torch.linalg.vector_norm(q.double(), dim=-1) * lengths[..., None] / q.shape[-1] ** 0.5
        return bound[..., None] >= tau.double()

    monkeypatch.setattr(eta, "block_screen", bare)
    found = search(bounds.dropped_by_reference, streams(), 2000, 0.0, rows=4, width=16)
    assert found.broken


# ---- rows --------------------------------------------------------------------------------------------


def test_mask_and_its_logarithm():
    s = np.array([[0.9, -700.0, 500.0]])
    tau, alpha = np.array([0.5]), np.array([10.0])
    m = rows.mask(s, tau, alpha)
    assert m[0, 0] == pytest.approx(1 / (1 + np.exp(-4.0)))
    assert m[0, 2] == 1.0
    np.testing.assert_allclose(rows._log_mask(s, tau, alpha)[0], [np.log(m[0, 0]), -7005.0, 0.0], rtol=1e-12)


@pytest.mark.parametrize("reading", ["logit", "weight"])
def test_weights_are_the_formulas(reading):
    s, tau, alpha = rows.setting(np.clip(generate(streams()[0], 200, 2, 6), -3, 3))
    m = rows.mask(s, tau, alpha)
    raw = np.exp(m * s) if reading == "logit" else m * np.exp(s)
    want = raw / raw.sum(1, keepdims=True)
    np.testing.assert_allclose(rows.eta_weights(s, tau, alpha, reading), want, rtol=1e-10, atol=1e-300)


def _mutated(change):
    good = rows.eta_weights

    def weights(s, tau, alpha, reading, prune=None):
        return change(good, s, tau, alpha, reading, prune)

    return weights


def test_pruning_that_keeps_a_suppressed_key_is_caught(monkeypatch):
    def change(good, s, tau, alpha, reading, prune):
        return good(s, np.maximum(tau - 0.05, 1e-3) if prune else tau, alpha, reading, prune)

    monkeypatch.setattr(rows, "eta_weights", _mutated(change))
    found = {f.subject: verdict(f) for f in run("eta-hard-soft")}
    assert found["weight, renormalized"] == found["logit, renormalized"] == Verdict.VIOLATED
    assert found["weight, dropped"] == Verdict.VIOLATED


def test_a_mask_of_the_wrong_sign_is_caught(monkeypatch):
    def change(good, s, tau, alpha, reading, prune):
        # m of tau - s at the same scores.
        m = rows.mask(2.0 * tau[:, None] - s, tau, alpha)
        x = np.where(s > -np.inf, m * np.where(s > -np.inf, s, 0.0), -np.inf)
        e = np.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    monkeypatch.setattr(rows, "eta_weights", _mutated(change))
    found = {f.subject: verdict(f) for f in run("eta-floor")}
    assert found["logit, at exp(0)/Z"] == Verdict.VIOLATED


def test_hard_softmax_attains_the_bound_on_the_spread():
    # Two survivors, one at the threshold and one far above; x (1 - x) / (1 + x) is largest at sqrt(2) - 1.
    share = np.sqrt(2.0) - 1.0
    s = np.array([[0.5, 0.5 + 1e-3]])
    alpha, tau = np.array([1e6]), np.array([0.5])
    weights = [rows.eta_weights(s, tau, alpha, "weight", p) for p in (None, "exact")]
    distance = 0.5 * np.abs(weights[0] - weights[1]).sum()
    assert 0.16 < distance < 3 - 2 * np.sqrt(2)
    assert share * (1 - share) / (1 + share) == pytest.approx(3 - 2 * np.sqrt(2))


def test_the_example_reproduces_every_figure():
    values = rows.example()
    assert values["tau"][0] == pytest.approx(0.482507, abs=5e-7)
    np.testing.assert_allclose(values["weights"], [0.3375, 0.0261, 0.2519, 0.0033, 0.3179, 0.0633], atol=5e-5)
    np.testing.assert_allclose(values["logit weights"], [0.2484, 0.1067, 0.1920, 0.1026, 0.2346, 0.1157], atol=5e-5)
    assert np.flatnonzero(values["hard"]).tolist() == [0, 2, 4]


def test_a_wrong_slope_breaks_the_example(monkeypatch):
    monkeypatch.setattr(rows, "_SLOPE", 9.0)
    found = {f.subject: verdict(f) for f in run("eta-example")}
    assert found["mask"] == found["weights"] == found["logit weights"] == Verdict.VIOLATED
    assert found["tau"] == Verdict.HOLDS


def test_the_threshold_of_the_example_is_the_mechanisms(monkeypatch):
    monkeypatch.setattr(rows, "_W", (0.1, -0.3, -0.2))
    found = {f.subject: verdict(f) for f in run("eta-example")}
    assert found["tau"] == found["weights"] == Verdict.VIOLATED
