"""Triton backward kernels. Imports triton: load this module lazily.

With x_ij = max(s_ij - tau_i, 0), w_ij = x_ij^p and dP = dO V^T (kernels/README.md derives this):

    dV = W^T dO,   dS = dP * p x^(p - 1),   dQ = dS K,   dK = dS^T Q,   dtau_i = -sum_j dS_ij.

One kernel owns query rows (dQ, dtau, dlambda), one owns keys (dK, dV); each sums in a fixed order and
nothing is added atomically, so two runs agree bit for bit.
"""

# ruff: noqa: SIM102 - branches on compile-time flags stay apart from branches on data
# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import (
    SIZES,
    bit_count,
    dot,
    first_bit,
    gather_rows,
    higher,
    live_words,
    load_rows,
    narrow,
    rectified_power,
    rectified_slope,
    sequence,
)
from .forward import excess
from .lists import items, listed

# Knowing that a length is a multiple of 16 saves the key kernel a third of its spilled registers.
_KEY_SIZES = [name for name in SIZES if name not in ("MAX_Q", "MAX_K")]


@triton.jit
def _through_norm(grad, unit, inverse):
    """Gradient of x for y = x / |x|: (g - y <y, g>) / |x|."""
    y = unit.to(tl.float32)
    return (grad - y * tl.sum(y * grad, 1)[:, None]) * inverse[:, None]


