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

from ..primitives import SIZES, dot, head_at, load_rows, narrow, row_block
from .lists import last_keys, list_of, sees
from .weights import eighths, largest_root, narrow_dot, solver_step, weights


@triton.jit
def load_items(X, start, keys, stop, cols, stride, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
               LISTED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Rows ``keys`` of X, or (not LISTED) the BN rows from ``start`` on. What lies past ``stop`` means nothing."""
    if LISTED:
        if MASKED:
            keys = tl.minimum(keys, stop - 1)
        at = X + (keys.to(tl.int64) * stride)[:, None] + cols[None, :]
        if D == DP:
            return tl.load(at)
        return tl.load(at, mask=(cols < D)[None, :], other=0.0)
    else:
        return load_rows(X, start, stop, cols, stride, D, DP, BN, MASKED)


@triton.jit
def numbers(items, start, BN: tl.constexpr, LISTED: tl.constexpr):
    """Numbers of the items of a tile."""
    if LISTED:
        return tl.load(items + start + tl.arange(0, BN))
    else:
        return start + tl.arange(0, BN)


@triton.jit
def products(
    q, K, start, keys, k_len, cols, kt, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, LISTED: tl.constexpr,
    MASKED: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """<q, k> of a tile, and the keys."""
    k = load_items(K, start, keys, k_len, cols, kt, D, DP, BN, LISTED, MASKED)
    return dot(q, tl.trans(k), tl.zeros([q.shape[0], BN], tl.float32), PREC, UPCAST), k


@triton.jit
def _tile_sums(
    total, slope, support, q, K, items, start, k_len, cols, kt, anchor, factor, state, eps, last, D: tl.constexpr,
    DP: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr, LISTED: tl.constexpr, MASKED: tl.constexpr,
    PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add a tile to the sums of weights, of slopes, and to the size of the support."""
    keys = numbers(items, start, BN, LISTED)
    raw, _ = products(q, K, start, keys, k_len, cols, kt, D, DP, BN, LISTED, MASKED, PREC, UPCAST)
    a = (raw - anchor[:, None]) * factor[:, None]
    p, s = weights(a, state[:, None], eps, keys[None, :] <= last[:, None], MODE, MASKED)
    if MODE == 1:
        support += eighths((s > 0.0).to(tl.float32))
    return total + eighths(p), slope + eighths(s), support


@triton.jit
def _tile_values(
    acc, tilted, total, slope, q, K, V, items, start, k_len, cols, vcols, kt, vt, anchor, factor, state, eps, last,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr,
    LISTED: tl.constexpr, MASKED: tl.constexpr, KEEP: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Add a tile to the values weighted with p and (KEEP) with s, and to the sums of both."""
    keys = numbers(items, start, BN, LISTED)
    raw, _ = products(q, K, start, keys, k_len, cols, kt, D, DP, BN, LISTED, MASKED, PREC, UPCAST)
    a = (raw - anchor[:, None]) * factor[:, None]
    p, s = weights(a, state[:, None], eps, keys[None, :] <= last[:, None], MODE, MASKED)
    v = load_items(V, start, keys, k_len, vcols, vt, E, EP, BN, LISTED, MASKED)
    acc = narrow_dot(p, v, acc, PREC, WIDE, UPCAST)
    if KEEP:
        tilted = narrow_dot(s, v, tilted, PREC, WIDE, UPCAST)
        slope += eighths(s)
    return acc, tilted, total + eighths(p), slope


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q, K, V, FACTOR, EPS, ROWS, ITEMS, COUNTS, IDENTITY, OUT, TILTED, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, NL,
    capacity, plane, BLOCKS, qb, qh, qt, kb, kh, kt, vb, vh, vt, fb, fh, ft, D: tl.constexpr, DP: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, B: tl.constexpr, MODE: tl.constexpr,
    LISTED: tl.constexpr, KEEP: tl.constexpr, TRIES: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    PACKED: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
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
    eps = tl.load(EPS + h)
    factor = tl.load(FACTOR + b * fb + h * fh + (q0 + rows) * ft, mask=exists, other=0.0) * eps
    anchor = tl.load(ROWS + row + rows, mask=exists, other=0.0)
    state = tl.load(ROWS + plane + row + rows, mask=exists, other=1.0)
    before = tl.load(ROWS + 2 * plane + row + rows, mask=exists, other=float("inf"))
    factor = tl.minimum(factor, tl.load(ROWS + 3 * plane + row + rows, mask=exists, other=0.0))
    alive = (state == state) & (before < float("inf"))
    every, some = sees(first, BM, off, q_len, k_len, CAUSAL)
    items, begin, even, end = ITEMS, 0, every // BN * BN, some
    if LISTED:
        every, late = sees(first // B * B, B, off, q_len, k_len, CAUSAL)
        at = nh.to(tl.int64) * NL + first // B
        items, begin, even, end = list_of(ITEMS, COUNTS, IDENTITY, at, capacity, 0, even, some, late - every, BN)
    high = tl.full([BM], 2.0, tl.float32)
    # Below 0 where these products, rounded otherwise than those of the anchor, lie above it.
    low = tl.full([BM], -32.0 if MODE == 0 else -1.0, tl.float32)
    acc, tilted = tl.zeros([BM, EP], tl.float32), tl.zeros([BM, EP], tl.float32)
    slopes = tl.zeros([BM, 8], tl.float32)
    CLOSE: tl.constexpr = 6e-3 if MODE == 1 else 1e-3 if MODE == 0 else 3e-4
    step, tries = 0, 0
    while tries < TRIES:
        go = 1
        while go > 0:
            total, slope = tl.zeros([BM, 8], tl.float32), tl.zeros([BM, 8], tl.float32)
            support = tl.zeros([BM, 8], tl.float32)
            for start in range(begin, even, BN):
                total, slope, support = _tile_sums(
                    total, slope, support, q, k_at, items, start, k_len, cols, kt, anchor, factor, state, eps, last, D,
                    DP, BN, MODE, LISTED, False, PREC, UPCAST,
                )  # fmt: skip
            for start in range(even, end, BN):
                total, slope, support = _tile_sums(
                    total, slope, support, q, k_at, items, start, k_len, cols, kt, anchor, factor, state, eps, last, D,
                    DP, BN, MODE, LISTED, True, PREC, UPCAST,
                )  # fmt: skip
            state, low, high, large = solver_step(
                state, low, high, tl.sum(total, 1), tl.sum(slope, 1), tl.sum(support, 1), eps, CLOSE, MODE
            )
            step += 1
            go = tl.where(step < 40, tl.max((large & alive).to(tl.int32), 0), 0)
        # The last step was small, and the solution most likely found: the sum of the weights tells.
        acc, tilted = tl.zeros([BM, EP], tl.float32), tl.zeros([BM, EP], tl.float32)
        total, slopes = tl.zeros([BM, 8], tl.float32), tl.zeros([BM, 8], tl.float32)
        for start in range(begin, even, BN):
            acc, tilted, total, slopes = _tile_values(
                acc, tilted, total, slopes, q, k_at, v_at, items, start, k_len, cols, vcols, kt, vt, anchor, factor,
                state, eps, last, D, DP, E, EP, BN, MODE, LISTED, False, KEEP, PREC, WIDE, UPCAST,
            )  # fmt: skip
        for start in range(even, end, BN):
            acc, tilted, total, slopes = _tile_values(
                acc, tilted, total, slopes, q, k_at, v_at, items, start, k_len, cols, vcols, kt, vt, anchor, factor,
                state, eps, last, D, DP, E, EP, BN, MODE, LISTED, True, KEEP, PREC, WIDE, UPCAST,
            )  # fmt: skip
        off_by = tl.where(alive, tl.abs(tl.sum(total, 1) - 1.0), 0.0)
        tries = tl.where(tl.max(off_by, 0) > 2e-6, tries + 1, TRIES)
    old = tl.load(ROWS + plane + row + rows, mask=exists, other=1.0)
    sound = old == old
    acc = tl.where(sound[:, None], acc, float("nan"))
    state = tl.where(sound, state, float("nan"))
    inside = exists[:, None] & (vcols < E)[None, :]
    at = (row + rows)[:, None] * E + vcols[None, :]
    tl.store(OUT + at, narrow(acc, OUT.dtype.element_ty, UPCAST), mask=inside)
    if KEEP:
        slope = tl.sum(slopes, 1)
        tilted = tl.where(sound[:, None], tilted / tl.where(slope > 0.0, slope, 1.0)[:, None], float("nan"))
        tl.store(TILTED + at, narrow(tilted, TILTED.dtype.element_ty, UPCAST), mask=inside)
        # What the bound's level was above, the exact one is too: both less the same margin.
        positive = factor > 0.0
        scale = tl.where(positive, factor, 1.0)
        level = before + (largest_root(old, eps, MODE) - largest_root(state, eps, MODE)) / scale
        tl.store(ROWS + 2 * plane + row + rows, tl.where(positive & alive, level, before), mask=exists)
    tl.store(ROWS + plane + row + rows, state, mask=exists)
