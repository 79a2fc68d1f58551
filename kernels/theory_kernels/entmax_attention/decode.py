"""Few query rows against many keys, forward only: scores, threshold and values in kernels that share the keys.

The scores are written down (they are small beside the keys when rows are few) with the largest of every tile of keys.
Those are scores of distinct keys, so the threshold over them is a lower bound (see :mod:`.lists`), and only tiles whose
largest score passes it are read again, and only their values. Imports triton: load this module lazily.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import SIZES, dot, load_rows, sequence
from .lists import last_keys
from .weights import eighths, largest_root, solver_step, weights

# Tile numbers read at once when a row's threshold is looked for.
CHUNK = 32


@triton.jit(do_not_specialize=SIZES)
def scores_kernel(
    Q, K, SCORES, MAXIMA, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, NL, SPLITS, SPAN, qb, qh, qt, kb, kh, kt,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    PACKED: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """<q, k> of the rows of all query heads of a key head, MAX_Q of each after another, with SPAN tiles of keys."""
    ng, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    n, g = ng // G, ng % G
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    b = n * 0 if PACKED else n
    r = tl.arange(0, BM)
    head, t = g * (H // G) + r // MAX_Q, r % MAX_Q
    exists = (r < MAX_Q * (H // G)) & (t < q_len)
    last = tl.where(exists, last_keys(t, off, q_len, k_len, CAUSAL), -1)
    cols = tl.arange(0, DP)
    q_at = Q + b.to(tl.int64) * qb + head.to(tl.int64)[:, None] * qh + (q0 + t).to(tl.int64)[:, None] * qt
    q = tl.load(q_at + cols[None, :], mask=exists[:, None] & (cols < D)[None, :], other=0.0)
    k_at = K + b.to(tl.int64) * kb + g.to(tl.int64) * kh + k0.to(tl.int64) * kt
    row = (n * H + head).to(tl.int64) * MAX_Q + t
    for j in range(split * SPAN, tl.minimum(split * SPAN + SPAN, NL)):
        keys = j * BN + tl.arange(0, BN)
        k = load_rows(k_at, j * BN, k_len, cols, kt, D, DP, BN, True)
        raw = dot(q, tl.trans(k), tl.zeros([BM, BN], tl.float32), PREC, UPCAST)
        raw = tl.where(keys[None, :] <= last[:, None], raw, float("-inf"))
        tl.store(SCORES + (row * (NL * BN))[:, None] + keys[None, :], raw, mask=exists[:, None] & (keys[None, :] >= 0))
        tl.store(MAXIMA + row * NL + j, tl.max(raw, 1), mask=exists)


@triton.jit
def _sums(raw, factor, state, eps, seen, MODE: tl.constexpr):
    p, s = weights(raw * factor, state, eps, seen, MODE, True)
    return tl.sum(p, 0), tl.sum(s, 0), tl.sum((s > 0.0).to(tl.float32), 0)


@triton.jit(do_not_specialize=SIZES)
def threshold_kernel(
    SCORES, MAXIMA, FACTOR, EPS, ITEMS, ROWS, COUNTS, LAYOUT, N, H, MAX_Q, MAX_K, OFFSET, NL, plane, fb, fh, ft,
    BN: tl.constexpr, NP: tl.constexpr, CHUNK: tl.constexpr, MODE: tl.constexpr, RAGGED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Anchor and state of one row, and the tiles whose keys can have a weight."""
    row = tl.program_id(0).to(tl.int64)
    nh, t = tl.program_id(0) // MAX_Q, tl.program_id(0) % MAX_Q
    n, h = nh // H, nh % H
    q0, q_len, _, _, _ = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    if t >= q_len:
        tl.store(COUNTS + row, 0)
        return
    b = n * 0 if PACKED else n
    tile = tl.arange(0, NP)
    best = tl.load(MAXIMA + row * NL + tile, mask=tile < NL, other=float("-inf"))
    anchor = tl.max(best, 0)
    if anchor == float("-inf"):
        tl.store(COUNTS + row, 0)
        return
    eps = tl.load(EPS + h)
    factor = tl.load(FACTOR + b * fb + h * fh + (q0 + t) * ft) * eps
    filled = best > float("-inf")
    raw = tl.where(filled, best - anchor, 0.0)
    state = anchor * 0.0 + (0.0 if MODE == 0 else 1.0)
    high, low = state, state - (32.0 if MODE == 0 else 1.0)
    step, go = 0, 1
    while go > 0:
        total, slope, count = _sums(raw, factor, state, eps, filled, MODE)
        state, low, high, large = solver_step(state, low, high, total, slope, count, eps, 1e-3, MODE)
        step += 1
        go = tl.where(step < 40, large.to(tl.int32), 0)
    # A little more than the solution, checked: an upper bound of the state is a lower bound of the threshold.
    state = state + 1e-4 * (1.0 if MODE == 0 else state)
    total, slope, count = _sums(raw, factor, state, eps, filled, MODE)
    state = tl.where(total >= 1.0, tl.minimum(state, high), high)
    reach = largest_root(state, eps, MODE) / tl.where(factor > 0.0, factor, 1.0)
    # The very same scores are read again: only this sum is rounded.
    level = tl.where(factor > 0.0, anchor - reach - 1e-6 * (tl.abs(anchor) + reach), float("-inf"))
    active = (best > level) & filled
    place = tl.cumsum(active.to(tl.int32), 0)
    length = tl.sum(active.to(tl.int32), 0)
    tl.store(ITEMS + row * NL + place - 1, tile, mask=active)
    tl.store(COUNTS + row, length)
    tl.debug_barrier()
    high, low = state * 0.0 + 2.0, state * 0.0 + (-32.0 if MODE == 0 else 0.0)
    step, go = 0, 1
    while go > 0:
        sums, slopes, counts = (tl.zeros([CHUNK, 8], tl.float32), tl.zeros([CHUNK, 8], tl.float32),
                                tl.zeros([CHUNK, 8], tl.float32))  # fmt: skip
        for start in range(0, length, CHUNK):
            slot = start + tl.arange(0, CHUNK)
            tiles = tl.load(ITEMS + row * NL + slot, mask=slot < length, other=0)
            at = SCORES + row * (NL * BN) + (tiles * BN)[:, None] + tl.arange(0, BN)[None, :]
            near = tl.load(at, mask=(slot < length)[:, None], other=float("-inf"))
            seen = near > float("-inf")
            p, s = weights(tl.where(seen, near - anchor, 0.0) * factor, state, eps, seen, MODE, True)
            sums += eighths(p)
            slopes += eighths(s)
            counts += eighths((s > 0.0).to(tl.float32))
        total, slope, count = tl.sum(tl.sum(sums, 1), 0), tl.sum(tl.sum(slopes, 1), 0), tl.sum(tl.sum(counts, 1), 0)
        state, low, high, large = solver_step(state, low, high, total, slope, count, eps, 1e-4, MODE)
        step += 1
        go = tl.where(step < 40, large.to(tl.int32), 0)
    tl.store(ROWS + row, anchor)
    tl.store(ROWS + plane + row, state)


