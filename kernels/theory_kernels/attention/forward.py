"""Triton forward kernel. Imports triton: load this module lazily.

One program owns a block of query rows. It walks either every tile below the diagonal or the tiles whose
bit is set in the bitmap of the screen; no rescaling is needed, because a thresholded weight does not
depend on the other scores of its row.
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
    is_dense,
    live_words,
    load_rows,
    narrow,
    rectified_power,
    sequence,
)


@triton.jit
def excess(
    q, K, start, k_len, cols, tau, pos, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """max(q k^T - tau, 0) of a tile and its keys; masked pairs give 0 whatever the sign of tau."""
    k = load_rows(K, start, k_len, cols, D, D, DP, BN, MASKED)
    s = dot(q, tl.trans(k), tl.zeros([q.shape[0], BN], tl.float32), PREC, UPCAST)
    x = s - tau[:, None]
    if MASKED:
        keys = start + tl.arange(0, BN)
        seen = (keys < k_len)[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= pos[:, None])
        x = tl.where(seen, x, 0.0)
    return tl.maximum(x, 0.0), k


@triton.jit
def _accumulate(
    acc, q1, q2, K1, K2, V, start, k_len, cols, vcols, tau, pos, lam, stride_v,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr, VIEWS: tl.constexpr,
    POWER: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    x, _ = excess(q1, K1, start, k_len, cols, tau, pos, D, DP, BN, CAUSAL, MASKED, PREC, UPCAST)
    w = rectified_power(x, POWER)
    if VIEWS == 2:
        y, _ = excess(q2, K2, start, k_len, cols, tau, pos, D, DP, BN, CAUSAL, MASKED, PREC, UPCAST)
        w -= lam * rectified_power(y, POWER)
    v = load_rows(V, start, k_len, vcols, stride_v, E, EP, BN, MASKED)
    if WIDE:
        # float16 would flush small weights to 0; a tf32 product keeps its mantissa and has room for them.
        return dot(w, v.to(tl.float32), acc, PREC, UPCAST)
    return dot(narrow(w, v.dtype, UPCAST), v, acc, PREC, UPCAST)


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q1, K1, Q2, K2, V, TAU, LAM, OUT, SCALE, WORDS, FLAGS, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET,
    NI, NW, plane, BLOCKS, SPLITS, SPAN, tau_b, tau_h, vb, vh, vs, EPS,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, VIEWS: tl.constexpr, POWER: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, PACKED: tl.constexpr, LISTED: tl.constexpr, SPLIT: tl.constexpr,
    GATE: tl.constexpr, SAMPLES: tl.constexpr, LIMIT: tl.constexpr, RMS: tl.constexpr,
    PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    split = pid % SPLITS
    nh = pid // SPLITS // BLOCKS
    block = BLOCKS - 1 - pid // SPLITS % BLOCKS
    n, h = nh // H, nh % H
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    first = block * BM
    if first >= q_len:
        return
    if GATE:
        # Both paths are launched and each head takes one: the choice never leaves the device.
        if is_dense(FLAGS + nh * SAMPLES, 1, SAMPLES, LIMIT) == LISTED:
            return
    b = n * 0 if PACKED else n
    kh = b * G + h // (H // G)
    q_row = (b * H + h).to(tl.int64) * T + q0
    k_at = (kh.to(tl.int64) * S + k0) * D
    rows = first + tl.arange(0, BM)
    pos = rows + off
    cols, vcols = tl.arange(0, DP), tl.arange(0, EP)
    q1 = load_rows(Q1 + q_row * D, first, q_len, cols, D, D, DP, BM, True)
    q2 = q1
    lam = 0.0
    if VIEWS == 2:
        q2 = load_rows(Q2 + q_row * D, first, q_len, cols, D, D, DP, BM, True)
        lam = tl.load(LAM + h)
    # Rows that do not exist get an infinite threshold.
    tau = tl.load(TAU + b * tau_b + h * tau_h + q0 + rows, mask=rows < q_len, other=float("inf"))
    v_at = V + b.to(tl.int64) * vb + (h // (H // G)).to(tl.int64) * vh + k0.to(tl.int64) * vs
    acc = tl.zeros([BM, EP], tl.float32)
    hi = k_len
    full = k_len // BN
    if CAUSAL:
        hi = tl.minimum(k_len, tl.maximum(tl.minimum(first + BM, q_len) + off, 0))
        full = tl.minimum(full, tl.maximum(first + off + 1, 0) // BN)
    if LISTED:
        at = WORDS + (tl.cast(nh, tl.int64) * NI + block) * NW
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
                    acc = _accumulate(acc, q1, q2, K1 + k_at, K2 + k_at, v_at, key, k_len, cols, vcols, tau, pos,
                                      lam, vs, D, DP, E, EP, BN, VIEWS, POWER, CAUSAL, True, PREC,
                                      WIDE, UPCAST)  # fmt: skip
    else:
        start = 0
        stop = tl.cdiv(hi, BN)
        if SPLIT:
            start = tl.minimum(split * SPAN, stop)
            stop = tl.minimum(start + SPAN, stop)
        full = tl.minimum(tl.maximum(full, start), stop)
        for j in range(start, full):
            acc = _accumulate(acc, q1, q2, K1 + k_at, K2 + k_at, v_at, j * BN, k_len, cols, vcols, tau, pos, lam,
                              vs, D, DP, E, EP, BN, VIEWS, POWER, CAUSAL, False, PREC, WIDE,
                              UPCAST)  # fmt: skip
        for j in tl.range(full, stop, num_stages=1):
            acc = _accumulate(acc, q1, q2, K1 + k_at, K2 + k_at, v_at, j * BN, k_len, cols, vcols, tau, pos, lam,
                              vs, D, DP, E, EP, BN, VIEWS, POWER, CAUSAL, True, PREC, WIDE,
                              UPCAST)  # fmt: skip
    inside = (rows < q_len)[:, None] & (vcols < E)[None, :]
    if SPLIT:
        at_row = split.to(tl.int64) * plane + q_row
        tl.store(OUT + (at_row + rows)[:, None] * E + vcols[None, :], acc, mask=inside)
    else:
        if RMS:
            scale = tl.rsqrt(tl.sum(acc * acc, 1) / E + EPS)
            acc = acc * scale[:, None]
            tl.store(SCALE + q_row + rows, scale, mask=rows < q_len)
        tl.store(
            OUT + (q_row + rows)[:, None] * E + vcols[None, :], narrow(acc, OUT.dtype.element_ty, UPCAST), mask=inside
        )
