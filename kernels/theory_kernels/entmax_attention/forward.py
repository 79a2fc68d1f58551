"""Triton forward kernel: exact threshold and output. Imports triton: load this module lazily.

One program owns a block of query rows. It sweeps over the listed keys (or all) until the threshold of each row has
converged, then once more for the output. Threshold and weights come from the same products, so that the weights sum to
1 as closely as float32 sums can tell, however large the scores are.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import SIZES, dot, gather_rows, load_rows, narrow, sequence
from .lists import listed
from .weights import largest_root, narrow_dot, solver_step, weights


@triton.jit
def load_items(X, start, keys, stop, cols, stride, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
               LISTED: tl.constexpr):  # fmt: skip
    """Rows ``keys`` of X, or (not LISTED) the BN rows from ``start`` on; 0 from ``stop`` on."""
    if LISTED:
        return gather_rows(X, keys, keys < stop, cols, stride, D, DP)
    else:
        return load_rows(X, start, stop, cols, stride, D, DP, BN, True)


@triton.jit
def _centered(
    q, K, start, keys, k_len, cols, kt, anchor, factor, pos, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, LISTED: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """(alpha - 1)(z - anchor) of a tile, -inf where masked, the products less the anchor, and the keys' rows."""
    k = load_items(K, start, keys, k_len, cols, kt, D, DP, BN, LISTED)
    raw = dot(q, tl.trans(k), tl.zeros([q.shape[0], BN], tl.float32), PREC, UPCAST) - anchor[:, None]
    seen = (keys < k_len)[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= pos[:, None])
    return tl.where(seen, raw * factor[:, None], float("-inf")), raw, k


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q, K, V, FACTOR, EPS, ROWS, ITEMS, COUNTS, OUT, TILTED, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, NL, capacity,
    plane, BLOCKS, qb, qh, qt, kb, kh, kt, vb, vh, vt, fb, fh, ft, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, B: tl.constexpr, MODE: tl.constexpr, LISTED: tl.constexpr,
    KEEP: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    nh, block = tl.program_id(0) // BLOCKS, BLOCKS - 1 - tl.program_id(0) % BLOCKS
    n, h = nh // H, nh % H
    g = h // (H // G)
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    first = block * BM
    if first >= q_len:
        return
    b = n * 0 if PACKED else n
    rows = first + tl.arange(0, BM)
    exists = rows < q_len
    pos = rows + off
    cols, vcols = tl.arange(0, DP), tl.arange(0, EP)
    q_at = Q + b.to(tl.int64) * qb + h.to(tl.int64) * qh + q0.to(tl.int64) * qt
    k_at = K + b.to(tl.int64) * kb + g.to(tl.int64) * kh + k0.to(tl.int64) * kt
    v_at = V + b.to(tl.int64) * vb + g.to(tl.int64) * vh + k0.to(tl.int64) * vt
    row = (b * H + h).to(tl.int64) * T + q0
    q = load_rows(q_at, first, q_len, cols, qt, D, DP, BM, True)
    eps = tl.load(EPS + h)
    given = tl.load(FACTOR + b * fb + h * fh + (q0 + rows) * ft, mask=exists, other=0.0)
    factor = given * eps
    anchor = tl.load(ROWS + row + rows, mask=exists, other=0.0)
    state = tl.load(ROWS + plane + row + rows, mask=exists, other=1.0)
    before = tl.load(ROWS + 2 * plane + row + rows, mask=exists, other=float("inf"))
    alive = before < float("inf")
    hi = k_len
    if CAUSAL:
        hi = tl.minimum(k_len, tl.maximum(tl.minimum(first + BM, q_len) + off, 0))
    items, count, listing = ITEMS, hi, False
    if LISTED:
        at = nh.to(tl.int64) * NL + first // B
        count = tl.load(COUNTS + at)
        listing = count >= 0
        count = tl.where(listing, count, hi)
        items = ITEMS + at * capacity
    high = tl.full([BM], 2.0, tl.float32)
    low = tl.full([BM], -32.0 if MODE == 0 else 0.0, tl.float32)
    step, go = 0, 1
    while go > 0:
        total, slope, support = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
        for start in range(0, count, BN):
            keys = listed(items, start, count, listing, BN) if LISTED else start + tl.arange(0, BN)
            a, _, _ = _centered(q, k_at, start, keys, k_len, cols, kt, anchor, factor, pos, D, DP, BN, CAUSAL, LISTED,
                                PREC, UPCAST)  # fmt: skip
            p, s = weights(a, state[:, None], eps, MODE)
            total += tl.sum(p, 1)
            slope += tl.sum(s, 1)
            if MODE == 1:
                support += tl.sum((p > 0.0).to(tl.float32), 1)
        state, low, high, large = solver_step(state, low, high, total, slope, support, eps, MODE)
        step += 1
        go = tl.where(step < 40, tl.max((large & alive).to(tl.int32), 0), 0)
    acc, tilted = tl.zeros([BM, EP], tl.float32), tl.zeros([BM, EP], tl.float32)
    slope = tl.zeros([BM], tl.float32)
    for start in range(0, count, BN):
        keys = listed(items, start, count, listing, BN) if LISTED else start + tl.arange(0, BN)
        a, _, _ = _centered(q, k_at, start, keys, k_len, cols, kt, anchor, factor, pos, D, DP, BN, CAUSAL, LISTED, PREC,
                            UPCAST)  # fmt: skip
        p, s = weights(a, state[:, None], eps, MODE)
        v = load_items(v_at, start, keys, k_len, vcols, vt, E, EP, BN, LISTED)
        acc = narrow_dot(p, v, acc, PREC, WIDE, UPCAST)
        if KEEP:
            tilted = narrow_dot(s, v, tilted, PREC, WIDE, UPCAST)
            slope += tl.sum(s, 1)
    # A negative temperature would turn the largest score into the smallest.
    acc = tl.where((given >= 0.0)[:, None], acc, float("nan"))
    inside = exists[:, None] & (vcols < E)[None, :]
    at = (row + rows)[:, None] * E + vcols[None, :]
    tl.store(OUT + at, narrow(acc, OUT.dtype.element_ty, UPCAST), mask=inside)
    if KEEP:
        tilted = tilted / tl.where(slope > 0.0, slope, 1.0)[:, None]
        tl.store(TILTED + at, narrow(tilted, TILTED.dtype.element_ty, UPCAST), mask=inside)
        # What the bound's level was above, the exact one is too: both less the same margin.
        positive = factor > 0.0
        scale = tl.where(positive, factor, 1.0)
        old = tl.load(ROWS + plane + row + rows, mask=exists, other=1.0)
        level = before + (largest_root(old, eps, MODE) - largest_root(state, eps, MODE)) / scale
        tl.store(ROWS + 2 * plane + row + rows, tl.where(positive & alive, level, before), mask=exists)
    tl.store(ROWS + plane + row + rows, state, mask=exists)
