"""Score moments, one program a block of rows. Imports triton.

They need every pair, so nothing is skipped. Sums by row, as pairs of float32, about the pilot means.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..primitives import load_rows
from .moments import MomentTotals
from .request import Request
from .results import ScoreStatistics
from .triton_common import (
    SIZES,
    Positions,
    add_pair,
    bounds_of,
    flags_of,
    key_tiles,
    next_power,
    padded_list,
    products,
    square_tiles,
    visible,
    with_unit_stride,
)  # fmt: skip
from .visibility import pair_counts

LOG2_E = 1.4426950408889634
# Planes a view: sum (a pair), sum of squares (a pair), minimum, maximum; then the cross sum (a pair), view 0 only.
PLANES = 8


@triton.jit
def _sums(
    state, q, K, start, cols, pairs, shift, kt, key1, LEVELS, EXPONENTS, D: tl.constexpr, DP: tl.constexpr,
    BN: tl.constexpr, LEVEL_COUNT: tl.constexpr, LEVEL_SLOTS: tl.constexpr, EXPONENT_COUNT: tl.constexpr,
    EXPONENT_SLOTS: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    first, first_low, second, second_low, least, most, over, tops, totals = state
    s = products(q, K, start, key1, cols, kt, D, DP, BN, True, PREC, UPCAST)
    d = tl.where(pairs, s - shift, 0.0)
    first, first_low = add_pair(first, first_low, tl.sum(d, 1))
    second, second_low = add_pair(second, second_low, tl.sum(d * d, 1))
    least = tl.minimum(least, tl.min(tl.where(pairs, s, float("inf")), 1))
    most = tl.maximum(most, tl.max(tl.where(pairs, s, float("-inf")), 1))
    for index in tl.static_range(LEVEL_COUNT):
        more = tl.sum((pairs & (s > tl.load(LEVELS + index))).to(tl.int32), 1)
        over += tl.where(tl.arange(0, LEVEL_SLOTS)[None, :] == index, more[:, None], 0)
    for index in tl.static_range(EXPONENT_COUNT):
        mine = tl.arange(0, EXPONENT_SLOTS)[None, :] == index
        z = tl.where(pairs, s * tl.load(EXPONENTS + index), -1e30)
        old = tl.max(tl.where(mine, tops, -1e30), 1)
        new = tl.maximum(old, tl.max(z, 1))
        e = tl.sum(tl.exp2(tl.where(pairs, z - new[:, None], -1e30)), 1)
        tops = tl.where(mine, new[:, None], tops)
        totals = tl.where(mine, totals * tl.exp2(old - new)[:, None] + e[:, None], totals)
    return (first, first_low, second, second_low, least, most, over, tops, totals), d


@triton.jit
def _store(
    state, OUT, OVER, MGF, at, plane, inside, LEVEL_COUNT: tl.constexpr, LEVEL_SLOTS: tl.constexpr,
    EXPONENT_COUNT: tl.constexpr, EXPONENT_SLOTS: tl.constexpr,
):  # fmt: skip
    first, first_low, second, second_low, least, most, over, tops, totals = state
    tl.store(OUT + at, first, mask=inside)
    tl.store(OUT + plane + at, first_low, mask=inside)
    tl.store(OUT + 2 * plane + at, second, mask=inside)
    tl.store(OUT + 3 * plane + at, second_low, mask=inside)
    tl.store(OUT + 4 * plane + at, least, mask=inside)
    tl.store(OUT + 5 * plane + at, most, mask=inside)
    slot = tl.arange(0, LEVEL_SLOTS)[None, :]
    tl.store(OVER + at[:, None] + slot * plane, over, mask=inside[:, None] & (slot < LEVEL_COUNT))
    slot = tl.arange(0, EXPONENT_SLOTS)[None, :]
    kept = inside[:, None] & (slot < EXPONENT_COUNT)
    tl.store(MGF + at[:, None] + slot * plane, tops, mask=kept)
    tl.store(MGF + at[:, None] + (slot + EXPONENT_COUNT) * plane, totals, mask=kept)


@triton.jit(do_not_specialize=SIZES)
def _moments_kernel(
    Q1, K1, Q2, K2, SHIFT, LEVELS, EXPONENTS, OUT, OVER, MGF, BOUNDS, B, H, G, T, BEFORE, AFTER, GAP, BLOCKS, plane,
    qb, qh, qt, kb, kh, kt, q2b, q2h, q2t, k2b, k2h, k2t, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, VIEWS: tl.constexpr, CAUSAL: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr,
    LEVEL_COUNT: tl.constexpr, LEVEL_SLOTS: tl.constexpr, EXPONENT_COUNT: tl.constexpr,
    EXPONENT_SLOTS: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    plane = plane.to(tl.int64)
    nh = tl.program_id(0) // BLOCKS
    block = BLOCKS - 1 - tl.program_id(0) % BLOCKS
    b, h = (nh // H).to(tl.int64), (nh % H).to(tl.int64)
    row0, row1, key0, key1, off = bounds_of(BOUNDS, b, B)
    first = block * BM
    if (first >= row1) | (first + BM <= row0):
        return
    rows, cols = first + tl.arange(0, BM), tl.arange(0, DP)
    group = h // (H // G)
    q1 = load_rows(Q1 + b * qb + h * qh, first, row1, cols, qt, D, DP, BM, True)
    at1, at2 = K1 + b * kb + group * kh, K2 + b * k2b + group * k2h
    shift = tl.load(SHIFT + nh)
    q2, shift2 = q1, shift
    if VIEWS == 2:
        q2 = load_rows(Q2 + b * q2b + h * q2h, first, row1, cols, q2t, D, DP, BM, True)
        shift2 = tl.load(SHIFT + B * H + nh)
    start, _, _, stop = key_tiles(
        first, tl.minimum(first + BM, row1) - 1, key0, key1, off, BEFORE, AFTER, BN, HAS_BEFORE, HAS_AFTER
    )
    zero = tl.zeros([BM], tl.float32)
    over = tl.zeros([BM, LEVEL_SLOTS], tl.int32)
    tops = tl.zeros([BM, EXPONENT_SLOTS], tl.float32)
    one = (zero, zero, zero, zero, zero + float("inf"), zero - float("inf"), over, tops - 1e30, tops)
    two = one
    cross, cross_low = zero, zero
    for j in range(start, stop):
        keys = j * BN + tl.arange(0, BN)
        pairs = visible(rows[:, None], keys[None, :], row0, row1, key0, key1, off, BEFORE, AFTER, HAS_BEFORE, HAS_AFTER)
        apart = rows[:, None] + off - keys[None, :]
        if not CAUSAL:
            apart = tl.where(apart < 0, -apart, apart)
        pairs = pairs & (apart >= GAP)
        one, d1 = _sums(one, q1, at1, j * BN, cols, pairs, shift, kt, key1, LEVELS, EXPONENTS, D, DP, BN, LEVEL_COUNT,
                        LEVEL_SLOTS, EXPONENT_COUNT, EXPONENT_SLOTS, PREC, UPCAST)  # fmt: skip
        if VIEWS == 2:
            two, d2 = _sums(two, q2, at2, j * BN, cols, pairs, shift2, k2t, key1, LEVELS, EXPONENTS, D, DP, BN,
                            LEVEL_COUNT, LEVEL_SLOTS, EXPONENT_COUNT, EXPONENT_SLOTS, PREC, UPCAST)  # fmt: skip
            cross, cross_low = add_pair(cross, cross_low, tl.sum(d1 * d2, 1))
    inside = (rows >= row0) & (rows < row1)
    at = nh.to(tl.int64) * T + rows
    _store(one, OUT, OVER, MGF, at, plane, inside, LEVEL_COUNT, LEVEL_SLOTS, EXPONENT_COUNT, EXPONENT_SLOTS)
    if VIEWS == 2:
        tl.store(OUT + 6 * plane + at, cross, mask=inside)
        tl.store(OUT + 7 * plane + at, cross_low, mask=inside)
        _store(two, OUT + 8 * plane, OVER + LEVEL_COUNT * plane, MGF + 2 * EXPONENT_COUNT * plane, at, plane, inside,
               LEVEL_COUNT, LEVEL_SLOTS, EXPONENT_COUNT, EXPONENT_SLOTS)  # fmt: skip


def moments(
    views: list[tuple[torch.Tensor, torch.Tensor]], request: Request
) -> tuple[tuple[ScoreStatistics, ...], torch.Tensor | None]:
    """Score statistics of every view and their covariance; the rows are already normalized where asked for."""
    views = [(with_unit_stride(q), with_unit_stride(k)) for q, k in views]
    (q1, k1), (q2, k2) = views[0], views[-1]
    (b, h, t), g, count = q1.shape[:3], k1.shape[1], len(views)
    where, device = Positions(request, q1.device), q1.device
    totals = MomentTotals(views, request, 1.0, normalize=False)
    levels, exponents = len(request.levels), len(request.exponents)
    out = torch.zeros((2, PLANES, b, h, t), dtype=torch.float32, device=device)
    out[:, 4], out[:, 5] = torch.inf, -torch.inf
    over = torch.zeros((2, max(levels, 1), b, h, t), dtype=torch.int32, device=device)
    mgf = torch.zeros((2, 2, max(exponents, 1), b, h, t), dtype=torch.float32, device=device)
    tiles = square_tiles(q1, count)
    shift = totals.shift.float()
    totals.shift = shift.double()
    blocks = triton.cdiv(t, tiles["BM"])
    _moments_kernel[(b * h * blocks,)](
        q1, k1, q2, k2, shift.contiguous(), padded_list(request.levels, device),
        padded_list(tuple(x * LOG2_E for x in request.exponents), device), out, over, mgf, where.bounds, b, h, g, t,
        where.before, where.after, request.moment_gap, blocks, b * h * t, *q1.stride()[:3], *k1.stride()[:3],
        *q2.stride()[:3], *k2.stride()[:3], **flags_of(q1), **where.flags, **tiles, VIEWS=count,
        CAUSAL=request.see.causal, LEVEL_COUNT=levels, LEVEL_SLOTS=next_power(levels), EXPONENT_COUNT=exponents,
        EXPONENT_SLOTS=next_power(exponents),
    )  # fmt: skip
    totals.count = pair_counts(request.see, request.moment_gap)[:, None].repeat(1, h)
    for view in range(count):
        wide = out[view].double()
        totals.first[view] = (wide[0] + wide[1]).sum(-1)
        totals.second[view] = (wide[2] + wide[3]).sum(-1)
        totals.low[view], totals.high[view] = wide[4].amin(-1), wide[5].amax(-1)
        if levels:
            totals.over[view] = over[view, :levels].sum(-1, dtype=torch.int64).permute(1, 2, 0)
        if exponents:
            top, total = mgf[view, 0].double(), mgf[view, 1].double()
            logs = torch.where(total > 0, (top + total.log2()) / LOG2_E, -torch.inf)
            totals.mgf[view] = logs.logsumexp(-1).permute(1, 2, 0)
    if count == 2:
        totals.cross = (out[0, 6].double() + out[0, 7].double()).sum(-1)
    return totals.results()
