"""Attention over the listed blocks, shared evenly, and the sum of its parts. Imports triton: load this module lazily.

The lists of all units, one after another, are cut into equal shares, one a program, so that the load is balanced
whatever the pattern. A program that meets unit u writes its part at place program + u: both only grow, so no two
parts share a place, and the parts of a unit lie side by side in a fixed order. No float is added atomically.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import dot, higher, narrow, rectified_power
from .triton_cache import SIZES, cache_rows, query_rows, row_thresholds, unit_of, wait_for_predecessor


@triton.jit
def _all_blocks(TOTALS, UNITS, UB: tl.constexpr):
    """Number of listed blocks."""
    total = UNITS * 0
    for first in range(0, UNITS, UB):
        index = first + tl.arange(0, UB)
        total += tl.sum(tl.load(TOTALS + index, mask=index < UNITS, other=0), 0)
    return total


@triton.jit
def _score(
    q, K, TABLE, first, keys, length, page_stride, row_stride, PAGE_SIZE, cols, SCALE, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PLACE: tl.constexpr, PREC: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    k = cache_rows(K, TABLE, first, keys, length, keys, page_stride, row_stride, PAGE_SIZE, cols, D, DP, PLACE, False)
    return dot(q, tl.trans(k), tl.zeros([BM, BN], tl.float32), PREC, UPCAST) * SCALE


@triton.jit
def _add(acc, w, v, PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr):
    if WIDE:
        # float16 would flush small weights to 0; a tf32 product keeps its mantissa and has room for them.
        return dot(w, v.to(tl.float32), acc, PREC, UPCAST)
    return dot(narrow(w, v.dtype, UPCAST), v, acc, PREC, UPCAST)


@triton.jit(do_not_specialize=SIZES)
def attend_kernel(
    Q1, K1, Q2, K2, V, TAU, LAM, LENGTHS, TABLE, PACKED, TOTALS, OUT, PEAK, MASS, ALIVE, UNITS, G, H, T, S, ROWS,
    ROW_BLOCKS, NB, PAGE_SIZE, MAX_PAGES, PROGRAMS, qb1, qh1, qt1, qb2, qh2, qt2, kb1, kg1, ks1, kb2, kg2, ks2, vb,
    vg, vs, tau_b, tau_h, tau_t, SCALE, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, UB: tl.constexpr, VIEWS: tl.constexpr,
    SOFTMAX: tl.constexpr, POWER: tl.constexpr, RAGGED: tl.constexpr, PLACE: tl.constexpr,
    NORMALIZE: tl.constexpr, LAZY: tl.constexpr, COUNTED: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(EARLY)
    index = tl.program_id(0)
    total = _all_blocks(TOTALS, UNITS, UB)
    # Never more shares than blocks: each has to write a part.
    shares = tl.minimum(PROGRAMS, total)
    if index >= shares:
        return
    low = (index.to(tl.int64) * total // shares).to(tl.int32)
    high = ((index + 1).to(tl.int64) * total // shares).to(tl.int32)
    # The unit that the share begins in, and the place where that unit's list begins.
    unit, start, before = index * 0, index * 0, index * 0
    for first in range(0, UNITS, UB):
        at = first + tl.arange(0, UB)
        number = tl.load(TOTALS + at, mask=at < UNITS, other=0)
        passed = ((before + tl.cumsum(number, 0)) <= low) & (at < UNITS)
        unit += tl.sum(passed.to(tl.int32), 0)
        start += tl.sum(tl.where(passed, number, 0), 0)
        before += tl.sum(number, 0)
    cols, vcols = tl.arange(0, DP), tl.arange(0, EP)
    # Steps a block, or blocks a step.
    SUB: tl.constexpr = BLOCK // BN if BLOCK > BN else 1
    GROUP: tl.constexpr = BN // BLOCK if BN > BLOCK else 1
    while low < high:
        number = tl.load(TOTALS + unit)
        stop = tl.minimum(high, start + number)
        if low < stop:
            b, g, head, token, exists = unit_of(unit, G, H, T, ROWS, ROW_BLOCKS, BM)
            length = S
            if RAGGED:
                length = tl.minimum(tl.maximum(tl.load(LENGTHS + b), 0), S)
            last = tl.where(exists, length - T + token, -1)
            tau = row_thresholds(TAU, b, head, token, exists, tau_b, tau_h, tau_t)
            q1 = query_rows(Q1, b, head, token, exists, qb1, qh1, qt1, cols, D, NORMALIZE, UPCAST)
            q2 = q1
            lam = 0.0
            if VIEWS == 2:
                q2 = query_rows(Q2, b, head, token, exists, qb2, qh2, qt2, cols, D, NORMALIZE, UPCAST)
                lam = tl.load(LAM + head, mask=exists, other=0.0)[:, None]
            table = TABLE + b.to(tl.int64) * MAX_PAGES
            k1_at, k2_at, v_at = K1 + g.to(tl.int64) * kg1, K2 + g.to(tl.int64) * kg2, V + g.to(tl.int64) * vg
            if PLACE == 0 or PLACE == 3:
                k1_at += b.to(tl.int64) * kb1
                k2_at += b.to(tl.int64) * kb2
                v_at += b.to(tl.int64) * vb
            list_at = PACKED + unit.to(tl.int64) * NB
            acc = tl.zeros([BM, EP], tl.float32)
            peak = tl.full([BM], float("-inf"), tl.float32)
            # Summed over keys at the end: a sum of each tile would be one more exchange between warps.
            mass = tl.zeros([BM, BN], tl.float32)
            survivors = tl.zeros([BM], tl.int32)
            lane = tl.arange(0, BN)
            for i in range(tl.cdiv((stop - low) * SUB, GROUP)):
                if GROUP == 1:
                    begin = tl.load(list_at + (low - start) + i // SUB) * BLOCK + (i % SUB) * BN
                    keys = begin + lane
                else:
                    slot = (low - start) + i * GROUP + lane // BLOCK
                    begin = i
                    block = tl.load(list_at + slot, mask=slot < stop - start, other=0)
                    # Past the share: a key that nobody sees.
                    keys = tl.where(slot < stop - start, block * BLOCK + lane % BLOCK, 0x7FFFFFFF)
                s = _score(q1, k1_at, table, begin, keys, length, kb1, ks1, PAGE_SIZE, cols, SCALE, D, DP, BM, BN,
                           PLACE, PREC, UPCAST)  # fmt: skip
                seen = keys[None, :] <= last[:, None]
                if SOFTMAX:
                    # Not `>=`: what is no number is kept, and makes its row NaN.
                    alive = seen & ((s < tau[:, None]) == 0)
                    s = tl.where(alive, s, float("-inf"))
                    top = tl.maximum(peak, tl.max(s, 1))
                    # Nothing alive so far: any finite reference keeps exp2 away from inf - inf.
                    base = tl.where(top == float("-inf"), 0.0, top)
                    w = tl.exp2((s - base[:, None]) * 1.4426950408889634)
                    shrink = tl.exp2((peak - base) * 1.4426950408889634)
                    mass = mass * shrink[:, None] + w
                    acc = acc * shrink[:, None]
                    peak = top
                else:
                    # Masked before the rectifier: with a negative threshold a masked score would survive.
                    x = higher(tl.where(seen, s - tau[:, None], 0.0), 0.0)
                    w = rectified_power(x, POWER)
                    alive = x > 0.0
                    if VIEWS == 2:
                        s = _score(q2, k2_at, table, begin, keys, length, kb2, ks2, PAGE_SIZE, cols, SCALE, D, DP, BM,
                                   BN, PLACE, PREC, UPCAST)  # fmt: skip
                        y = higher(tl.where(seen, s - tau[:, None], 0.0), 0.0)
                        w -= lam * rectified_power(y, POWER)
                        alive = alive | (y > 0.0)
                if COUNTED:
                    survivors += tl.sum(alive.to(tl.int32), 1)
                # LAZY reads the values of survivors only, but cannot load them before the scores are there.
                wanted = tl.max(alive.to(tl.int32), 0) > 0
                v = cache_rows(v_at, table, begin, keys, length, wanted, vb, vs, PAGE_SIZE, vcols, E, EP, PLACE,
                               LAZY)  # fmt: skip
                acc = _add(acc, w, v, PREC, WIDE, UPCAST)
            row = (index + unit).to(tl.int64) * tl.minimum(ROWS, BM) + tl.arange(0, BM)
            tl.store(OUT + row[:, None] * E + vcols[None, :], acc, mask=exists[:, None] & (vcols < E)[None, :])
            if SOFTMAX:
                tl.store(PEAK + row, peak, mask=exists)
                tl.store(MASS + row, tl.sum(mass, 1), mask=exists)
            if COUNTED:
                tl.store(ALIVE + row, survivors, mask=exists)
        low = stop
        start += number
        unit += 1


@triton.jit(do_not_specialize=SIZES)
def combine_kernel(
    PARTS, PEAK, MASS, ALIVE, TOTALS, TAU, OUT, TOP, LSE, SURVIVORS, UNITS, G, H, T, ROWS, ROW_BLOCKS, PROGRAMS,
    tau_b, tau_h, tau_t, EPS,
    E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, UB: tl.constexpr, SPAN: tl.constexpr,
    SOFTMAX: tl.constexpr, RMS: tl.constexpr, COUNTED: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One row of a unit a program: join its parts, in order."""
    wait_for_predecessor(EARLY)
    per = tl.minimum(ROWS, BM)
    lane, unit = tl.program_id(0) % per, tl.program_id(0) // per
    row = (unit % ROW_BLOCKS) * BM + lane
    if row >= ROWS:
        return
    total = _all_blocks(TOTALS, UNITS, UB)
    start = unit * 0
    for first in range(0, unit, UB):
        index = first + tl.arange(0, UB)
        start += tl.sum(tl.load(TOTALS + index, mask=index < unit, other=0), 0)
    number = tl.load(TOTALS + unit)
    # Programs whose shares hold its first and its last block.
    whole = tl.maximum(total, 1).to(tl.int64)
    shares = tl.minimum(PROGRAMS, total)
    first_part = (((start + 1).to(tl.int64) * shares - 1) // whole).to(tl.int32) + unit
    parts = (((start + number).to(tl.int64) * shares - 1) // whole).to(tl.int32) + unit + 1 - first_part
    parts = tl.where(number > 0, parts, 0)
    cols = tl.arange(0, EP)
    peak = tl.full([SPAN], float("-inf"), tl.float32)
    if SOFTMAX:
        for at in range(0, parts, SPAN):
            index = at + tl.arange(0, SPAN)
            place = (first_part + index).to(tl.int64) * per + lane
            peak = tl.maximum(peak, tl.load(PEAK + place, mask=index < parts, other=float("-inf")))
    top = tl.max(peak, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros([EP], tl.float32)
    mass = tl.zeros([SPAN], tl.float32)
    survivors = tl.zeros([SPAN], tl.int32)
    for at in range(0, parts, SPAN):
        index = at + tl.arange(0, SPAN)
        inside = index < parts
        place = (first_part + index).to(tl.int64) * per + lane
        part = tl.load(PARTS + place[:, None] * E + cols[None, :], mask=inside[:, None] & (cols < E)[None, :],
                       other=0.0)  # fmt: skip
        if SOFTMAX:
            one = tl.load(PEAK + place, mask=inside, other=float("-inf"))
            shrink = tl.exp2((one - base) * 1.4426950408889634)
            mass += shrink * tl.load(MASS + place, mask=inside, other=0.0)
            part = part * shrink[:, None]
        if COUNTED:
            survivors += tl.load(ALIVE + place, mask=inside, other=0)
        acc += tl.sum(part, 0)
    # Row of the output (B, H, T, E).
    bg = unit // ROW_BLOCKS
    b, head, token = bg // G, (bg % G) * (H // G) + row // T, row % T
    out = (b * H + head).to(tl.int64) * T + token
    if SOFTMAX:
        weight = tl.sum(mass, 0)
        # No score was below a threshold that is no number.
        tau = tl.load(TAU + b.to(tl.int64) * tau_b + head.to(tl.int64) * tau_h + token.to(tl.int64) * tau_t)
        weight = tl.where((tau == tau) | (weight == 0.0), weight, float("nan"))
        some = weight != 0.0
        acc = acc / tl.where(some, weight, 1.0)
        if COUNTED:
            lse = tl.where(some, base + tl.log(tl.where(some, weight, 1.0)), top)
            tl.store(TOP + out, tl.where((weight == weight) | (top == float("inf")), top, float("nan")))
            tl.store(LSE + out, lse)
    if RMS:
        acc = acc * tl.rsqrt(tl.sum(acc * acc, 0) / E + EPS)
    if COUNTED:
        tl.store(SURVIVORS + out, tl.sum(survivors, 0))
    tl.store(OUT + out * E + cols, narrow(acc, OUT.dtype.element_ty, UPCAST), mask=cols < E)
