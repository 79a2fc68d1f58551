"""Triton backward kernels. Imports triton: load this module lazily.

With p the weights, s = p^(2 - alpha) on their support, g_ij = <dO_i, v_j>, factor c_i (derived in kernels/README.md):

    dV = P^T dO,   dz_ij = s_ij (g_ij - delta_i),   delta_i = sum_j s_ij g_ij / sum_j s_ij = <dO_i, o'_i>,
    dQ = c dz K,   dK = (c dz)^T Q,   dc_i = sum_j dz_ij <q_i, k_j>,
    dalpha = -sum_ij p_ij psi_ij (g_ij - delta_i),   psi = (e^y - 1 - y) / (alpha - 1)^2,   y = -(alpha - 1) log p,

where o' = sum_j s_ij v_j / sum_j s_ij was kept by the forward. One kernel owns query rows, one owns keys; each sums in
a fixed order and nothing is added atomically, so two runs agree bit for bit.
"""

# ruff: noqa: SIM108 - branches on compile-time flags are no expressions
# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import SIZES, dot, head_at, load_rows, narrow, row_block, sequence
from .forward import load_items, numbers, products
from .lists import last_keys, list_of, seen_by, sees
from .weights import eighths, log_weights, narrow_dot, weights

# Knowing that a length is a multiple of 16 saves the key kernel registers.
_KEY_SIZES = [name for name in SIZES if name not in ("MAX_Q", "MAX_K")]


@triton.jit
def _shifted(raw, factor, shift, state, eps, seen, MODE: tl.constexpr, MASKED: tl.constexpr):
    """Weights and slopes; ``shift`` is -anchor factor, to which the state is added where it can be (MODE 1, 2)."""
    if MODE == 0:
        return weights(raw * factor + shift, state, eps, seen, MODE, MASKED)
    else:
        return weights(raw * factor, shift, eps, seen, MODE, MASKED)


@triton.jit
def _alpha_terms(a, state, eps, seen, MODE: tl.constexpr):
    """p psi; 0 outside the support."""
    if MODE == 0:
        log_p, alive = log_weights(a, state, eps)
        log_p *= 0.6931471805599453
    else:
        y = a + state
        alive = y > 0.0
        log_p = tl.log(tl.where(alive, y, 1.0)) / eps
    alive = alive & seen
    log_p = tl.where(alive, log_p, 0.0)
    p, y = tl.exp(log_p), -eps * log_p
    series = log_p * log_p * p * (
        0.5 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y * (1 / 720 + y * (1 / 5040 + y / 40320)))))
    )  # fmt: skip
    far = (tl.exp((1.0 - eps) * log_p) - p - p * y) / (eps * eps)
    return tl.where(alive, tl.where(y < 0.5, series, far), 0.0)


