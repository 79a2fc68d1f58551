"""What an early token leaves in the last one after L layers, softmax against entmax, against the length.

Source: ASEntmax (arXiv 2506.16640), representational preservation. Two sequences differ in the value of one early token
by a unit vector; layers are attention with a residual connection, x <- x + A x, so the difference of the last token's
representation is a number, the sum over all paths from the early token to the last one.

Logits depend on the key and on which of four query groups a row belongs to, so that softmax needs prefix sums only and
the whole stack is computed for every length at once. For entmax, only rows that the last token reaches through supports
are computed, one after the other.

**The envelope.** With logits in [m, M] a softmax weight is at most exp(M - m) / (i + 1), so the difference is at
most sum_l C(L, l) exp(l (M - m)) c_l(n), with c_l the same for uniform attention without residual: c_0 = 1 at the early
token and 0 elsewhere, c_l(i) the mean of c_(l-1) over the prefix. c_1(n) = 1/n, and every further layer adds a factor
of log n at most; the slope against log n is therefore fitted to the difference divided by that of uniform attention,
which leaves the excess over 1/n for one layer and over 1/n times powers of log n for more.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from scipy import special

from theory_lab.studies.base import Finding, Piece
from theory_lab.studies.rates import Trend, fit_trend
from theory_lab.studies.search import F64

_GROUPS = 4
_ALPHA = 1.5
#: Logit of the needle, the early token, for queries that look for it: above 1 + 1/(alpha - 1), where it alone is left.
_NEEDLE = 3.25
_FROM = 1 << 10
DEPTHS = (1, 2, 4)


def logits(piece: Piece, seed: int, n: int) -> F64:
    """Noise logits, uniform on [-1, 1], of n keys for every query group, shape (groups, n)."""
    streams = piece.streams(seed)
    return np.stack([2.0 * streams[g].uniforms(n) - 1.0 for g in range(_GROUPS)])


def softmax_traces(z: F64, depth: int) -> F64:
    """Difference at every token after ``depth`` softmax layers, if token 0's value differs by one; shape (n,)."""
    weight = np.exp(z - z.max(1, keepdims=True))
    mass = np.cumsum(weight, 1)
    n = z.shape[1]
    group = np.arange(n) % _GROUPS
    trace = np.zeros(n)
    trace[0] = 1.0
    for _ in range(depth):
        mixed = np.empty(n)
        for g in range(_GROUPS):
            at = group == g
            mixed[at] = (np.cumsum(weight[g] * trace) / mass[g])[at]
        trace = trace + mixed
    return trace


def uniform_traces(n: int, depth: int, factor: float = 1.0) -> F64:
    """sum over l >= 1 of C(depth, l) factor^l c_l, at every token; the envelope for factor = exp(M - m)."""
    rank = np.arange(1, n + 1)
    c, total = np.zeros(n), np.zeros(n)
    c[0] = 1.0
    for layer in range(1, depth + 1):
        c = np.cumsum(c) / rank
        total += math.comb(depth, layer) * factor**layer * c
    return total


def entmax_row(z: F64) -> tuple[list[int], F64]:
    """Support and weights of 1.5-entmax of one row; only keys within 2 of the top can be in the support."""
    near = np.flatnonzero(z > z.max() - 2.0)
    x = (z[near] - z.max()) / 2.0
    ordered = -np.sort(-x)
    rank = np.arange(1, len(x) + 1)
    mean = np.cumsum(ordered) / rank
    variance = np.maximum(np.cumsum(ordered**2) / rank - mean**2, 0.0)
    taus = mean - np.sqrt(np.maximum(1.0 / rank - variance, 0.0))
    tau = taus[max(int((taus < ordered).sum()), 1) - 1]
    inside = x > tau
    weights = (x[inside] - tau) ** 2
    return near[inside].tolist(), weights / weights.sum()


def entmax_trace(z: F64, n: int, depth: int, changed: int) -> float:
    """Difference at the last of n tokens after ``depth`` entmax layers, if the value of ``changed`` differs by one."""

    @cache
    def support(row: int) -> tuple[list[int], F64]:
        return entmax_row(z[row % _GROUPS, : row + 1])

    @cache
    def trace(row: int, layer: int) -> float:
        if layer == 0:
            return float(row == changed)
        keys, weights = support(row)
        return trace(row, layer - 1) + sum(w * trace(j, layer - 1) for j, w in zip(keys, weights.tolist(), strict=True))

    return trace(n - 1, depth)


def decay(lengths: list[int], traces: list[float], scale: list[float]) -> Trend:
    """Slope of log(trace / scale) on log n from 2^10 on."""
    kept = [(math.log(n), math.log(t / s)) for n, t, s in zip(lengths, traces, scale, strict=True) if n >= _FROM]
    return fit_trend([x for x, _ in kept], [y for _, y in kept], [0.0] * len(kept))


