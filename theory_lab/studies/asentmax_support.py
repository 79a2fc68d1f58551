"""Searches over single rows: how concentrated a row is, and which way the temperature works.

Source: ASEntmax (arXiv 2506.16640), concentration resilience and the learnable temperature theta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from theory_lab.attention.streaming import row_statistics
from theory_lab.studies.asentmax_rows import U, entmax_weights, finding, softmax_weights, sparsemax_exact
from theory_lab.studies.base import Finding, Piece
from theory_lab.studies.search import F64, Found, Margin, one_thread, search

# ---- asentmax-concentration ----------------------------------------------------------------------


def entropy(p: F64) -> F64:
    """Shannon entropy of rows in nats."""
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(1)


def entropy_excess(weights: Callable[[F64], F64], support: Callable[[F64], F64] | None = None) -> Margin:
    """Margin: H(p) - log |supp p| in multiples of its rounding budget, (8 + s) u (1 + log s).

    Weights within 2 ulp move H by at most 4 u (1 + H); the products and their sum cost (4 + s) u H.
    """

    def margin(cases: F64) -> F64:
        z = cases[:, 0]
        p = weights(z)
        s = ((support(z) if support else p) > 0).sum(1)
        return (entropy(p) - np.log(s)) / (U * (8.0 + s) * (1.0 + np.log(s)))

    return margin


def exact_entropy_excess(cases: F64) -> F64:
    """Margin: 1 if H(p) > log s for sparsemax in whole numbers, else 0.

    With p_j = a_j / N, H <= log s says prod (N / a_j)^(a_j) <= s^N, that is N^N <= s^N prod a_j^(a_j).
    """
    found = np.zeros(len(cases))
    for b, case in enumerate(cases):
        # Multiples of 1/8: N stays below 8 W, and the powers below a few hundred bits.
        z = [Fraction(round(8.0 * min(max(v, -9.0), 9.0)), 8) for v in case[0] if v > -math.inf]
        p = [w for w in sparsemax_exact(z)[0] if w > 0]
        common = math.lcm(*(w.denominator for w in p))
        whole = [int(w * common) for w in p]
        found[b] = common**common > len(p) ** common * math.prod(a**a for a in whole)
    return found


# ---- asentmax-theta ------------------------------------------------------------------------------


def support_growth(alpha: float, *, printed: bool, multiply: bool = False) -> Margin:
    """Margin: keys the support gains (printed direction) or loses (corrected one) as theta grows.

    The temperatures are 10^(2 u_1 - 1) and, above it by a factor of at least 1 + 2^-20, a second one; scores are
    limited to 1000, so that z / theta is rounded by far less than that factor moves it.
    """

    def margin(cases: F64) -> F64:
        z = np.clip(cases[:, 0], -1e3, 1e3)
        z = np.where(cases[:, 0] == -np.inf, -np.inf, z)
        low = 10.0 ** (2.0 * cases[:, 1, :1] - 1.0)
        high = low * (1.0 + 2.0 ** (40.0 * cases[:, 1, 1:2] - 20.0))
        sizes = [
            (entmax_weights(z * theta if multiply else z / theta, alpha) > 0).sum(1).astype(float)
            for theta in (low, high)
        ]
        return sizes[1] - sizes[0] if printed else sizes[0] - sizes[1]

    return margin


def exact_growth(cases: F64) -> F64:
    """Margin: keys that sparsemax's support loses, in rationals, as theta grows from one rational to a larger one."""
    found = np.zeros(len(cases))
    for b, case in enumerate(cases):
        z = [Fraction(float(v)) for v in case[0] if v > -math.inf]
        low = Fraction(1 + round(15 * case[1, 0]), 8)
        high = low * (1 + Fraction(1, 1 + round(1000 * case[1, 1])))
        sizes = [sum(w > 0 for w in sparsemax_exact([v / theta for v in z])[0]) for theta in (low, high)]
        found[b] = sizes[0] - sizes[1]
    return found


# ---- from searches to findings -------------------------------------------------------------------


