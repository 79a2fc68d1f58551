"""Few query rows against many keys, forward only: scores, threshold and values in kernels that share the keys.

The scores are written down (they are small beside the keys when rows are few) with the largest of every tile of keys.
Those are scores of distinct keys, so the threshold over them is a lower bound (see :mod:`.lists`), and only tiles whose
largest score passes it are read again, and only their values. Long rows of which many tiles pass are solved by several
programs each, a launch a step. Nothing is added atomically: two runs agree bit for bit.
Imports triton: load this module lazily.
"""

# ruff: noqa: SIM102 - branches on compile-time flags stand alone
# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import SIZES, dot, head_at, load_rows, maxima, sequence
from .lists import last_keys
from .weights import eighths, largest_root, solver_step, weights

# Tile numbers read at once when a row's threshold is looked for.
CHUNK = 32
# A step so small, relatively, is the last: the error after it is of the order of its square.
CLOSE = tl.constexpr(1e-4)


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
    k_at = head_at(K, b, g, k0, kb, kh, kt)
    row = (n * H + head).to(tl.int64) * MAX_Q + t
    for j in range(split * SPAN, tl.minimum(split * SPAN + SPAN, NL)):
        keys = j * BN + tl.arange(0, BN)
        k = load_rows(k_at, j * BN, k_len, cols, kt, D, DP, BN, True)
        raw = dot(q, tl.trans(k), tl.zeros([BM, BN], tl.float32), PREC, UPCAST)
        raw = tl.where(keys[None, :] <= last[:, None], raw, float("-inf"))
        tl.store(SCORES + (row * (NL * BN))[:, None] + keys[None, :], raw, mask=exists[:, None] & (keys[None, :] >= 0))
        tl.store(MAXIMA + row * NL + j, maxima(raw, 1, UPCAST), mask=exists)


@triton.jit
def _sums(raw, factor, state, eps, seen, MODE: tl.constexpr):
    p, s = weights(raw * factor, state, eps, seen, MODE, True)
    return tl.sum(p, 0), tl.sum(s, 0), tl.sum((s > 0.0).to(tl.float32), 0)