@triton.jit
def _narrow_dot(a, b, acc, PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a @ b with the float32 tile ``a`` rounded to b's dtype (or b widened, for float16)."""
    if WIDE:
        return dot(a, b.to(tl.float32), acc, PREC, UPCAST)
    return dot(narrow(a, b.dtype, UPCAST), b, acc, PREC, UPCAST)


@triton.jit
def _query_tile(
    dq1, dq2, dtau, dlam, q1, q2, do, K1, K2, V, start, k_len, cols, vcols, tau, pos, lam, stride_v,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, VIEWS: tl.constexpr, POWER: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    GATHER: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    x, k = excess(q1, K1, start, k_len, cols, tau, pos, D, DP, BN, CAUSAL, MASKED, GATHER, False, PREC, UPCAST)
    if GATHER:
        v = gather_rows(V, start, start < k_len, vcols, stride_v, E, EP)
    else:
        v = load_rows(V, start, k_len, vcols, stride_v, E, EP, BN, MASKED)
    dp = dot(do, tl.trans(v), tl.zeros([BM, BN], tl.float32), PREC, UPCAST)
    ds = dp * rectified_slope(x, POWER)
    dq1 = _narrow_dot(ds, k, dq1, PREC, WIDE, UPCAST)
    dtau -= tl.sum(ds, 1)
    if VIEWS == 2:
        x, k = excess(q2, K2, start, k_len, cols, tau, pos, D, DP, BN, CAUSAL, MASKED, GATHER, False, PREC, UPCAST)
        dlam -= tl.sum(dp * rectified_power(x, POWER), 1)
        ds = -lam * dp * rectified_slope(x, POWER)
        dq2 = _narrow_dot(ds, k, dq2, PREC, WIDE, UPCAST)
        dtau -= tl.sum(ds, 1)
    return dq1, dq2, dtau, dlam


@triton.jit(do_not_specialize=SIZES)
def query_kernel(
    Q1, K1, Q2, K2, V, DO, TAU, LAM, INV1, INV2, DQ1, DQ2, DTAU, DLAM, WORDS, LISTS, PLACES, PATHS, LAYOUT,
    N, H, G, T, S, MAX_Q, MAX_K, OFFSET, NI, NW, NL, capacity, BLOCKS, tau_b, tau_h, vb, vh, vs,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, VIEWS: tl.constexpr, POWER: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, PACKED: tl.constexpr, PATH: tl.constexpr, NORMALIZE: tl.constexpr,
    GATE: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    nh = pid // BLOCKS
    block = BLOCKS - 1 - pid % BLOCKS
    n, h = nh // H, nh % H
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    first = block * BM
    if first >= q_len:
        return
    if GATE:
        if tl.load(PATHS + nh) != PATH:
            return
    b = n * 0 if PACKED else n
    kh = b * G + h // (H // G)
    q_row = (b * H + h).to(tl.int64) * T + q0
    k_at = (kh.to(tl.int64) * S + k0) * D
    rows = first + tl.arange(0, BM)
    pos = rows + off
    cols, vcols = tl.arange(0, DP), tl.arange(0, EP)
    q1 = load_rows(Q1 + q_row * D, first, q_len, cols, D, D, DP, BM, True)
    do = load_rows(DO + q_row * E, first, q_len, vcols, E, E, EP, BM, True)
    q2 = q1
    lam = 0.0
    if VIEWS == 2:
        q2 = load_rows(Q2 + q_row * D, first, q_len, cols, D, D, DP, BM, True)
        lam = tl.load(LAM + h)
    tau = tl.load(TAU + b * tau_b + h * tau_h + q0 + rows, mask=rows < q_len, other=float("inf"))
    v_at = V + b.to(tl.int64) * vb + (h // (H // G)).to(tl.int64) * vh + k0.to(tl.int64) * vs
    dq1 = tl.zeros([BM, DP], tl.float32)
    dq2 = tl.zeros([BM, DP], tl.float32) if VIEWS == 2 else 0.0
    dtau = tl.zeros([BM], tl.float32)
    dlam = tl.zeros([BM], tl.float32)
    hi = k_len
    full = k_len // BN
    if CAUSAL:
        hi = tl.minimum(k_len, tl.maximum(tl.minimum(first + BM, q_len) + off, 0))
        full = tl.minimum(full, tl.maximum(first + off + 1, 0) // BN)
    if PATH == 0:
        at = WORDS + (nh.to(tl.int64) * NI + block) * NW
        words = tl.cdiv(tl.cdiv(hi, BN), 32)
        for chunk in range(0, words, 32):
            live = live_words(at, chunk, words)
            for _ in range(bit_count(live)):
                w = chunk + first_bit(live)
                live = live & (live - 1)
                word = tl.load(at + w)
                for _ in range(bit_count(word)):
                    key = (w * 32 + first_bit(word)) * BN
                    word = word & (word - 1)
                    dq1, dq2, dtau, dlam = _query_tile(
                        dq1, dq2, dtau, dlam, q1, q2, do, K1 + k_at, K2 + k_at, v_at, key, k_len, cols, vcols,
                        tau, pos, lam, vs, D, DP, E, EP, BM, BN, VIEWS, POWER, CAUSAL, True, False, PREC, WIDE,
                        UPCAST,
                    )  # fmt: skip
    elif PATH == 1:
        at, count = listed(LISTS, PLACES, nh, block, N * H, NL, capacity)
        for start in range(0, count, BN):
            keys = items(at, start, count, BN)
            dq1, dq2, dtau, dlam = _query_tile(
                dq1, dq2, dtau, dlam, q1, q2, do, K1 + k_at, K2 + k_at, v_at, keys, k_len, cols, vcols,
                tau, pos, lam, vs, D, DP, E, EP, BM, BN, VIEWS, POWER, CAUSAL, True, True, PREC, WIDE,
                UPCAST,
            )  # fmt: skip
    else:
        for j in range(full):
            dq1, dq2, dtau, dlam = _query_tile(
                dq1, dq2, dtau, dlam, q1, q2, do, K1 + k_at, K2 + k_at, v_at, j * BN, k_len, cols, vcols, tau,
                pos, lam, vs, D, DP, E, EP, BM, BN, VIEWS, POWER, CAUSAL, False, False, PREC, WIDE, UPCAST,
            )  # fmt: skip
        for j in tl.range(full, tl.cdiv(hi, BN), num_stages=1):
            dq1, dq2, dtau, dlam = _query_tile(
                dq1, dq2, dtau, dlam, q1, q2, do, K1 + k_at, K2 + k_at, v_at, j * BN, k_len, cols, vcols, tau,
                pos, lam, vs, D, DP, E, EP, BM, BN, VIEWS, POWER, CAUSAL, True, False, PREC, WIDE, UPCAST,
            )  # fmt: skip
    inside = (rows < q_len)[:, None] & (cols < D)[None, :]
    out_at = (q_row + rows)[:, None] * D + cols[None, :]
    if NORMALIZE:
        inverse = tl.load(INV1 + q_row + rows, mask=rows < q_len, other=0.0)
        dq1 = _through_norm(dq1, q1, inverse)
    tl.store(DQ1 + out_at, narrow(dq1, DQ1.dtype.element_ty, UPCAST), mask=inside)
    tl.store(DTAU + q_row + rows, dtau, mask=rows < q_len)
    if VIEWS == 2:
        if NORMALIZE:
            inverse = tl.load(INV2 + q_row + rows, mask=rows < q_len, other=0.0)
            dq2 = _through_norm(dq2, q2, inverse)
        tl.store(DQ2 + out_at, narrow(dq2, DQ2.dtype.element_ty, UPCAST), mask=inside)
        tl.store(DLAM + q_row + rows, dlam, mask=rows < q_len)


@triton.jit
def _key_tile(
    dk1, dk2, dv, k1, k2, v, Q1, Q2, DO, TAU, start, q_len, off, k_len, keys, cols, vcols, lam,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, VIEWS: tl.constexpr, POWER: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    GATHER: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Everything transposed, (keys, rows), so that no tile has to change its layout in registers.

    ``start`` is the first row, or (GATHER) the index of each.
    """
    rows = start if GATHER else start + tl.arange(0, BM)
    # An infinite threshold keeps rows that do not exist out of the sums.
    tau = tl.load(TAU + rows, mask=rows < q_len, other=float("inf"))
    if GATHER:
        q = gather_rows(Q1, rows, rows < q_len, cols, D, D, DP)
        do = gather_rows(DO, rows, rows < q_len, vcols, E, E, EP)
    else:
        q = load_rows(Q1, start, q_len, cols, D, D, DP, BM, MASKED)
        do = load_rows(DO, start, q_len, vcols, E, E, EP, BM, MASKED)
    dp = dot(v, tl.trans(do), tl.zeros([BN, BM], tl.float32), PREC, UPCAST)
    x = dot(k1, tl.trans(q), tl.zeros([BN, BM], tl.float32), PREC, UPCAST) - tau[None, :]
    if MASKED:
        seen = (keys < k_len)[:, None]
        if CAUSAL:
            seen = seen & (keys[:, None] <= (rows + off)[None, :])
        x = tl.where(seen, x, 0.0)
    x = higher(x, 0.0)
    w = rectified_power(x, POWER)
    dk1 = _narrow_dot(dp * rectified_slope(x, POWER), q, dk1, PREC, WIDE, UPCAST)
    if VIEWS == 2:
        if GATHER:
            q = gather_rows(Q2, rows, rows < q_len, cols, D, D, DP)
        else:
            q = load_rows(Q2, start, q_len, cols, D, D, DP, BM, MASKED)
        x = dot(k2, tl.trans(q), tl.zeros([BN, BM], tl.float32), PREC, UPCAST) - tau[None, :]
        if MASKED:
            x = tl.where(seen, x, 0.0)
        x = higher(x, 0.0)
        w -= lam * rectified_power(x, POWER)
        dk2 = _narrow_dot(-lam * dp * rectified_slope(x, POWER), q, dk2, PREC, WIDE, UPCAST)
    dv = _narrow_dot(w, do, dv, PREC, WIDE, UPCAST)
    return dk1, dk2, dv


@triton.jit(do_not_specialize=_KEY_SIZES)
def key_kernel(
    Q1, K1, Q2, K2, V, DO, TAU, LAM, INV1, INV2, DK1, DK2, DV, WORDS, LISTS, PLACES, PATHS, LAYOUT,
    N, H, G, T, S, MAX_Q, MAX_K, OFFSET, NJ, NIW, NL, capacity, BLOCKS, tau_b, tau_h, vb, vh, vs,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, VIEWS: tl.constexpr, POWER: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, PACKED: tl.constexpr, PATH: tl.constexpr, NORMALIZE: tl.constexpr,
    GATE: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # The first keys are seen by the most rows, so they come first.
    block = pid % BLOCKS
    ng = pid // BLOCKS
    n, g = ng // G, ng % G
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    first = block * BN
    if first >= k_len:
        return
    if GATE:
        # The heads of a group share dK and dV, so they take one path; all give the same sums.
        if tl.load(PATHS + N * H + n * G + g) != PATH:
            return
    b = n * 0 if PACKED else n
    k_row = (b * G + g).to(tl.int64) * S + k0
    keys = first + tl.arange(0, BN)
    cols, vcols = tl.arange(0, DP), tl.arange(0, EP)
    k1 = load_rows(K1 + k_row * D, first, k_len, cols, D, D, DP, BN, True)
    k2 = load_rows(K2 + k_row * D, first, k_len, cols, D, D, DP, BN, True) if VIEWS == 2 else k1
    v_at = V + b.to(tl.int64) * vb + g.to(tl.int64) * vh + k0.to(tl.int64) * vs
    v = load_rows(v_at, first, k_len, vcols, vs, E, EP, BN, True)
    dk1 = tl.zeros([BN, DP], tl.float32)
    dk2 = tl.zeros([BN, DP], tl.float32) if VIEWS == 2 else 0.0
    dv = tl.zeros([BN, EP], tl.float32)
    stop = tl.cdiv(q_len, BM)
    low = n * 0
    if CAUSAL:
        low = tl.minimum(tl.maximum(first - off, 0) // BM, stop)
    # Keys past the end have zero rows, but their gradient rows are never stored, so they need no mask.
    for r in range(H // G):
        h = g * (H // G) + r
        q_row = (b * H + h).to(tl.int64) * T + q0
        q1_at, q2_at, do_at = Q1 + q_row * D, Q2 + q_row * D, DO + q_row * E
        tau_at = TAU + b * tau_b + h * tau_h + q0
        lam = 0.0
        if VIEWS == 2:
            lam = tl.load(LAM + h)
        if PATH == 0:
            at = WORDS + ((n * H + h).to(tl.int64) * NJ + block) * NIW
            for chunk in range(0, tl.cdiv(stop, 32), 32):
                live = live_words(at, chunk, tl.cdiv(stop, 32))
                for _ in range(bit_count(live)):
                    w = chunk + first_bit(live)
                    live = live & (live - 1)
                    word = tl.load(at + w)
                    for _ in range(bit_count(word)):
                        start = (w * 32 + first_bit(word)) * BM
                        word = word & (word - 1)
                        dk1, dk2, dv = _key_tile(
                            dk1, dk2, dv, k1, k2, v, q1_at, q2_at, do_at, tau_at, start, q_len, off, k_len, keys,
                            cols, vcols, lam, D, DP, E, EP, BM, BN, VIEWS, POWER, CAUSAL, True, False, PREC, WIDE,
                            UPCAST,
                        )  # fmt: skip
        elif PATH == 1:
            at, count = listed(LISTS, PLACES, n * H + h, block, N * H, NL, capacity)
            for start in range(0, count, BM):
                rows = items(at, start, count, BM)
                dk1, dk2, dv = _key_tile(
                    dk1, dk2, dv, k1, k2, v, q1_at, q2_at, do_at, tau_at, rows, q_len, off, k_len, keys,
                    cols, vcols, lam, D, DP, E, EP, BM, BN, VIEWS, POWER, CAUSAL, True, True, PREC, WIDE,
                    UPCAST,
                )  # fmt: skip
        else:
            for i in range(low, stop):
                dk1, dk2, dv = _key_tile(
                    dk1, dk2, dv, k1, k2, v, q1_at, q2_at, do_at, tau_at, i * BM, q_len, off, k_len, keys,
                    cols, vcols, lam, D, DP, E, EP, BM, BN, VIEWS, POWER, CAUSAL, True, False, PREC, WIDE, UPCAST,
                )  # fmt: skip
    inside = (keys < k_len)[:, None] & (cols < D)[None, :]
    out_at = (k_row + keys)[:, None] * D + cols[None, :]
    if NORMALIZE:
        dk1 = _through_norm(dk1, k1, tl.load(INV1 + k_row + keys, mask=keys < k_len, other=0.0))
    tl.store(DK1 + out_at, narrow(dk1, DK1.dtype.element_ty, UPCAST), mask=inside)
    if VIEWS == 2:
        if NORMALIZE:
            dk2 = _through_norm(dk2, k2, tl.load(INV2 + k_row + keys, mask=keys < k_len, other=0.0))
        tl.store(DK2 + out_at, narrow(dk2, DK2.dtype.element_ty, UPCAST), mask=inside)
    v_out = (k_row + keys)[:, None] * E + vcols[None, :]
    tl.store(DV + v_out, narrow(dv, DV.dtype.element_ty, UPCAST), mask=(keys < k_len)[:, None] & (vcols < E)[None, :])
