"""Softmax and ETA: row sums in one pass, column masses and near-zero counts in a second. Imports triton.

The second pass multiplies keys by queries, so that what is added over rows lies in one thread. Both recompute the
products; nothing of the map is stored. Long sums are pairs of float32.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..primitives import INTERPRETED, load_rows
from .request import Request
from .triton_common import (
    FLOOR,
    SIZES,
    Positions,
    add_pair,
    bounds_of,
    flags_of,
    key_tiles,
    logits,
    next_power,
    padded_list,
    products,
    row_tiles,
    visible,
    with_unit_stride,
)  # fmt: skip

LOG2_E = 1.4426950408889634
# Tile shapes found on an H200.
ROW_TILES = {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3}
COLUMN_TILES = {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3}


@triton.jit
def _row_tile(
    state, q, K, start, cols, eta, rows, row0, row1, key0, key1, off, BEFORE, AFTER, kt, FACTOR, CAP, SHARP,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, ETA: tl.constexpr,
    HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, MASKED: tl.constexpr, PREC: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    top, high, low, lag = state
    s = products(q, K, start, key1, cols, kt, D, DP, BN, MASKED, PREC, UPCAST)
    z = logits(s, eta[:, None], FACTOR, CAP, SHARP, SOFTCAP, ETA)
    if MASKED:
        keys = start + tl.arange(0, BN)
        seen = visible(rows[:, None], keys[None, :], row0, row1, key0, key1, off, BEFORE, AFTER, HAS_BEFORE, HAS_AFTER)
        z = tl.where(seen, z, -1e30)
    new = tl.maximum(top, tl.max(z, 1))
    d = z - new[:, None]
    if MASKED:
        # A row that has seen nothing yet has the floor as its maximum.
        d = tl.where(seen, d, -1e30)
    e = tl.exp2(d)
    drop = top - new
    fade = tl.exp2(drop)
    lag = fade * (lag + drop * high) + tl.sum(e * d, 1)
    high, low = add_pair(high * fade, low * fade, tl.sum(e, 1))
    return new, high, low, lag


@triton.jit(do_not_specialize=SIZES)
def _rows_kernel(
    Q, K, ETAS, OUT, BOUNDS, B, H, G, T, BEFORE, AFTER, BLOCKS, plane, qb, qh, qt, kb, kh, kt, FACTOR, CAP, SHARP,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr,
    ETA: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, PREC: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of exponentials (a pair) and sum of e (z - maximum) of every row, in bits."""
    plane = plane.to(tl.int64)
    nh = tl.program_id(0) // BLOCKS
    # Heavy row blocks first: under a causal mask the last rows see the most keys.
    block = BLOCKS - 1 - tl.program_id(0) % BLOCKS
    b, h = (nh // H).to(tl.int64), (nh % H).to(tl.int64)
    row0, row1, key0, key1, off = bounds_of(BOUNDS, b, B)
    first = block * BM
    if (first >= row1) | (first + BM <= row0):
        return
    rows, cols = first + tl.arange(0, BM), tl.arange(0, DP)
    q = load_rows(Q + b * qb + h * qh, first, row1, cols, qt, D, DP, BM, True)
    at = K + b * kb + (h // (H // G)) * kh
    line = nh.to(tl.int64) * T
    eta = tl.zeros([BM], tl.float32)
    if ETA > 0:
        eta = tl.load(ETAS + line + rows, mask=rows < row1, other=0.0)
    start, inner, outer, stop = key_tiles(
        first, tl.minimum(first + BM, row1) - 1, key0, key1, off, BEFORE, AFTER, BN, HAS_BEFORE, HAS_AFTER
    )
    zero = tl.zeros([BM], tl.float32)
    state = (zero - 1e30, zero, zero, zero)
    for j in tl.range(start, inner, num_stages=1):
        state = _row_tile(state, q, at, j * BN, cols, eta, rows, row0, row1, key0, key1, off, BEFORE, AFTER, kt, FACTOR,
                          CAP, SHARP, D, DP, BN, SOFTCAP, ETA, HAS_BEFORE, HAS_AFTER, True, PREC, UPCAST)  # fmt: skip
    for j in range(inner, outer):
        state = _row_tile(state, q, at, j * BN, cols, eta, rows, row0, row1, key0, key1, off, BEFORE, AFTER, kt, FACTOR,
                          CAP, SHARP, D, DP, BN, SOFTCAP, ETA, HAS_BEFORE, HAS_AFTER, False, PREC, UPCAST)  # fmt: skip
    for j in tl.range(outer, stop, num_stages=1):
        state = _row_tile(state, q, at, j * BN, cols, eta, rows, row0, row1, key0, key1, off, BEFORE, AFTER, kt, FACTOR,
                          CAP, SHARP, D, DP, BN, SOFTCAP, ETA, HAS_BEFORE, HAS_AFTER, True, PREC, UPCAST)  # fmt: skip
    top, high, low, lag = state
    inside = (rows >= row0) & (rows < row1)
    tl.store(OUT + line + rows, top, mask=inside)
    tl.store(OUT + plane + line + rows, high, mask=inside)
    tl.store(OUT + 2 * plane + line + rows, low, mask=inside)
    tl.store(OUT + 3 * plane + line + rows, lag, mask=inside)


@triton.jit
def _column_tile(
    state, k, Q, LSE, LEVELS, start, cols, keys, ETAS, row0, row1, key0, key1, off, BEFORE, AFTER, qt, FACTOR, CAP,
    SHARP, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, SOFTCAP: tl.constexpr, ETA: tl.constexpr,
    HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, MASKED: tl.constexpr, COLUMNS: tl.constexpr,
    BOUND_COUNT: tl.constexpr, COUNTERS: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    high, low, counts = state
    rows = start + tl.arange(0, BM)
    s = products(k, Q, start, row1, cols, qt, D, DP, BM, True, PREC, UPCAST)
    lse = tl.load(LSE + rows, mask=rows < row1, other=float("inf"))
    eta = lse
    if ETA > 0:
        eta = tl.load(ETAS + rows, mask=rows < row1, other=0.0)
    d = logits(s, eta[None, :], FACTOR, CAP, SHARP, SOFTCAP, ETA) - lse[None, :]
    if MASKED:
        seen = visible(rows[None, :], keys[:, None], row0, row1, key0, key1, off, BEFORE, AFTER, HAS_BEFORE, HAS_AFTER)
        d = tl.where(seen, d, -1e30)
    if COLUMNS:
        high, low = add_pair(high, low, tl.sum(tl.exp2(d), 1))
    if BOUND_COUNT == 2:
        # Two counters share a word: a tile has fewer than 2^16 rows.
        both = tl.where(d >= tl.load(LEVELS), 1, 0) + tl.where(d >= tl.load(LEVELS + 1), 65536, 0)
        both = tl.sum(both, 1)
        slot = tl.arange(0, COUNTERS)[None, :]
        counts += tl.where(slot == 0, (both & 65535)[:, None], (both >> 16)[:, None])
    else:
        for index in tl.static_range(BOUND_COUNT):
            more = tl.sum(tl.where(d >= tl.load(LEVELS + index), 1, 0), 1)
            counts += tl.where(tl.arange(0, COUNTERS)[None, :] == index, more[:, None], 0)
    return high, low, counts


@triton.jit(do_not_specialize=SIZES)
def _columns_kernel(
    Q, K, ETAS, LSE, LEVELS, MASS, LARGE, BOUNDS, B, H, G, T, S, BEFORE, AFTER, BLOCKS, plane, qb, qh, qt, kb, kh,
    kt, FACTOR, CAP, SHARP, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, ETA: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr,
    COLUMNS: tl.constexpr, BOUND_COUNT: tl.constexpr, COUNTERS: tl.constexpr, PREC: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Sum over the rows of every key's weights, and how many of them reach each bound."""
    plane = plane.to(tl.int64)
    nh, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    b, h = (nh // H).to(tl.int64), (nh % H).to(tl.int64)
    row0, row1, key0, key1, off = bounds_of(BOUNDS, b, B)
    first = block * BN
    if (first >= key1) | (first + BN <= key0):
        return
    keys, cols = first + tl.arange(0, BN), tl.arange(0, DP)
    k = load_rows(K + b * kb + (h // (H // G)) * kh, first, key1, cols, kt, D, DP, BN, True)
    at = Q + b * qb + h * qh
    line = nh.to(tl.int64) * T
    start, inner, outer, stop = row_tiles(
        first, tl.minimum(first + BN, key1) - 1, row0, row1, off, BEFORE, AFTER, BM, HAS_BEFORE, HAS_AFTER
    )
    zero = tl.zeros([BN], tl.float32)
    state = (zero, zero, tl.zeros([BN, COUNTERS], tl.int32))
    for j in tl.range(start, inner, num_stages=1):
        state = _column_tile(state, k, at, LSE + line, LEVELS, j * BM, cols, keys, ETAS + line, row0, row1, key0, key1,
                             off, BEFORE, AFTER, qt, FACTOR, CAP, SHARP, D, DP, BM, SOFTCAP, ETA, HAS_BEFORE, HAS_AFTER,
                             True, COLUMNS, BOUND_COUNT, COUNTERS, PREC, UPCAST)  # fmt: skip
    for j in range(inner, outer):
        state = _column_tile(state, k, at, LSE + line, LEVELS, j * BM, cols, keys, ETAS + line, row0, row1, key0, key1,
                             off, BEFORE, AFTER, qt, FACTOR, CAP, SHARP, D, DP, BM, SOFTCAP, ETA, HAS_BEFORE, HAS_AFTER,
                             False, COLUMNS, BOUND_COUNT, COUNTERS, PREC, UPCAST)  # fmt: skip
    for j in tl.range(outer, stop, num_stages=1):
        state = _column_tile(state, k, at, LSE + line, LEVELS, j * BM, cols, keys, ETAS + line, row0, row1, key0, key1,
                             off, BEFORE, AFTER, qt, FACTOR, CAP, SHARP, D, DP, BM, SOFTCAP, ETA, HAS_BEFORE, HAS_AFTER,
                             True, COLUMNS, BOUND_COUNT, COUNTERS, PREC, UPCAST)  # fmt: skip
    high, low, counts = state
    inside = (keys >= key0) & (keys < key1)
    line = nh.to(tl.int64) * S
    if COLUMNS:
        tl.store(MASS + line + keys, high, mask=inside)
        tl.store(MASS + plane + line + keys, low, mask=inside)
    slot = tl.arange(0, COUNTERS)[None, :]
    to = LARGE + slot * plane + (line + keys)[:, None]
    tl.store(to, counts, mask=inside[:, None] & (slot < BOUND_COUNT))


def softmax_sums(q: torch.Tensor, k: torch.Tensor, request: Request) -> dict[str, torch.Tensor]:
    """Row statistics in float64, column masses, and counts of weights that reach the near-zero bounds.

    Returns
    -------
    dict
        "mass", "entropy", "maximum" (B, H, T); "columns" (B, H, S) and "large" (B, H, bounds) where asked for.
    """
    q, k = with_unit_stride(q), with_unit_stride(k)
    b, h, t = q.shape[:3]
    g, s = k.shape[1:3]
    where, device = Positions(request, q.device), q.device
    eta = request.eta_threshold is not None
    etas = request.eta_threshold.float().contiguous() if request.eta_threshold is not None else where.bounds
    cap = request.softcap or 1.0
    plain = request.softcap is None and not eta
    factor = request.scale / cap * (LOG2_E if plain else 1.0)
    numbers = (factor, cap * (1.0 if eta else LOG2_E), request.eta_sharpness)
    fixed = {
        **flags_of(q), **where.flags, "SOFTCAP": request.softcap is not None,
        "ETA": 0 if not eta else 1 if request.eta_reading == "logit" else 2,
    }  # fmt: skip
    sizes = (b, h, g, t)
    strides = (*q.stride()[:3], *k.stride()[:3])
    rows = torch.zeros((4, b, h, t), dtype=torch.float32, device=device)
    rows[0] = FLOOR
    tiles = _fitted(ROW_TILES, fixed["DP"], q.dtype)
    blocks = triton.cdiv(t, tiles["BM"])
    _rows_kernel[(b * h * blocks,)](
        q, k, etas, rows, where.bounds, *sizes, where.before, where.after, blocks, b * h * t, *strides, *numbers,
        **fixed, **tiles,
    )  # fmt: skip
    # Few operations: each costs a launch, which is what short rows wait for.
    top, total, lag = rows[0].double(), rows[1:3].sum(0, dtype=torch.float64), rows[3].double()
    empty = total == 0
    # The largest key alone adds 1, so the rows that this changes are the empty ones.
    safe = total.clamp_min(1.0)
    base, norm, lift = top, safe, safe.reciprocal()
    if request.sinks is not None:
        sink = request.sinks[:, None] * LOG2_E
        base = torch.maximum(top, sink)
        norm = safe * (top - base).exp2() + (sink - base).exp2()
        lift = (top - base).exp2() / norm
    out = {
        "mass": total * lift,
        "entropy": torch.addcdiv(safe.log(), lag, safe, value=-math.log(2.0)),
        "maximum": lift.masked_fill_(empty, 0.0),
    }
    columns, near = request.wants("columns"), len(request.near_zero) if request.wants("near_zero") else 0
    if columns or near:
        lse = norm.log2().add_(base).masked_fill_(empty, torch.inf).float()
        mass = torch.zeros((2, b, h, s), dtype=torch.float32, device=device)
        large = torch.zeros((max(near, 1), b, h, s), dtype=torch.int32, device=device)
        levels = padded_list(tuple(math.log2(x) for x in request.near_zero), device)
        tiles = _fitted(COLUMN_TILES, fixed["DP"], q.dtype)
        blocks = triton.cdiv(s, tiles["BN"])
        _columns_kernel[(b * h * blocks,)](
            q, k, etas, lse, levels, mass, large, where.bounds, *sizes, s, where.before, where.after, blocks,
            b * h * s, *strides, *numbers, **fixed, COLUMNS=columns, BOUND_COUNT=near, COUNTERS=next_power(near),
            **tiles,
        )  # fmt: skip
        if columns:
            out["columns"] = mass.sum(0, dtype=torch.float64)
        if near:
            out["large"] = large.sum(-1, dtype=torch.int64).permute(1, 2, 0)
    return out


def _fitted(tiles: dict[str, int], width: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile shapes for a padded head dim."""
    if INTERPRETED:
        return {"BM": 32, "BN": 32}
    wide = width * (2 if dtype == torch.float32 else 1)
    if wide <= 64:
        return tiles
    if wide <= 128:
        return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2}
    return {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 1} if wide <= 256 else {
        "BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