def work_concentration(piece: Piece, seed: int) -> list[Finding]:
    """H <= log |supp|, in floats for two alphas and in whole numbers for sparsemax, and the control."""
    trials, part = piece["trials"], piece["part"]
    if part == "exact":
        found = search(exact_entropy_excess, piece.streams(seed), trials, 0.0, width=6, rounds=1)
        exact = finding(found, "sparsemax, whole numbers", 0.0, "search in exact integers; 1 if H > log s")
        return [exact, *_powers(piece, seed)]
    alpha = float(part)

    def solve(z: F64) -> F64:
        return entmax_weights(z, alpha)

    with one_thread():
        held = search(entropy_excess(solve), piece.streams(seed, 0), trials, 1.0)
        wrong = entropy_excess(softmax_weights, solve)
        dense = search(wrong, piece.streams(seed, 1), max(256, trials // 20), 1.0, rounds=1)
    method = "search; H - log s over its rounding budget"
    broken = f"not met: dense softmax against the support of entmax-{alpha:g}"
    return [
        finding(held, f"entmax-{alpha:g}", 1.0, method),
        finding(dense, f"softmax for entmax-{alpha:g}", 1.0, method, broken),
    ]


def _powers(piece: Piece, seed: int) -> list[Finding]:
    """H / log n against b for rows of 4096 keys of which n^b share the weight, and the same rows under softmax."""
    n, rows = 4096, 32
    worst = {"entmax": -math.inf, "softmax": -math.inf}
    for block, b in enumerate((0.25, 0.5, 0.75)):
        stream = piece.streams(seed, block)[0]
        for _ in range(rows):
            z = stream.uniforms(n)
            # Entmax keeps keys as close as n^(-b/2) to the top and drops those 2 or more below it.
            z[round(n**b) :] -= 4.0
            z[: round(n**b)] *= n ** (-b / 2.0)
            for mechanism in worst:
                found = row_statistics(z, mechanism, alpha=1.5)
                worst[mechanism] = max(worst[mechanism], found.normalized_entropy - b)
    method = "H / log n - b, worst row; n = 4096, b = 1/4, 1/2, 3/4"
    broken = "not met: dense softmax, whose support is all n"
    return [
        Finding.certain("entmax-1.5, s = n^b", worst["entmax"], 1e-12, length=n, trials=3 * rows, method=method),
        Finding.certain(
            "softmax, s = n^b", worst["softmax"], 1e-12, length=n, trials=3 * rows, method=method, assumptions=broken
        ),
    ]


def work_theta(piece: Piece, seed: int) -> list[Finding]:
    """The support under a growing temperature, against the direction that is asked for."""
    trials, part, printed = piece["trials"], piece["part"], piece["printed"]
    way = "gained" if printed else "lost"
    method = f"search; keys {way} as theta grows"
    if part == "exact":
        found = search(exact_growth, piece.streams(seed), trials, 0.0, width=6, rounds=1)
        return [finding(found, "sparsemax, rational", 0.0, f"search in exact rationals; keys {way} as theta grows")]
    alpha = float(part)
    findings = []
    with one_thread():
        found = search(support_growth(alpha, printed=printed), piece.streams(seed, 0), trials, 0.0)
        findings.append(finding(found, f"entmax-{alpha:g}", 0.0, method, extra=_temperatures(found)))
        if not printed:
            other = support_growth(alpha, printed=False, multiply=True)
            found = search(other, piece.streams(seed, 1), max(256, trials // 20), 0.0, rounds=1)
            broken = "not met: the scores are multiplied by theta, not divided"
            findings.append(finding(found, f"entmax-{alpha:g}, times theta", 0.0, method, broken, _temperatures(found)))
    return findings


def _temperatures(found: Found) -> str:
    low = 10.0 ** (2.0 * found.case[1, 0] - 1.0)
    high = low * (1.0 + 2.0 ** (40.0 * found.case[1, 1] - 20.0))
    return f", theta from {low:.6g} to {high:.6g}"
