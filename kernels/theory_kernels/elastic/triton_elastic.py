"""Triton kernels of elastic attention. Imports triton: load this module lazily.

The effective score (``m s``, or ``s + log m``, m = sigmoid(sharpness (s - tau))) is a function of one score and its
row's threshold, so softmax runs online over tiles of keys as in plain attention. The backward has one kernel that owns
rows (dQ, dtau, dsharpness) and one that owns keys (dK, dV), each summing in a fixed order: two runs agree bit for bit.
``chunked.py`` writes the gradients out.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..attention.backward import _narrow_dot
from ..primitives import SIZES, dot, fast_log2, load_rows, narrow, row_block, sequence

# Values of PRUNE.
SOFT, DROP, RENORMALIZE, EXACT = (tl.constexpr(i) for i in range(4))


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def suppressed(s, tau, slope):
    """x = -slope (s - tau) log2 e, and 1 + 2^x, kept finite: the reciprocal of the mask m."""
    x = (slope * LOG2E) * (tau - s)
    return x, 1.0 + tl.exp2(tl.minimum(x, 126.0))


@triton.jit
def log_mask(x, inverse, UPCAST: tl.constexpr):
    """-log2 m of what :func:`suppressed` gives: far below the threshold x itself, where ``inverse`` has been cut."""
    return tl.maximum(fast_log2(inverse, UPCAST), x)


@triton.jit
def effective(s, tau, slope, WEIGHT: tl.constexpr, PRUNE: tl.constexpr, UPCAST: tl.constexpr):
    """The effective score times log2 e."""
    if PRUNE == EXACT:
        return s * LOG2E
    x, inverse = suppressed(s, tau, slope)
    return s * LOG2E - log_mask(x, inverse, UPCAST) if WEIGHT else (s * LOG2E) / inverse


@triton.jit
def _visible(keys, k_len, pos, CAUSAL: tl.constexpr):
    seen = (keys < k_len)[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= pos[:, None])
    return seen


@triton.jit
def _forward_tile(
    acc, top, total, q, K, V, start, k_len, pos, cols, vcols, tau, slope, scale, D: tl.constexpr, DP: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WEIGHT: tl.constexpr, PRUNE: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    k = load_rows(K, start, k_len, cols, D, D, DP, BN, MASKED)
    v = load_rows(V, start, k_len, vcols, E, E, EP, BN, MASKED)
    s = scale * dot(q, tl.trans(k), tl.zeros([BM, BN], tl.float32), PREC, UPCAST)
    y = effective(s, tau[:, None], slope, WEIGHT, PRUNE, UPCAST)
    # Not `>=`: what is no number is kept, and makes its row NaN.
    above = (s < tau[:, None]) == 0
    if MASKED:
        y = tl.where(_visible(start + tl.arange(0, BN), k_len, pos, CAUSAL), y, float("-inf"))
    if PRUNE >= RENORMALIZE:
        y = tl.where(above, y, float("-inf"))
    higher = tl.maximum(top, tl.max(y, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(y - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, 1)
    if PRUNE == DROP:
        p = tl.where(above, p, 0.0)
    acc = acc * shrink[:, None]
    return dot(narrow(p, v.dtype, UPCAST), v, acc, PREC, UPCAST), higher, total


@triton.jit(do_not_specialize=SIZES)
def elastic_forward(
    Q, K, V, TAU, SLOPE, OUT, LSE, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, BLOCKS, scale,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WEIGHT: tl.constexpr, PRUNE: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    _, b, h, g, first, q0, q_len, k0, k_len, off = row_block(
        LAYOUT, N, H, G, MAX_Q, MAX_K, OFFSET, BLOCKS, BM, RAGGED, PACKED
    )
    if first >= q_len:
        return
    row = (b * H + h).to(tl.int64) * T + q0
    at = (b * G + g).to(tl.int64) * S + k0
    rows, cols, vcols = first + tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, EP)
    pos = rows + off
    q = load_rows(Q + row * D, first, q_len, cols, D, D, DP, BM, True)
    tau = tl.load(TAU + row + rows, mask=rows < q_len, other=0.0)
    slope = tl.load(SLOPE + h)
    acc = tl.zeros([BM, EP], tl.float32)
    top = tl.zeros([BM], tl.float32) + float("-inf")
    # A threshold or sharpness that is no number makes its rows NaN, if they see a key.
    last = k_len - 1 + rows * 0
    if CAUSAL:
        last = tl.minimum(last, pos)
    known = tl.where(slope == slope, tau, slope)
    total = tl.where((known == known) | (last < 0), 0.0, float("nan"))
    hi = k_len
    full = k_len // BN
    if CAUSAL:
        hi = tl.minimum(k_len, tl.maximum(tl.minimum(first + BM, q_len) + off, 0))
        full = tl.minimum(full, tl.maximum(first + off + 1, 0) // BN)
    for j in range(full):
        acc, top, total = _forward_tile(
            acc, top, total, q, K + at * D, V + at * E, j * BN, k_len, pos, cols, vcols, tau, slope, scale, D, DP, E,
            EP, BM, BN, WEIGHT, PRUNE, CAUSAL, False, PREC, UPCAST,
        )  # fmt: skip
    for j in tl.range(full, tl.cdiv(hi, BN), num_stages=1):
        acc, top, total = _forward_tile(
            acc, top, total, q, K + at * D, V + at * E, j * BN, k_len, pos, cols, vcols, tau, slope, scale, D, DP, E,
            EP, BM, BN, WEIGHT, PRUNE, CAUSAL, True, PREC, UPCAST,
        )  # fmt: skip
    some = total != 0.0
    safe = tl.where(some, total, 1.0)
    out = acc / safe[:, None]
    inside = (rows < q_len)[:, None] & (vcols < E)[None, :]
    tl.store(OUT + (row + rows)[:, None] * E + vcols[None, :], narrow(out, OUT.dtype.element_ty, UPCAST), mask=inside)
    lse = tl.where(some, LN2 * (tl.where(some, top, 0.0) + tl.log2(safe)), float("inf"))
    tl.store(LSE + row + rows, lse, mask=rows < q_len)


@triton.jit
def _score_gradient(
    s, dp, seen, tau, lse, delta, slope, WEIGHT: tl.constexpr, PRUNE: tl.constexpr, MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The weight of values, ds, and dy times what the derivatives to tau and the sharpness share.

    With bend = s m (1 - m) for the reading "logit" and 1 - m for "weight", dy/ds is m + slope bend or 1 + slope bend,
    dy/dtau = -slope bend and dy/dslope = (s - tau) bend. lse is in units of log 2; tau, lse and delta broadcast.
    """
    if PRUNE == EXACT:
        y = s * LOG2E
        bend, by_s = tl.zeros_like(s), 1.0
    else:
        x, inverse = suppressed(s, tau, slope)
        m = 1.0 / inverse
        if WEIGHT:
            y = s * LOG2E - log_mask(x, inverse, UPCAST)
            bend = 1.0 - m
            by_s = 1.0 + slope * bend
        else:
            y = (s * LOG2E) * m
            bend = s * m * (1.0 - m)
            by_s = m + slope * bend
    above = (s < tau) == 0
    if PRUNE >= RENORMALIZE:
        y = tl.where(above, y, float("-inf"))
    if MASKED:
        y = tl.where(seen, y, float("-inf"))
    p = tl.exp2(y - lse)
    if PRUNE == DROP:
        dp = tl.where(above, dp, 0.0)
    dy = p * (dp - delta)
    if PRUNE == DROP:
        p = tl.where(above, p, 0.0)
    return p, dy * by_s, dy * bend


