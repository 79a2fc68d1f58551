"""ASEntmax's claims: verdicts at reduced cost, controls violated, and bugs in the mechanism caught."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from multiprocessing import get_context

import numpy as np
import pytest

from theory_lab.estimation.verdicts import VERDICTS, Verdict, judge
from theory_lab.studies import asentmax_collapse as collapse
from theory_lab.studies import asentmax_dispersion as dispersion
from theory_lab.studies import asentmax_paths as paths
from theory_lab.studies import asentmax_rows as rows
from theory_lab.studies import asentmax_support as support
from theory_lab.studies.asentmax import STUDIES
from theory_lab.studies.base import Finding, Piece, Request
from theory_lab.studies.search import generate

torch = pytest.importorskip("torch")

BY_ID = {study.id: study for study in STUDIES}
SMALL = {
    "asentmax-dispersion": Request(trials=24, length=(16, 4096, 8192, 16384, 32768, 65536, 131072)),
    "asentmax-collapse": Request(length=tuple(1 << k for k in range(6, 17))),
}


def run(
    study_id: str, seed: int = 0, request_: Request | None = None, parts: tuple[str, ...] | None = None
) -> list[Finding]:
    study = BY_ID[study_id]
    pieces = study.plan(request_ or SMALL.get(study_id, Request(trials=150)))
    wanted = [p for p in pieces if parts is None or p["part"] in parts]
    return [finding for piece in wanted for finding in study.work(piece, seed)]


def verdict(finding: Finding) -> Verdict:
    low, high = finding.low, finding.high
    if finding.trend is not None:
        low, high = finding.trend.interval(1e-3)
    return VERDICTS[int(judge(low, high, finding.bound, 0.0))]


def stream(seed: int = 0, **arguments):
    return Piece.of("test", **arguments).streams(seed)[0]


# ---- verdicts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("study_id", sorted(set(BY_ID) - {"asentmax-theta"}))
def test_claims_hold_and_controls_do_not(study_id):
    findings = run(study_id)
    controls = [f for f in findings if f.assumptions != "met"]
    assert controls
    for finding in findings:
        want = Verdict.HOLDS if finding.assumptions == "met" else Verdict.VIOLATED
        assert verdict(finding) == want, finding


def test_printed_direction_of_theta_is_violated_with_a_small_counterexample():
    for finding in run("asentmax-theta"):
        assert finding.assumptions == "met"
        assert verdict(finding) == Verdict.VIOLATED
        assert "smallest counterexample: scores (" in finding.note
        assert finding.note.count(",") == 2  # two scores, then theta


def test_the_counterexample_is_one():
    z = np.array([[0.0, -1.0]])
    sizes = [(rows.entmax_weights(z / theta, 2.0) > 0).sum() for theta in (1.0, 2.0)]
    assert sizes == [1, 2]


def test_default_plans_search_enough_cases():
    for study in STUDIES:
        if study.kind == "invariance":
            assert sum(dict(p.arguments)["trials"] for p in study.plan(Request())) >= 89_000, study.id
    # Nonvanishing counts its softmax piece three times: three searches of their own.
    pieces = {
        dict(p.arguments)["part"]: dict(p.arguments)["trials"] for p in BY_ID["asentmax-nonvanishing"].plan(Request())
    }
    assert sum(pieces.values()) + 2 * pieces["softmax"] >= 100_000


@pytest.mark.parametrize("study_id", ["asentmax-theta", "asentmax-paths", "asentmax-collapse", "asentmax-dispersion"])
def test_same_seed_same_bits(study_id):
    small = SMALL.get(study_id, Request(trials=64))
    first, again = (run(study_id, 3, small) for _ in range(2))
    assert [f.to_json() for f in first] == [f.to_json() for f in again]
    assert [Finding.from_json(f.to_json()).to_json() for f in first] == [f.to_json() for f in first]
    if study_id in ("asentmax-collapse", "asentmax-dispersion"):
        assert [f.to_json() for f in first] != [f.to_json() for f in run(study_id, 4, small)]


def test_same_bits_in_a_spawned_process():
    study = BY_ID["asentmax-concentration"]
    piece = study.plan(Request(trials=100))[0]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        away = pool.submit(study.work, piece, 5).result()
    assert [f.to_json() for f in away] == [f.to_json() for f in study.work(piece, 5)]


def test_rows_of_a_length_do_not_depend_on_other_lengths():
    alone = run("asentmax-dispersion", request_=Request(trials=8, length=(4096,), noise=("uniform",)))
    among = run("asentmax-dispersion", request_=Request(trials=8, length=(64, 4096), noise=("uniform",)))
    assert {f.subject: f.estimate for f in alone} == {f.subject: f.estimate for f in among if f.length == 4096}


# ---- bugs in the mechanism are caught ---------------------------------------------------------------


def _leak(z, alpha):
    p = TRUE(z, alpha)
    return np.where(z > -np.inf, (p + 1e-12) / (1.0 + 1e-12 * z.shape[1]), 0.0)


def _count_masked(z, alpha):
    """Scales the scores by the number of entries, masked or not."""
    return TRUE(z * math.log(z.shape[1]), alpha)


TRUE = rows.entmax_weights


@pytest.mark.parametrize("mutant", [_leak, _count_masked], ids=["leak", "length"])
def test_nonvanishing_catches(monkeypatch, mutant):
    monkeypatch.setattr(rows, "entmax_weights", mutant)
    found = [f for f in run("asentmax-nonvanishing", parts=("1.5", "2.0")) if f.assumptions == "met"]
    assert len(found) == 2
    assert all(verdict(f) == Verdict.VIOLATED for f in found)


def test_nonvanishing_catches_a_softmax_of_the_wrong_sign(monkeypatch):
    good = rows.softmax_weights
    monkeypatch.setattr(rows, "softmax_weights", lambda z: good(np.where(z > -np.inf, -z, -np.inf)))
    found = {f.subject: verdict(f) for f in run("asentmax-nonvanishing", parts=("softmax",))}
    assert found["softmax, factor"] == Verdict.VIOLATED


def test_nonvanishing_catches_a_softmax_that_counts_masked_keys(monkeypatch):
    good = rows.softmax_weights

    def counting(z):
        lowest = np.where(z > -np.inf, z, np.inf).min(1, keepdims=True)
        return good(np.where(z > -np.inf, z, lowest))

    monkeypatch.setattr(rows, "softmax_weights", counting)
    found = {f.subject: verdict(f) for f in run("asentmax-nonvanishing", parts=("softmax",))}
    assert Verdict.VIOLATED in (found["softmax, factor"], found["softmax, top weight"])


def test_a_support_that_shrinks_with_theta_is_caught(monkeypatch):
    def pruned(z, alpha):
        # Small weights cut off: flat rows, those of a large theta, lose everything.
        p = TRUE(z, alpha)
        return np.where(p > 0.2, p, 0.0)

    monkeypatch.setattr(support, "entmax_weights", pruned)
    found = [f for f in run("asentmax-theta-corrected", parts=("1.5", "2.0")) if f.assumptions == "met"]
    assert len(found) == 2
    assert all(verdict(f) == Verdict.VIOLATED for f in found)


def test_concentration_catches_weights_that_do_not_sum_to_one(monkeypatch):
    monkeypatch.setattr(support, "entmax_weights", lambda z, alpha: TRUE(z, alpha) * 0.9)
    found = [f for f in run("asentmax-concentration", parts=("1.5", "2.0")) if f.assumptions == "met"]
    assert len(found) == 2
    assert all(verdict(f) == Verdict.VIOLATED for f in found)


def test_paths_catch_layers_in_the_wrong_order(monkeypatch):
    def transposed(layers):
        return good(layers.transpose(0, 1, 3, 2))

    good = paths.count_paths
    layers = paths.stack(stream(), paths.row_pool(stream(1), 6, 1.5), 200, 3)
    monkeypatch.setattr(paths, "count_paths", transposed)
    assert (paths.excess(layers)[0] != paths.count_paths(layers)).any()
    wrong = paths.count_paths(layers)
    assert (wrong != good(layers)).any()


# ---- the parts against plain references -------------------------------------------------------------


def test_exact_decisions_about_the_threshold():
    cases = generate(stream(), 400, 2, 5)
    z = cases[:, 0]
    for alpha, power in ((2.0, 1), (1.5, 2)):
        y, unit = rows.highest_below(z, alpha)
        for at in (y, y - 3 * unit, y + 3 * unit, y + 0.25):
            decided = rows.below_threshold(z, at, alpha)
            for b in range(len(z)):
                gaps = [
                    (Fraction(float(v)) - Fraction(float(at[b]))) * Fraction(alpha - 1.0) for v in z[b] if v > at[b]
                ]
                assert decided[b] == (sum(g**power for g in gaps) >= 1)
        assert rows.below_threshold(z, y, alpha).all()
        assert not rows.below_threshold(z, y + 16 * unit, alpha).any()


def test_rational_sparsemax_is_sparsemax():
    cases = generate(stream(), 200, 1, 5)[:, 0]
    cases = np.clip(cases, -50, 50)
    p = rows.entmax_weights(cases, 2.0)
    for z, want in zip(cases, p, strict=True):
        weights, _ = rows.sparsemax_exact([Fraction(float(v)) for v in z if v > -50])
        assert sum(weights) == 1
        np.testing.assert_allclose([float(w) for w in weights], want[z > -50], rtol=1e-15, atol=1e-300)


def test_whole_number_entropy_agrees_with_floats_where_they_are_clear():
    assert rows.softmax_weights(np.zeros((1, 3))).sum() == pytest.approx(1.0)
    uniform = np.zeros((1, 2, 4))
    assert support.exact_entropy_excess(uniform)[0] == 0
    assert support.entropy(np.full((1, 4), 0.25))[0] == pytest.approx(math.log(4))


def test_counts_agree_with_enumeration():
    layers = np.tril(stream().uniforms(3 * 5 * 5).reshape(1, 3, 5, 5) < 0.6)
    count = 0
    for a, b, c in itertools.product(range(5), repeat=3):
        count += layers[0, 2, 4, a] and layers[0, 1, a, b] and layers[0, 0, b, c]
    assert paths.count_paths(layers)[0] == count
    assert paths.count_paths_of_one(layers[0]) == count


def test_dense_layers_have_binomially_many_paths():
    for n, depth in ((1, 1), (7, 1), (9, 4), (64, 6)):
        layers = np.broadcast_to(np.tril(np.ones((n, n), bool)), (1, depth, n, n))
        assert paths.count_paths(layers)[0] == math.comb(n + depth - 1, depth)


def test_softmax_traces_are_those_of_the_full_matrices():
    z = collapse.logits(Piece.of("t"), 1, 12)
    weights = np.zeros((12, 12))
    for i in range(12):
        e = np.exp(z[i % 4, : i + 1])
        weights[i, : i + 1] = e / e.sum()
    x = np.eye(12)[0]
    for _ in range(3):
        x = x + weights @ x
    np.testing.assert_allclose(collapse.softmax_traces(z, 3), x, rtol=1e-12)


def test_uniform_traces_are_those_of_uniform_attention():
    n, depth = 20, 3
    plain = collapse.softmax_traces(np.zeros((4, n)), depth)
    np.testing.assert_allclose(collapse.uniform_traces(n, depth)[1:], plain[1:], rtol=1e-12)


@pytest.mark.parametrize("changed", [0, 3])
def test_entmax_traces_are_those_of_the_full_matrices(changed):
    z = 2.0 * collapse.logits(Piece.of("t"), 2, 16)
    weights = np.zeros((16, 16))
    for i in range(16):
        weights[i, : i + 1] = rows.entmax_weights(z[i % 4 : i % 4 + 1, : i + 1], 1.5)[0]
    x = np.eye(16)[changed]
    for _ in range(3):
        x = x + weights @ x
    assert collapse.entmax_trace(z, 16, 3, changed) == pytest.approx(x[-1], rel=1e-12)


def test_slopes_of_known_sequences():
    lengths = [1 << k for k in range(12, 20)]
    fitted = dispersion.slope(lengths, [[0.4 * math.log(n) + 1.0] * 3 for n in lengths], deficit=False)
    assert fitted is not None
    assert fitted[0].slope == pytest.approx(0.4)
    lost = dispersion.slope(lengths, [[math.log(n) - 0.15] * 3 for n in lengths], deficit=True)
    assert lost is not None
    assert lost[0].slope == pytest.approx(0.0, abs=1e-12)
    assert dispersion.slope([16, 32], [[1.0], [2.0]], deficit=False) is None