@triton.jit
def _tile_sums(
    SCORES, ITEMS, row, NL, first, stop, anchor, factor, state, eps, BN: tl.constexpr, CHUNK: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """Sums of weights and slopes, and the size of the support, over the listed tiles ``first`` .. ``stop - 1``."""
    sums, slopes, counts = (tl.zeros([CHUNK, 8], tl.float32), tl.zeros([CHUNK, 8], tl.float32),
                            tl.zeros([CHUNK, 8], tl.float32))  # fmt: skip
    for start in range(first, stop, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        tiles = tl.load(ITEMS + row * NL + slot, mask=slot < stop, other=0)
        at = SCORES + row * (NL * BN) + (tiles * BN)[:, None] + tl.arange(0, BN)[None, :]
        near = tl.load(at, mask=(slot < stop)[:, None], other=float("-inf"))
        seen = near > float("-inf")
        p, s = weights(tl.where(seen, near - anchor, 0.0) * factor, state, eps, seen, MODE, True)
        sums += eighths(p)
        slopes += eighths(s)
        counts += eighths((s > 0.0).to(tl.float32))
    return tl.sum(tl.sum(sums, 1), 0), tl.sum(tl.sum(slopes, 1), 0), tl.sum(tl.sum(counts, 1), 0)


@triton.jit
def _solve(
    SCORES, ITEMS, row, NL, length, anchor, factor, state, low, high, large, eps, BN: tl.constexpr, CHUNK: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """The state of a row, by steps over all its listed tiles while the last step was ``large``."""
    step, go = 0, large.to(tl.int32)
    while go > 0:
        total, slope, count = _tile_sums(SCORES, ITEMS, row, NL, 0, length, anchor, factor, state, eps, BN, CHUNK, MODE)
        state, low, high, large = solver_step(state, low, high, total, slope, count, eps, CLOSE, MODE)
        step += 1
        go = tl.where(step < 40, large.to(tl.int32), 0)
    return state


@triton.jit(do_not_specialize=[*SIZES, "ALONE"])
def threshold_kernel(
    SCORES, MAXIMA, FACTOR, EPS, ITEMS, ROWS, COUNTS, LAYOUT, N, H, MAX_Q, MAX_K, OFFSET, NL, plane, ALONE, fb, fh, ft,
    BN: tl.constexpr, NP: tl.constexpr, CHUNK: tl.constexpr, MODE: tl.constexpr, RAGGED: tl.constexpr,
    PACKED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The tiles whose keys can have a weight, and anchor and state of one row.

    How many tiles there are goes to COUNTS: 0 for a row that sees nothing, -1 for one with a score of NaN or +inf, or a
    factor that is negative or no finite number. With SPLIT, rows of more than ALONE tiles are left with a bound of
    their state and its bracket, for :func:`sums_kernel`.
    """
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
    filled = best > float("-inf")
    odd = tl.max(((best < float("inf")) == 0).to(tl.int32), 0)
    anchor = tl.max(tl.where(filled, best, float("-inf")), 0)
    if (anchor == float("-inf")) & (odd == 0):
        tl.store(COUNTS + row, 0)
        return
    eps = tl.load(EPS + h)
    factor = tl.load(FACTOR + b * fb + h * fh + (q0 + t) * ft) * eps
    if (odd > 0) | ((factor >= 0.0) == 0) | ((factor < float("inf")) == 0):
        tl.store(COUNTS + row, -1)
        return
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
    tl.store(ROWS + row, anchor)
    high, low = state * 0.0 + 2.0, state * 0.0 + (-32.0 if MODE == 0 else 0.0)
    if SPLIT:
        if length > ALONE:
            tl.store(ROWS + plane + row, state)
            tl.store(ROWS + 2 * plane + row, low)
            tl.store(ROWS + 3 * plane + row, high)
            tl.store(ROWS + 4 * plane + row, 1.0)
            return
    tl.debug_barrier()
    state = _solve(SCORES, ITEMS, row, NL, length, anchor, factor, state, low, high, high > 0.0, eps, BN, CHUNK, MODE)
    tl.store(ROWS + plane + row, state)


@triton.jit
def _advanced(ROWS, SUMS, row, plane, TURN, SPLITS, eps, PARTS: tl.constexpr, MODE: tl.constexpr):
    """State, bracket and whether the last step was large, after the step that the sums of the turn before ask for.

    Turn i of 1, 2, .. has them in planes 4 i - 3 .. 4 i of ROWS, and its sums in planes 3 i - 3 .. 3 i - 1 of SUMS.
    """
    at = ROWS + row + (4 * tl.maximum(TURN - 1, 1) - 3) * plane
    state, low, high, large = tl.load(at), tl.load(at + plane), tl.load(at + 2 * plane), tl.load(at + 3 * plane) > 0.0
    if (TURN > 1) & large:
        part = tl.arange(0, PARTS)
        sums = SUMS + (row + (3 * TURN - 6) * plane) * SPLITS + part
        total = tl.sum(tl.load(sums, mask=part < SPLITS, other=0.0), 0)
        slope = tl.sum(tl.load(sums + plane * SPLITS, mask=part < SPLITS, other=0.0), 0)
        count = tl.sum(tl.load(sums + 2 * plane * SPLITS, mask=part < SPLITS, other=0.0), 0)
        state, low, high, large = solver_step(state, low, high, total, slope, count, eps, CLOSE, MODE)
    return state, low, high, large


@triton.jit
def _numbers(
    at, FACTOR, EPS, LAYOUT, N, H, MAX_Q, MAX_K, OFFSET, fb, fh, ft, RAGGED: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """alpha - 1 of a row, and what its products are multiplied with."""
    n, h = at // MAX_Q // H, at // MAX_Q % H
    q0, _, _, _, _ = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    b = n * 0 if PACKED else n
    eps = tl.load(EPS + h)
    return eps, tl.load(FACTOR + b * fb + h * fh + (q0 + at % MAX_Q) * ft) * eps


@triton.jit(do_not_specialize=[*SIZES, "TURN", "ALONE"])
def sums_kernel(
    SCORES, FACTOR, EPS, ITEMS, ROWS, COUNTS, SUMS, LAYOUT, N, H, MAX_Q, MAX_K, OFFSET, NL, plane, ALONE, TURN, SPLITS,
    fb, fh, ft, BN: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, MODE: tl.constexpr, RAGGED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """One turn of the solver, for rows of many tiles: sums over every SPLITS-th part of them at the latest state."""
    split, at = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    row = at.to(tl.int64)
    length = tl.load(COUNTS + row)
    if length <= ALONE:
        return
    eps, factor = _numbers(at, FACTOR, EPS, LAYOUT, N, H, MAX_Q, MAX_K, OFFSET, fb, fh, ft, RAGGED, PACKED)
    # Every program takes the step by itself, with the same bits; one of them writes it down.
    state, low, high, large = _advanced(ROWS, SUMS, row, plane, TURN, SPLITS, eps, PARTS, MODE)
    if (split == 0) & (TURN > 1):
        own = ROWS + row + (4 * TURN - 3) * plane
        tl.store(own, state)
        tl.store(own + plane, low)
        tl.store(own + 2 * plane, high)
        tl.store(own + 3 * plane, large.to(tl.float32))
    if large == 0:
        return
    part = tl.cdiv(length, SPLITS)
    total, slope, count = _tile_sums(
        SCORES, ITEMS, row, NL, split * part, tl.minimum(split * part + part, length), tl.load(ROWS + row), factor,
        state, eps, BN, CHUNK, MODE,
    )  # fmt: skip
    sums = SUMS + (row + (3 * TURN - 3) * plane) * SPLITS + split
    tl.store(sums, total)
    tl.store(sums + plane * SPLITS, slope)
    tl.store(sums + 2 * plane * SPLITS, count)


@triton.jit(do_not_specialize=[*SIZES, "TURN", "ALONE"])
def finish_kernel(
    SCORES, FACTOR, EPS, ITEMS, ROWS, COUNTS, SUMS, LAYOUT, N, H, MAX_Q, MAX_K, OFFSET, NL, plane, ALONE, TURN, SPLITS,
    fb, fh, ft, BN: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, MODE: tl.constexpr, RAGGED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """The state of a row of many tiles after all turns; further steps, hardly ever needed, by one program."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(COUNTS + row)
    if length <= ALONE:
        return
    eps, factor = _numbers(
        tl.program_id(0), FACTOR, EPS, LAYOUT, N, H, MAX_Q, MAX_K, OFFSET, fb, fh, ft, RAGGED, PACKED
    )
    state, low, high, large = _advanced(ROWS, SUMS, row, plane, TURN, SPLITS, eps, PARTS, MODE)
    state = _solve(
        SCORES, ITEMS, row, NL, length, tl.load(ROWS + row), factor, state, low, high, large, eps, BN, CHUNK, MODE
    )  # fmt: skip
    tl.store(ROWS + plane + row, state)


@triton.jit(do_not_specialize=SIZES)
def values_kernel(
    SCORES, V, FACTOR, EPS, ITEMS, ROWS, COUNTS, PARTS, LAYOUT, N, H, G, MAX_Q, MAX_K, OFFSET, NL, plane, SPLITS,
    ROWS_ALL, vb, vh, vt, fb, fh, ft, E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr,
    RAGGED: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
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
        factor = tl.load(FACTOR + b * fb + h * fh + (q0 + t) * ft) * eps
        anchor, state = tl.load(ROWS + row), tl.load(ROWS + plane + row)
        v_at = head_at(V, b, h // (H // G), k0, vb, vh, vt)
        part = tl.cdiv(length, SPLITS)
        for slot in tl.range(split * part, tl.minimum(split * part + part, length), num_stages=STAGES):
            tile = tl.load(ITEMS + row * NL + slot)
            raw = tl.load(SCORES + row * (NL * BN) + tile * BN + tl.arange(0, BN))
            seen = raw > float("-inf")
            p, _slopes = weights(tl.where(seen, raw - anchor, 0.0) * factor, state, eps, seen, MODE, True)
            v = load_rows(v_at, tile * BN, k_len, vcols, vt, E, EP, BN, True).to(tl.float32)
            acc += tl.sum(p[:, None] * v, 0)
    acc = tl.where(length < 0, float("nan"), acc)
    tl.store(PARTS + (split.to(tl.int64) * ROWS_ALL + row) * E + vcols, acc, mask=vcols < E)
