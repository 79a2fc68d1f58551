"""Triton forward kernel. Imports triton: load this module lazily.

One program owns a block of query rows. It walks every tile below the diagonal, or the tiles whose bit is set
in the bitmap of the screen, or tiles gathered from marked keys; no rescaling is needed, because a thresholded
weight does not depend on the other scores of its row.
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
    sequence,
    unit_rows,
)
from .lists import items, listed


@triton.jit
def excess(
    q, K, start, k_len, cols, tau, pos, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, GATHER: tl.constexpr, UNIT: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """max(q k^T - tau, 0) of a tile and its keys; masked pairs give 0 whatever the sign of tau.

    ``start`` is the first key, or (GATHER) the index of each.
    """
    if GATHER:
        keys = start
        k = gather_rows(K, keys, keys < k_len, cols, D, D, DP)
    else:
        keys = start + tl.arange(0, BN)
        k = load_rows(K, start, k_len, cols, D, D, DP, BN, MASKED)
    if UNIT:
        k, _ = unit_rows(k, k.dtype, UPCAST)
    s = dot(q, tl.trans(k), tl.zeros([q.shape[0], BN], tl.float32), PREC, UPCAST)
    x = s - tau[:, None]
    if MASKED:
        seen = (keys < k_len)[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= pos[:, None])
        x = tl.where(seen, x, 0.0)
    return higher(x, 0.0), k


@triton.jit
def _accumulate(
    acc, q1, q2, K1, K2, V, start, k_len, cols, vcols, tau, pos, lam, stride_v,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr, VIEWS: tl.constexpr,
    POWER: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, GATHER: tl.constexpr, UNIT: tl.constexpr,
    PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    x, _ = excess(q1, K1, start, k_len, cols, tau, pos, D, DP, BN, CAUSAL, MASKED, GATHER, UNIT, PREC, UPCAST)
    w = rectified_power(x, POWER)
    if VIEWS == 2:
        y, _ = excess(q2, K2, start, k_len, cols, tau, pos, D, DP, BN, CAUSAL, MASKED, GATHER, UNIT, PREC, UPCAST)
        w -= lam * rectified_power(y, POWER)
    if GATHER:
        v = gather_rows(V, start, start < k_len, vcols, stride_v, E, EP)
    else:
        v = load_rows(V, start, k_len, vcols, stride_v, E, EP, BN, MASKED)
    if WIDE:
        # float16 would flush small weights to 0; a tf32 product keeps its mantissa and has room for them.
        return dot(w, v.to(tl.float32), acc, PREC, UPCAST)
    return dot(narrow(w, v.dtype, UPCAST), v, acc, PREC, UPCAST)


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q1, K1, Q2, K2, V, TAU, LAM, OUT, SCALE, WORDS, LISTS, PLACES, PATHS, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET,
    NI, NW, NL, capacity, plane, BLOCKS, SPLITS, SPAN, TOKENS, tau_b, tau_h, vb, vh, vs, EPS,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, VIEWS: tl.constexpr, POWER: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, PACKED: tl.constexpr, PATH: tl.constexpr, SPLIT: tl.constexpr,
    FOLD: tl.constexpr, UNIT: tl.constexpr, GATE: tl.constexpr,
    RMS: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """FOLD: the query heads of a key head are one head, TOKENS rows of each after another."""
    pid = tl.program_id(0)
    split = pid % SPLITS
    nh = pid // SPLITS // BLOCKS
    block = BLOCKS - 1 - pid // SPLITS % BLOCKS
    n, h = nh // H, nh % H
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    first = block * BM
    if FOLD:
        if RAGGED:
            if q_len == 0:
                return
    elif first >= q_len:
        return
    if GATE:
        # Each is launched and each head takes one: the choice never leaves the device.
        if tl.load(PATHS + nh) != PATH:
            return
    b = n * 0 if PACKED else n
    kh = b * G + h // (H // G)
    q_row = (b * H + h).to(tl.int64) * T + q0
    k_at = (kh.to(tl.int64) * S + k0) * D
    rows = first + tl.arange(0, BM)
    token = rows
    exists = rows < q_len
    # Keys that some row of the block sees, and keys that all its rows see.
    last, least = tl.minimum(first + BM, q_len) + off, first + off + 1
    if FOLD:
        token = rows % TOKENS
        exists = (rows < T) & (token < q_len)
        last, least = q_len + off, off + 1
    pos = token + off
    cols, vcols = tl.arange(0, DP), tl.arange(0, EP)
    q_end = T if FOLD else q_len
    q1 = load_rows(Q1 + q_row * D, first, q_end, cols, D, D, DP, BM, True)
    q2 = q1
    lam = 0.0
    if VIEWS == 2:
        q2 = load_rows(Q2 + q_row * D, first, q_end, cols, D, D, DP, BM, True)
        if FOLD:
            lam = tl.load(LAM + h * (T // TOKENS) + rows // TOKENS, mask=exists, other=0.0)[:, None]
        else:
            lam = tl.load(LAM + h)
    # Rows that do not exist get an infinite threshold.
    tau = tl.load(TAU + b * tau_b + h * tau_h + q0 + rows, mask=exists, other=float("inf"))
    v_at = V + b.to(tl.int64) * vb + (h // (H // G)).to(tl.int64) * vh + k0.to(tl.int64) * vs
    acc = tl.zeros([BM, EP], tl.float32)
    hi = k_len
    full = k_len // BN
    if CAUSAL:
        hi = tl.minimum(k_len, tl.maximum(last, 0))
        full = tl.minimum(full, tl.maximum(least, 0) // BN)
    if PATH == 0:
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
                                      lam, vs, D, DP, E, EP, BN, VIEWS, POWER, CAUSAL, True, False, False, PREC,
                                      WIDE, UPCAST)  # fmt: skip
    elif PATH == 1:
        at, count = listed(LISTS, PLACES, nh, block, N * H, NL, capacity)
        for start in range(0, count, BN):
            keys = items(at, start, count, BN)
            acc = _accumulate(acc, q1, q2, K1 + k_at, K2 + k_at, v_at, keys, k_len, cols, vcols, tau, pos,
                              lam, vs, D, DP, E, EP, BN, VIEWS, POWER, CAUSAL, True, True, False, PREC,
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
                              vs, D, DP, E, EP, BN, VIEWS, POWER, CAUSAL, False, False, UNIT, PREC, WIDE,
                              UPCAST)  # fmt: skip
        for j in tl.range(full, stop, num_stages=1):
            acc = _accumulate(acc, q1, q2, K1 + k_at, K2 + k_at, v_at, j * BN, k_len, cols, vcols, tau, pos, lam,
                              vs, D, DP, E, EP, BN, VIEWS, POWER, CAUSAL, True, False, UNIT, PREC, WIDE,
                              UPCAST)  # fmt: skip
    inside = exists[:, None] & (vcols < E)[None, :]
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