def work(piece: Piece, seed: int) -> list[Finding]:
    """Both mechanisms on the same logits, and what each needs for the statement to be true of it."""
    lengths: list[int] = piece["lengths"]
    noise = logits(piece, seed, lengths[-1])
    z = noise.copy()
    z[_GROUPS - 1, 0] = _NEEDLE
    at = np.array(lengths) - 1
    factor = math.exp(max(float(row.max() - row.min()) for row in z))
    findings = []
    fits = sum(n >= _FROM for n in lengths) >= 3
    name, ones = f"entmax-{_ALPHA:g}", [1.0] * len(lengths)
    for depth in DEPTHS:
        dense = softmax_traces(z, depth)[at].tolist()
        even = uniform_traces(lengths[-1], depth)[at].tolist()
        sparse = [entmax_trace(z, n, depth, 0) for n in lengths]
        if fits:
            raw = decay(lengths, dense, ones)
            findings += [
                _trend(f"softmax, L = {depth}", decay(lengths, dense, even), 0.05, _EXCESS, len(lengths), exact=0.0)
                if depth > 1
                else _trend(
                    "softmax, L = 1", decay(lengths, dense, even), 0.05, "log-log slope + 1", len(lengths), 0.0
                ),
                _trend(f"{name}, L = {depth}", _negated(decay(lengths, sparse, ones)), 0.01, _LOSS, len(lengths), 0.0),
            ]
            if depth == 1:
                broken = f"not met: softmax in place of {name}"
                findings.append(
                    _trend(f"softmax for {name}, L = 1", _negated(raw), 0.01, _LOSS, len(lengths), 1.0, broken)
                )
        envelope = uniform_traces(lengths[-1], depth, factor)[at].tolist()
        worst = max(d / e - 1.0 for d, e in zip(dense, envelope, strict=True))
        note = f"distance {dense[0]:.3g} at n = {lengths[0]}, {dense[-1]:.3g} at n = {lengths[-1]}"
        findings.append(
            Finding.certain(
                f"softmax envelope, L = {depth}",
                worst,
                0.0,
                length=lengths[-1],
                trials=len(lengths),
                method="distance / envelope - 1, worst length",
                note=note,
            )
        )
    return findings + _controls(noise, z, lengths, name, fits, piece, seed)


_LOSS = "minus the log-log slope of the distance"
_EXCESS = "log-log slope of the distance over that of uniform attention"


def _controls(noise: F64, z: F64, lengths: list[int], name: str, fits: bool, piece: Piece, seed: int) -> list[Finding]:
    """Tokens outside the support, a law that is too narrow, and one that outgrows the early token."""
    findings = []
    last = lengths[-1]
    # Token 5 is noise to every row, and the needle alone supports the last one.
    gone = max(abs(entmax_trace(z, n, depth, 5)) for n in lengths for depth in DEPTHS if n > 6)
    findings.append(
        Finding.certain(
            f"{name}, outside the support",
            gone,
            0.0,
            length=last,
            trials=len(lengths),
            method="largest distance over lengths and depths",
            note="an early token outside the support leaves exactly nothing",
        )
    )
    if not fits:
        return findings
    tall = noise.copy()
    tall[_GROUPS - 1, 0] = 1.0
    narrow = [entmax_trace(tall, n, 1, 0) for n in lengths]
    broken = "not met: the support stays bounded; here the early token tops a narrow law"
    findings.append(
        _trend(
            f"{name}, narrow law",
            _negated(decay(lengths, narrow, [1.0] * len(lengths))),
            0.01,
            _LOSS,
            len(lengths),
            2.0 / 3.0,
            broken,
        )
    )
    wide = special.ndtri((noise[_GROUPS - 1 :] + 1.0) / 2.0).repeat(_GROUPS, 0)
    wide[:, 0] = 2.0
    kept = [entmax_trace(wide, n, 1, 0) for n in lengths]
    note = f"distance {kept[0]:.3g} at n = {lengths[0]}, {kept[-1]:.3g} at n = {last}"
    findings.append(
        Finding.certain(
            f"{name}, gaussian law",
            1.0 - kept[-1] / kept[0],
            0.05,
            length=last,
            trials=len(lengths),
            method="share of the distance that is lost",
            assumptions="not met: the early token stays in the support",
            note=note,
        )
    )
    return findings


def _negated(trend: Trend) -> Trend:
    return Trend(0.0 - trend.slope, trend.standard_error, trend.points)


def _trend(
    subject: str, trend: Trend, bound: float, method: str, trials: int, exact: float, assumptions: str = "met"
) -> Finding:
    return Finding(
        subject,
        bound,
        trend=trend,
        estimate=trend.slope,
        trials=trials,
        method=method,
        exact=exact,
        assumptions=assumptions,
    )