@triton.jit
def _query_tile(
    dq, dfactor, dalpha, q, do, K, V, items, start, k_len, cols, vcols, kt, vt, anchor, factor, shift, state, delta,
    eps, last, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MODE: tl.constexpr, LISTED: tl.constexpr, MASKED: tl.constexpr, TEMPERED: tl.constexpr, ALPHA: tl.constexpr,
    PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    keys = numbers(items, start, BN, LISTED)
    seen = keys[None, :] <= last[:, None]
    raw, k = products(q, K, start, keys, k_len, cols, kt, D, DP, BN, LISTED, MASKED, PREC, UPCAST)
    _, s = _shifted(raw, factor[:, None], shift[:, None], state[:, None], eps, seen, MODE, MASKED)
    v = load_items(V, start, keys, k_len, vcols, vt, E, EP, BN, LISTED, MASKED)
    centered = dot(do, tl.trans(v), tl.zeros([BM, BN], tl.float32), PREC, UPCAST) - delta[:, None]
    dz = s * centered
    dq = narrow_dot(dz, k, dq, PREC, WIDE, UPCAST)
    if TEMPERED:
        # The dz of a row sum to 0, so the products may stay relative to the anchor.
        dfactor += eighths(tl.where(s > 0.0, dz * (raw - anchor[:, None]), 0.0))
    if ALPHA:
        a = (raw - anchor[:, None]) * factor[:, None]
        dalpha -= eighths(_alpha_terms(a, state[:, None], eps, seen, MODE) * centered)
    return dq, dfactor, dalpha


@triton.jit(do_not_specialize=SIZES)
def query_kernel(
    Q, K, V, DO, TILTED, FACTOR, EPS, ROWS, ITEMS, COUNTS, IDENTITY, DQ, PAIRS, MORE, HOT, DFACTOR, DALPHA, LAYOUT, N,
    H, G, T, S, MAX_Q, MAX_K, OFFSET, NL, capacity, plane, BLOCKS, qb, qh, qt, kb, kh, kt, vb, vh, vt, fb, fh, ft,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    B: tl.constexpr, MODE: tl.constexpr, LISTED: tl.constexpr, TEMPERED: tl.constexpr,
    ALPHA: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    nh, b, h, g, first, q0, q_len, k0, k_len, off = row_block(
        LAYOUT, N, H, G, MAX_Q, MAX_K, OFFSET, BLOCKS, BM, RAGGED, PACKED
    )
    if first >= q_len:
        return
    rows = first + tl.arange(0, BM)
    exists = rows < q_len
    last = last_keys(rows, off, q_len, k_len, CAUSAL)
    cols, vcols = tl.arange(0, DP), tl.arange(0, EP)
    q_at = head_at(Q, b, h, q0, qb, qh, qt)
    k_at = head_at(K, b, g, k0, kb, kh, kt)
    v_at = head_at(V, b, g, k0, vb, vh, vt)
    row = (b * H + h).to(tl.int64) * T + q0
    q = load_rows(q_at, first, q_len, cols, qt, D, DP, BM, True)
    do = load_rows(DO + row * E, first, q_len, vcols, E, E, EP, BM, True)
    tilted = load_rows(TILTED + row * E, first, q_len, vcols, E, E, EP, BM, True)
    delta = tl.sum(do.to(tl.float32) * tilted.to(tl.float32), 1)
    eps = tl.load(EPS + h)
    given = tl.load(FACTOR + b * fb + h * fh + (q0 + rows) * ft, mask=exists, other=0.0)
    limit = tl.load(ROWS + 3 * plane + row + rows, mask=exists, other=float("inf"))
    factor = tl.minimum(given * eps, limit)
    hot = limit < float("inf")
    given = tl.where(hot, factor / eps, given)
    if tl.max(hot.to(tl.int32), 0) > 0:
        # For the kernel that owns keys: a factor of its own for each row.
        tl.store(HOT + nh // H * G + g, 1)
    anchor = tl.load(ROWS + row + rows, mask=exists, other=0.0)
    state = tl.load(ROWS + plane + row + rows, mask=exists, other=1.0)
    # For the kernel that owns keys, which gathers them.
    shift = -anchor * factor
    if MODE != 0:
        shift += state
    pair = PAIRS + (row + rows) * 2
    tl.store(pair, shift, mask=exists)
    tl.store(pair + 1, delta, mask=exists)
    pair = MORE + (row + rows) * 2
    tl.store(pair, given, mask=exists)
    tl.store(pair + 1, state, mask=exists)
    every, some = sees(first, BM, off, q_len, k_len, CAUSAL)
    items, begin, even, end = ITEMS, 0, every // BN * BN, some
    if LISTED:
        every, late = sees(first // B * B, B, off, q_len, k_len, CAUSAL)
        at = nh.to(tl.int64) * NL + first // B
        items, begin, even, end = list_of(ITEMS, COUNTS, IDENTITY, at, capacity, 0, even, some, late - every, BN)
    # NaN from the start where a row is NaN: it need not meet a key here.
    zero = tl.where(state == state, 0.0, float("nan"))[:, None]
    dq = tl.zeros([BM, DP], tl.float32) + zero
    dfactor, dalpha = tl.zeros([BM, 8], tl.float32) + zero, tl.zeros([BM, 8], tl.float32) + zero
    for start in range(begin, even, BN):
        dq, dfactor, dalpha = _query_tile(
            dq, dfactor, dalpha, q, do, k_at, v_at, items, start, k_len, cols, vcols, kt, vt, anchor, factor, shift,
            state, delta, eps, last, D, DP, E, EP, BM, BN, MODE, LISTED, False, TEMPERED, ALPHA, PREC, WIDE, UPCAST,
        )  # fmt: skip
    for start in range(even, end, BN):
        dq, dfactor, dalpha = _query_tile(
            dq, dfactor, dalpha, q, do, k_at, v_at, items, start, k_len, cols, vcols, kt, vt, anchor, factor, shift,
            state, delta, eps, last, D, DP, E, EP, BM, BN, MODE, LISTED, True, TEMPERED, ALPHA, PREC, WIDE, UPCAST,
        )  # fmt: skip
    dq = dq * given[:, None]
    inside = exists[:, None] & (cols < D)[None, :]
    tl.store(DQ + (row + rows)[:, None] * D + cols[None, :], narrow(dq, DQ.dtype.element_ty, UPCAST), mask=inside)
    if TEMPERED:
        tl.store(DFACTOR + row + rows, tl.sum(dfactor, 1), mask=exists)
    if ALPHA:
        tl.store(DALPHA + row + rows, tl.sum(dalpha, 1), mask=exists)


@triton.jit
def _key_tile(
    dk, dv, k, v, Q, DO, PAIRS, MORE, items, start, q_len, off, keys, cols, vcols, qt, given, eps, D: tl.constexpr,
    DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr,
    LISTED: tl.constexpr, MASKED: tl.constexpr, ROWWISE: tl.constexpr, CAUSAL: tl.constexpr, PREC: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Everything transposed, (keys, rows), so that no tile has to change its layout in registers."""
    rows = numbers(items, start, BM, LISTED)
    safe = tl.minimum(rows, q_len - 1) if MASKED else rows
    # What rows have comes in pairs: two loads of single numbers would be repeated by every thread.
    two = safe[:, None] * 2 + tl.arange(0, 2)[None, :]
    shift, delta = tl.split(tl.load(PAIRS + two))
    state = shift
    factor = given * eps
    if ROWWISE:
        given, state = tl.split(tl.load(MORE + two))
        given, state = given[None, :], state
        factor = given * eps
    q = load_items(Q, start, rows, q_len, cols, qt, D, DP, BM, LISTED, MASKED)
    do = load_items(DO, start, rows, q_len, vcols, E, E, EP, BM, LISTED, MASKED)
    raw = dot(k, tl.trans(q), tl.zeros([BN, BM], tl.float32), PREC, UPCAST)
    # Keys past the end have zero rows, but their gradient rows are never stored, so they need no mask.
    if CAUSAL:
        seen = keys[:, None] <= tl.where(rows < q_len, rows + off, -1)[None, :]
    else:
        seen = (rows < q_len)[None, :]
    p, s = _shifted(raw, factor, shift[None, :], state[None, :], eps, seen, MODE, MASKED)
    dv = narrow_dot(p, do, dv, PREC, WIDE, UPCAST)
    centered = dot(v, tl.trans(do), tl.zeros([BN, BM], tl.float32), PREC, UPCAST) - delta[None, :]
    return narrow_dot(s * centered * given, q, dk, PREC, WIDE, UPCAST), dv


@triton.jit(do_not_specialize=_KEY_SIZES)
def key_kernel(
    Q, K, V, DO, PAIRS, MORE, HOT, FACTOR, EPS, ITEMS, COUNTS, IDENTITY, DK, DV, LAYOUT, N, H, G, T, S, MAX_Q,
    MAX_K, OFFSET, NL, capacity, plane, BLOCKS, qb, qh, qt, kb, kh, kt, vb, vh, vt, fb, fh, ft, D: tl.constexpr,
    DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, B: tl.constexpr,
    MODE: tl.constexpr, LISTED: tl.constexpr, ROWWISE: tl.constexpr, GATED: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """GATED: of two launches, the one with ROWWISE is for key heads with a row whose factor has a limit."""
    # The first keys are seen by the most rows, so they come first.
    ng, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    n, g = ng // G, ng % G
    if GATED and (tl.load(HOT + ng) > 0) != ROWWISE:
        return
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    first = block * BN
    if first >= k_len:
        return
    b = n * 0 if PACKED else n
    keys = first + tl.arange(0, BN)
    cols, vcols = tl.arange(0, DP), tl.arange(0, EP)
    k_at = head_at(K, b, g, k0, kb, kh, kt)
    v_at = head_at(V, b, g, k0, vb, vh, vt)
    k = load_rows(k_at, first, k_len, cols, kt, D, DP, BN, True)
    v = load_rows(v_at, first, k_len, vcols, vt, E, EP, BN, True)
    dk, dv = tl.zeros([BN, DP], tl.float32), tl.zeros([BN, EP], tl.float32)
    some, _ = seen_by(first, BN, off, q_len, CAUSAL)
    listed_some, every = seen_by(first // B * B, B, off, q_len, CAUSAL)
    for r in range(H // G):
        h = g * (H // G) + r
        eps = tl.load(EPS + h)
        q_at = head_at(Q, b, h, q0, qb, qh, qt)
        row = (b * H + h).to(tl.int64) * T + q0
        given = tl.load(FACTOR + b * fb + h * fh)
        items, begin, even, end = ITEMS, some // BM * BM, some // BM * BM, q_len
        if LISTED:
            at = (n * H + h).to(tl.int64) * NL + first // B
            items, begin, even, end = list_of(
                ITEMS, COUNTS, IDENTITY, at, capacity, begin, even, end, every - listed_some, BM
            )
        for start in range(begin, even, BM):
            dk, dv = _key_tile(
                dk, dv, k, v, q_at, DO + row * E, PAIRS + row * 2, MORE + row * 2, items, start, q_len, off, keys, cols,
                vcols, qt, given, eps, D, DP, E, EP, BM, BN, MODE, LISTED, False, ROWWISE, CAUSAL, PREC, WIDE, UPCAST,
            )  # fmt: skip
        for start in range(even, end, BM):
            dk, dv = _key_tile(
                dk, dv, k, v, q_at, DO + row * E, PAIRS + row * 2, MORE + row * 2, items, start, q_len, off, keys, cols,
                vcols, qt, given, eps, D, DP, E, EP, BM, BN, MODE, LISTED, True, ROWWISE, CAUSAL, PREC, WIDE, UPCAST,
            )  # fmt: skip
    k_row = (b * G + g).to(tl.int64) * S + k0
    at = (k_row + keys)[:, None]
    inside = (keys < k_len)[:, None]
    tl.store(DK + at * D + cols[None, :], narrow(dk, DK.dtype.element_ty, UPCAST), mask=inside & (cols < D)[None, :])
    tl.store(DV + at * E + vcols[None, :], narrow(dv, DV.dtype.element_ty, UPCAST), mask=inside & (vcols < E)[None, :])