@triton.jit
def _query_tile(
    dq, dtau, dslope, q, do, K, V, start, k_len, pos, cols, vcols, tau, lse, delta, slope, scale, D: tl.constexpr,
    DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WEIGHT: tl.constexpr,
    PRUNE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    k = load_rows(K, start, k_len, cols, D, D, DP, BN, MASKED)
    v = load_rows(V, start, k_len, vcols, E, E, EP, BN, MASKED)
    s = scale * dot(q, tl.trans(k), tl.zeros([BM, BN], tl.float32), PREC, UPCAST)
    dp = dot(do, tl.trans(v), tl.zeros([BM, BN], tl.float32), PREC, UPCAST)
    seen = _visible(start + tl.arange(0, BN), k_len, pos, CAUSAL)
    _, ds, bent = _score_gradient(
        s, dp, seen, tau[:, None], lse[:, None], delta[:, None], slope, WEIGHT, PRUNE, MASKED, UPCAST
    )
    dtau -= tl.sum(bent, 1)
    dslope += tl.sum(bent * (s - tau[:, None]), 1)
    return _narrow_dot(ds, k, dq, PREC, WIDE, UPCAST), dtau, dslope


@triton.jit(do_not_specialize=SIZES)
def elastic_queries(
    Q, K, V, DO, TAU, SLOPE, LSE, DELTA, DQ, DTAU, DSLOPE, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, BLOCKS, scale,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WEIGHT: tl.constexpr, PRUNE: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    _, b, h, g, first, q0, q_len, k0, k_len, off = row_block(
        LAYOUT, N, H, G, MAX_Q, MAX_K, OFFSET, BLOCKS, BM, RAGGED, PACKED
    )
    if first >= q_len:
        return
    row = (b * H + h).to(tl.int64) * T + q0
    at = (b * G + g).to(tl.int64) * S + k0
    rows, cols, vcols = first + tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, EP)
    pos = rows + off
    there = rows < q_len
    q = load_rows(Q + row * D, first, q_len, cols, D, D, DP, BM, True)
    do = load_rows(DO + row * E, first, q_len, vcols, E, E, EP, BM, True)
    tau = tl.load(TAU + row + rows, mask=there, other=0.0)
    lse = tl.load(LSE + row + rows, mask=there, other=float("inf")) * LOG2E
    delta = tl.load(DELTA + row + rows, mask=there, other=0.0)
    slope = tl.load(SLOPE + h)
    dq = tl.zeros([BM, DP], tl.float32)
    dtau, dslope = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    hi = k_len
    full = k_len // BN
    if CAUSAL:
        hi = tl.minimum(k_len, tl.maximum(tl.minimum(first + BM, q_len) + off, 0))
        full = tl.minimum(full, tl.maximum(first + off + 1, 0) // BN)
    for j in range(full):
        dq, dtau, dslope = _query_tile(
            dq, dtau, dslope, q, do, K + at * D, V + at * E, j * BN, k_len, pos, cols, vcols, tau, lse, delta, slope,
            scale, D, DP, E, EP, BM, BN, WEIGHT, PRUNE, CAUSAL, False, PREC, WIDE, UPCAST,
        )  # fmt: skip
    for j in tl.range(full, tl.cdiv(hi, BN), num_stages=1):
        dq, dtau, dslope = _query_tile(
            dq, dtau, dslope, q, do, K + at * D, V + at * E, j * BN, k_len, pos, cols, vcols, tau, lse, delta, slope,
            scale, D, DP, E, EP, BM, BN, WEIGHT, PRUNE, CAUSAL, True, PREC, WIDE, UPCAST,
        )  # fmt: skip
    inside = there[:, None] & (cols < D)[None, :]
    tl.store(
        DQ + (row + rows)[:, None] * D + cols[None, :], narrow(scale * dq, DQ.dtype.element_ty, UPCAST), mask=inside
    )
    tl.store(DTAU + row + rows, slope * dtau, mask=there)
    tl.store(DSLOPE + row + rows, dslope, mask=there)


@triton.jit(do_not_specialize=SIZES)
def elastic_keys(
    Q, K, V, DO, TAU, SLOPE, LSE, DELTA, DK, DV, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, BLOCKS, scale,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WEIGHT: tl.constexpr, PRUNE: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Everything transposed, (keys, rows), so that no tile has to change its layout in registers."""
    pid = tl.program_id(0)
    block = pid % BLOCKS
    ng = pid // BLOCKS
    n, g = ng // G, ng % G
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    first = block * BN
    if first >= k_len:
        return
    b = n * 0 if PACKED else n
    at = (b * G + g).to(tl.int64) * S + k0
    keys, cols, vcols = first + tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, EP)
    k = load_rows(K + at * D, first, k_len, cols, D, D, DP, BN, True)
    v = load_rows(V + at * E, first, k_len, vcols, E, E, EP, BN, True)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, EP], tl.float32)
    stop = tl.cdiv(q_len, BM)
    low = n * 0
    if CAUSAL:
        low = tl.minimum(tl.maximum(first - off, 0) // BM, stop)
    for r in range(H // G):
        h = g * (H // G) + r
        row = (b * H + h).to(tl.int64) * T + q0
        slope = tl.load(SLOPE + h)
        for i in range(low, stop):
            rows = i * BM + tl.arange(0, BM)
            there = rows < q_len
            q = load_rows(Q + row * D, i * BM, q_len, cols, D, D, DP, BM, True)
            do = load_rows(DO + row * E, i * BM, q_len, vcols, E, E, EP, BM, True)
            tau = tl.load(TAU + row + rows, mask=there, other=0.0)
            # An infinite sum keeps rows that do not exist, or see nothing, out.
            lse = tl.load(LSE + row + rows, mask=there, other=float("inf")) * LOG2E
            delta = tl.load(DELTA + row + rows, mask=there, other=0.0)
            s = scale * dot(k, tl.trans(q), tl.zeros([BN, BM], tl.float32), PREC, UPCAST)
            dp = dot(v, tl.trans(do), tl.zeros([BN, BM], tl.float32), PREC, UPCAST)
            seen = (keys < k_len)[:, None]
            if CAUSAL:
                seen = seen & (keys[:, None] <= (rows + off)[None, :])
            p, ds, _ = _score_gradient(
                s, dp, seen, tau[None, :], lse[None, :], delta[None, :], slope, WEIGHT, PRUNE, True, UPCAST
            )
            dk = _narrow_dot(ds, q, dk, PREC, WIDE, UPCAST)
            dv = _narrow_dot(p, do, dv, PREC, WIDE, UPCAST)
    there = (keys < k_len)[:, None]
    tl.store(
        DK + (at + keys)[:, None] * D + cols[None, :],
        narrow(scale * dk, DK.dtype.element_ty, UPCAST),
        mask=there & (cols < D)[None, :],
    )
    tl.store(
        DV + (at + keys)[:, None] * E + vcols[None, :],
        narrow(dv, DV.dtype.element_ty, UPCAST),
        mask=there & (vcols < E)[None, :],
    )