@triton.jit(do_not_specialize=SIZES)
def values_kernel(
    SCORES, V, FACTOR, EPS, ITEMS, ROWS, COUNTS, PARTS, LAYOUT, N, H, G, MAX_Q, MAX_K, OFFSET, NL, plane, SPLITS,
    ROWS_ALL, vb, vh, vt, fb, fh, ft, E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr,
    RAGGED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Weights times values of every SPLITS-th part of a row's tiles."""
    split, at = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    row = at.to(tl.int64)
    nh, t = at // MAX_Q, at % MAX_Q
    n, h = nh // H, nh % H
    q0, _, k0, k_len, _ = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    b = n * 0 if PACKED else n
    vcols = tl.arange(0, EP)
    acc = tl.zeros([EP], tl.float32)
    length = tl.load(COUNTS + row)
    if length > 0:
        eps = tl.load(EPS + h)
        given = tl.load(FACTOR + b * fb + h * fh + (q0 + t) * ft)
        anchor, state = tl.load(ROWS + row), tl.load(ROWS + plane + row)
        v_at = V + b.to(tl.int64) * vb + (h // (H // G)).to(tl.int64) * vh + k0.to(tl.int64) * vt
        part = tl.cdiv(length, SPLITS)
        for slot in range(split * part, tl.minimum(split * part + part, length)):
            tile = tl.load(ITEMS + row * NL + slot)
            raw = tl.load(SCORES + row * (NL * BN) + tile * BN + tl.arange(0, BN))
            seen = raw > float("-inf")
            p, _slopes = weights(tl.where(seen, raw - anchor, 0.0) * given * eps, state, eps, seen, MODE, True)
            v = load_rows(v_at, tile * BN, k_len, vcols, vt, E, EP, BN, True).to(tl.float32)
            acc += tl.sum(p[:, None] * v, 0)
        acc = tl.where(given >= 0.0, acc, float("nan"))
    tl.store(PARTS + (split.to(tl.int64) * ROWS_ALL + row) * E + vcols, acc, mask=vcols < E)
