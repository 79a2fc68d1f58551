"""Searches over single rows: what appended tokens do to the weights of the others.

Source: ASEntmax (arXiv 2506.16640), non-vanishing attention. alpha-entmax is
p_j = [(alpha - 1) z_j - tau(z)]_+^(1/(alpha - 1)).

Whether a key is above the threshold is decided exactly, without computing tau: with

    R(y) = sum_j ((alpha - 1) (z_j - y))_+^(1/(alpha - 1)),

which decreases in y, (alpha - 1) y <= tau(z) if and only if R(y) >= 1. For alpha = 2 and 1.5 the power is 1 and 2, so R
is rational wherever the scores are floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from theory_lab.studies.base import Finding, Piece
from theory_lab.studies.search import F64, Found, Margin, describe, one_thread, search

Bools = npt.NDArray[np.bool_]

#: Unit roundoff of float64.
U = 2.0**-53
_APPENDED = 3
_POWER = {2.0: 1, 1.5: 2}
_STRESSES = 64


# ---- the mechanisms under test -------------------------------------------------------------------


def entmax_weights(z: F64, alpha: float) -> F64:
    """Weights of the sort-based solver of ``theory_lab.attention``, rows independent."""
    import torch

    from theory_lab.attention.alpha_entmax import entmax

    return entmax(torch.from_numpy(np.ascontiguousarray(z)), alpha).numpy()


def softmax_weights(z: F64) -> F64:
    """Weights of the softmax mechanism."""
    import torch

    from theory_lab.attention.softmax import Softmax

    return Softmax().weights(torch.from_numpy(np.ascontiguousarray(z))).detach().numpy()


def sparsemax_exact(z: list[Fraction]) -> tuple[list[Fraction], Fraction]:
    """Sparsemax in rationals: weights and threshold (Martins and Astudillo, arXiv 1602.02068, algorithm 1)."""
    total, tau = Fraction(0), Fraction(0)
    for rank, value in enumerate(sorted(z, reverse=True), start=1):
        if 1 + rank * value <= total + value:
            break
        total += value
        tau = (total - 1) / rank
    return [max(value - tau, Fraction(0)) for value in z], tau


# ---- exact decisions about the threshold ---------------------------------------------------------


def below_threshold(z: F64, y: F64, alpha: float) -> Bools:
    """Whether (alpha - 1) y <= tau(z), exactly; z (B, W), y (B,), alpha 1.5 or 2."""
    power = _POWER[alpha]
    undecided = np.arange(len(z))
    answer = np.zeros(len(z), bool)
    # Doubles decide almost all, extended precision almost all of the rest; ties are left to rationals.
    for kind in (np.float64, np.longdouble):
        gap = (z[undecided].astype(kind) - y[undecided, None].astype(kind)) * kind(alpha - 1.0)
        excess = (np.maximum(gap, 0) ** power).sum(1) - 1
        answer[undecided] = excess >= 0
        undecided = undecided[np.abs(excess) <= 64 * z.shape[1] * np.finfo(kind).eps]
        if not undecided.size:
            return answer
    for b in undecided:
        # Floats are whole multiples of a power of two, so whole numbers do, and are faster than fractions.
        ratios = [v.as_integer_ratio() for v in [float(y[b]), *z[b][z[b] > y[b]].tolist()]]
        unit = max(denominator for _, denominator in ratios)
        at, *above = [numerator * (unit // denominator) for numerator, denominator in ratios]
        answer[b] = sum((v - at) ** power for v in above) >= (unit * power) ** power
    return answer


def _float_threshold(z: F64, alpha: float) -> F64:
    """tau / (alpha - 1) in floats, shape (B,); a starting point only."""
    ordered = -np.sort(-z, axis=1)
    top = ordered[:, :1]
    x = np.maximum(ordered - top, -4.0 / (alpha - 1.0)) * (alpha - 1.0)
    rank = np.arange(1, z.shape[1] + 1)
    mean = np.cumsum(x, 1) / rank
    if _POWER[alpha] == 1:
        taus = mean - 1.0 / rank
    else:
        variance = np.maximum(np.cumsum(x * x, 1) / rank - mean**2, 0.0)
        taus = mean - np.sqrt(np.maximum(1.0 / rank - variance, 0.0))
    size = np.maximum((taus < x).sum(1), 1)
    return taus[np.arange(len(z)), size - 1] / (alpha - 1.0) + top[:, 0]


def highest_below(z: F64, alpha: float) -> tuple[F64, F64]:
    """A score that is below the threshold and within a rounding of it, and the size of that rounding; both (B,)."""
    y = _float_threshold(z, alpha)
    unit = np.spacing(np.maximum(np.abs(y), z.max(1) - y))
    y = y + 2.0 * unit
    pending = np.arange(len(z))
    for tries in range(80):
        pending = pending[~below_threshold(z[pending], y[pending], alpha)]
        if not pending.size:
            break
        y[pending] -= unit[pending] * 2.0 ** max(0, tries - 12)
    return y, unit


def _ulps(after: F64, before: F64) -> F64:
    """Largest change of a weight in units in its last place, (B,); a weight that was 0 counts in those of the top."""
    scale = np.spacing(np.where(before > 0, before, before.max(1, keepdims=True)))
    return (np.abs(after - before) / scale).max(1)


# ---- asentmax-nonvanishing -----------------------------------------------------------------------


def appended_change(
    alpha: float, *, above: bool = False, weights: Callable[[F64], F64] | None = None
) -> Callable[[F64], F64]:
    """Margin: what three appended tokens change, in ulp. They sit at the threshold, some ulp or far below, or at -inf.

    Parameters
    ----------
    alpha : float
        1.5 or 2.
    above : bool
        Put the first of them just above the threshold instead (the control).
    weights : callable, optional
        Another mechanism in place of entmax (the other control).
    """
    solve = weights or (lambda z: entmax_weights(z, alpha))

    def margin(cases: F64) -> F64:
        z, u = cases[:, 0], cases[:, 1, :_APPENDED]
        y, unit = highest_below(z, alpha)
        reach = (z.max(1) - y)[:, None]
        ulps = np.floor(40.0 * (u - 0.3)) * unit[:, None]
        far = reach * 10.0 ** (60.0 * (u - 0.85))
        new = y[:, None] - np.select([u < 0.3, u < 0.6, u < 0.95], [0.0 * far, ulps, far], np.inf)
        legal = np.ones(len(z), bool)
        if above:
            new[:, 0] = y + (z.max(1) - y) * 10.0 ** (-8.0 * u[:, 0])
            legal = ~below_threshold(z, new[:, 0], alpha)
        joined = solve(np.concatenate([z, new], 1))
        before = solve(z)
        after = np.concatenate([before, np.zeros_like(new)], 1)
        change = _ulps(joined[:, : z.shape[1]], before)
        stolen = (np.abs(joined - after)[:, z.shape[1] :] / np.spacing(before.max(1, keepdims=True))).max(1)
        # A token above the threshold takes weight by right; what counts is what the others lose.
        found = change if above or weights else np.maximum(change, stolen)
        return np.where(legal, found, np.nan)

    return margin


def exact_change(cases: F64) -> F64:
    """Margin: the same for sparsemax in rationals, the appended tokens at tau and at rational distances below it."""
    found = np.zeros(len(cases))
    for b, case in enumerate(cases):
        z = [Fraction(float(v)) for v in case[0] if v > -math.inf]
        before, tau = sparsemax_exact(z)
        new = [tau, *(tau - Fraction(round(u * _STRESSES), _STRESSES) ** 3 for u in case[1, : _APPENDED - 1])]
        after, _ = sparsemax_exact(z + new)
        found[b] = float(max(abs(x - y) for x, y in zip(after, before + [Fraction(0)] * len(new), strict=True)))
    return found


def _near_partition(z: F64, u: F64) -> tuple[F64, npt.NDArray[np.longdouble]]:
    """A score z_new within 30 of the log-partition, and z_new - LSE; both (B,).

    The difference is taken from the top of the row, so that a common offset of the scores costs no digits.
    """
    top = z.max(1).astype(np.longdouble)
    rest = np.log(np.exp(z.astype(np.longdouble) - top[:, None]).sum(1))
    new = (top + rest + 60.0 * (u - 0.5)).astype(np.float64)
    return new, new.astype(np.longdouble) - top - rest


def softmax_factor(cases: F64) -> F64:
    """Margin: |p'_j / (p_j f) - 1| with f = 1 / (1 + exp(z_new - LSE)), in multiples of its rounding budget.

    A softmax weight is exp(fl(z_j - top)) / sum: the rounded difference costs u |z_j - top|, exp and the division a few
    u, the sum at most (W + a few) u; both rows pay, and f costs u |z_new - LSE| where extended precision is missing.
    Weights that have underflowed are left out.
    """
    z = cases[:, 0]
    added, shift = _near_partition(z, cases[:, 1, 0])
    new = added[:, None]
    before, after = softmax_weights(z), softmax_weights(np.concatenate([z, new], 1))[:, :-1]
    factor = 1 / (1 + np.exp(shift))
    top = z.max(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        off = np.abs(after / (before * factor[:, None]) - 1).astype(np.float64)
        budget = (top - z) + (np.maximum(top, new) - z) + np.abs(shift.astype(float))[:, None] + 3.0 * z.shape[1] + 20.0
        ratio = off / (U * budget)
    alive = (z > -np.inf) & (after > 1e-290) & (before > 1e-290)
    return np.where(alive, ratio, 0.0).max(1)


def not_strict(weights: Callable[[F64], F64]) -> Margin:
    """Margin: 1 if appending a token within 30 of the log-partition leaves some weight as large as it was, else 0."""

    def margin(cases: F64) -> F64:
        z = cases[:, 0]
        new, _ = _near_partition(z, cases[:, 1, 0])
        before, after = weights(z), weights(np.concatenate([z, new[:, None]], 1))[:, :-1]
        return ((before > 1e-290) & (after >= before)).any(1).astype(float)

    return margin


def largest_weight(weights: Callable[[F64], F64]) -> Margin:
    """Margin: p_max (1 + (n-1) exp(-(M-m))) - 1 in multiples of its rounding budget, (3 W + M - m + 20) u."""

    def margin(cases: F64) -> F64:
        z = cases[:, 0]
        seen = z > -np.inf
        n = seen.sum(1)
        span = z.max(1) - np.where(seen, z, np.inf).min(1)
        excess = weights(z).max(1) * (1.0 + (n - 1) * np.exp(-span)) - 1.0
        return excess / (U * (3.0 * z.shape[1] + span + 20.0))

    return margin


# ---- from searches to findings -------------------------------------------------------------------


def finding(
    found: Found, subject: str, bound: float, method: str, assumptions: str = "met", extra: str = ""
) -> Finding:
    """A finding from a search; the note holds the smallest counterexample, if there is one."""
    note = ""
    if found.broken:
        note = f"smallest counterexample: scores {describe(found.case[0])}{extra}"
    return Finding.certain(
        subject, found.margin, bound, trials=found.cases, method=method, assumptions=assumptions, note=note
    )


def work_nonvanishing(piece: Piece, seed: int) -> list[Finding]:
    """Appended tokens: entmax unmoved, softmax shrunk by the stated factor, and the softmax bound on the top weight."""
    trials, part = piece["trials"], piece["part"]
    few = max(256, trials // 20)
    if part == "softmax":
        with one_thread():
            shrunk = search(softmax_factor, piece.streams(seed, 0), trials, 1.0)
            strict = search(not_strict(softmax_weights), piece.streams(seed, 1), trials, 0.0)
            loose = search(not_strict(lambda z: entmax_weights(z, 1.5)), piece.streams(seed, 2), few, 0.0, rounds=1)
            top = search(largest_weight(softmax_weights), piece.streams(seed, 3), trials, 1.0)
            wrong = search(largest_weight(lambda z: entmax_weights(z, 1.5)), piece.streams(seed, 4), few, 1.0, rounds=1)
        no_softmax = "not met: entmax in place of softmax"
        return [
            finding(shrunk, "softmax, factor", 1.0, "search; error of the factor over its rounding budget"),
            finding(strict, "softmax, strict", 0.0, "search; 1 if a weight does not shrink"),
            finding(loose, "entmax-1.5, strict", 0.0, "search; 1 if a weight does not shrink", no_softmax),
            finding(top, "softmax, top weight", 1.0, "search; excess over the bound, over its rounding budget"),
            finding(wrong, "entmax-1.5, top weight", 1.0, "search; excess over the rounding budget", no_softmax),
        ]
    if part == "exact":
        found = search(exact_change, piece.streams(seed), trials, 0.0, width=6, rounds=1)
        return [finding(found, "sparsemax, rational", 0.0, "search in exact rationals; largest change of a weight")]
    alpha = float(part)
    name = f"entmax-{alpha:g}"
    with one_thread():
        kept = search(appended_change(alpha), piece.streams(seed, 0), trials, 1.0)
        above = search(appended_change(alpha, above=True), piece.streams(seed, 1), few, 1.0, rounds=1)
        soft = search(appended_change(alpha, weights=softmax_weights), piece.streams(seed, 2), few, 1.0, rounds=1)
    return [
        finding(kept, name, 1.0, "search; largest change of a weight, ulp"),
        finding(
            above,
            f"{name}, above",
            1.0,
            "search; ulp",
            "not met: a new token just above the threshold",
            "; first token above",
        ),
        finding(soft, f"softmax for {name}", 1.0, "search; ulp", f"not met: softmax in place of {name}"),
    ]
