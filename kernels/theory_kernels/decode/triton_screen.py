"""Which blocks of keys can hold a score of at least tau, as one list a unit. Imports triton: load this module lazily.

Every bound is an upper bound of the score in the arithmetic of :mod:`.triton_decode`, not only of the real one: its
derivation is in :mod:`.bounds` and kernels/README.md. A comparison with NaN keeps the block.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import dot
from .triton_cache import SIZES, query_rows, row_thresholds, unit_of, wait_for_predecessor


@triton.jit
def _step(q):
    """Step of the int8 rounding of each row."""
    step = tl.max(tl.abs(q.to(tl.float32)), 1) / 127.0
    return tl.where(step > 0.0, step, 1.0)


@triton.jit
def _side(q, step, KIND: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr):
    """What a block's vectors are multiplied with: for low and high the negative part beside the positive one."""
    if KIND == 5:
        rounded = tl.floor(q.to(tl.float32) / step[:, None] + 0.5)
        return tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)
    elif KIND == 2:
        wide = q.to(tl.float32)
        both = tl.join(tl.minimum(wide, 0.0), tl.maximum(wide, 0.0)).to(q.dtype)
        return tl.reshape(tl.permute(both, (0, 2, 1)), [BM, 2 * DP])
    else:
        return q


@triton.jit
def _upper(
    side, size, total, step, VECTORS, place, first, NB, largest, scalar, other, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, ULP: tl.constexpr,
    PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Upper bound of the products that the attention kernel computes, (BM, STEP).

    ``KIND``: 1 norm, 2 low and high of every channel, 3 ball, 4 cap, 5 int8. ``size``, ``total`` and ``step``: see
    :func:`_norms`; ``largest``, ``scalar``, ``other``: see :func:`_numbers`; ``place``: index of the first block.
    """
    reach = size[:, None] * largest[None, :]
    bound = reach
    if KIND == 5:
        cols, row = tl.arange(0, DP), tl.arange(0, STEP * BLOCK)
        at = VECTORS + ((place + first) * (BLOCK * D) + row * D)[:, None] + cols[None, :]
        keys = tl.load(at, mask=(first * BLOCK + row < NB * BLOCK)[:, None] & (cols < D)[None, :], other=0)
        if UPCAST:
            product = tl.dot(side.to(tl.float32), tl.trans(keys).to(tl.float32))
        else:
            product = tl.dot(side, tl.trans(keys), out_dtype=tl.int32).to(tl.float32)
        most = tl.max(tl.reshape(product, [BM, STEP, BLOCK]), 2)
        edge = (step[:, None] * scalar[None, :]) * most + (size + total)[:, None] * other[None, :]
        edge += total[:, None] * largest[None, :] + (8 * ULP) * reach
        bound = tl.minimum(reach, edge)
    elif KIND >= 2:
        SPAN: tl.constexpr = 2 if KIND == 2 else 1
        blocks = first + tl.arange(0, STEP)
        inside = blocks < NB
        column = tl.arange(0, SPAN * DP)
        at = VECTORS + (place * (SPAN * D) + blocks.to(tl.int64) * (SPAN * D))[:, None]
        at = at + (column // DP * D + column % DP)[None, :]
        vector = tl.load(at, mask=inside[:, None] & (column % DP < D)[None, :], other=0.0)
        along = dot(side, tl.trans(vector), reach * 0.0, PREC, UPCAST)
        if KIND == 2:
            bound = tl.minimum(reach, along + ((2 * D + 8) * ULP) * (total[:, None] * largest[None, :]))
        elif KIND == 3:
            along += size[:, None] * scalar[None, :] + ((D + 8) * ULP * 1.01) * reach
            bound = tl.minimum(reach, along)
        else:
            wide = vector.to(tl.float32)
            length = tl.sqrt_rn(tl.sum(wide * wide, 1))
            along = along / tl.where(length > 0.0, length, 1.0)[None, :]
            along = tl.minimum(along + ((2 * D + 16) * ULP) * size[:, None], size[:, None])
            across = tl.sqrt_rn(tl.maximum((size[:, None] - along) * (size[:, None] + along), 0.0))
            aside = tl.sqrt_rn(tl.maximum((largest - scalar) * (largest + scalar), 0.0))
            edge = along * scalar[None, :] + across * aside[None, :] + (16 * ULP) * reach
            within = (along * largest[None, :] >= size[:, None] * scalar[None, :]) | (length == 0.0)[None, :]
            bound = tl.where(within, reach, tl.minimum(reach, edge))
    return bound + ((D + 16) * ULP) * reach + 1e-34


@triton.jit
def _norms(q, side, step, KIND: tl.constexpr):
    """Euclidean norms of query rows, and what their int8 rounding misses or else absolute norms; a little too large."""
    wide = q.to(tl.float32)
    size = tl.sqrt_rn(tl.sum(wide * wide, 1)) * 1.0001 + 2e-18
    if KIND == 5:
        miss = wide - side.to(tl.float32) * step[:, None]
        total = tl.sqrt_rn(tl.sum(miss * miss, 1)) * 1.0001 + 2e-18 + 1e-6 * size
    else:
        total = tl.sum(tl.abs(wide), 1) * 1.0001
    return size, total


@triton.jit
def _numbers(NORM, SCALARS, place, blocks, NB, KIND: tl.constexpr):
    """Largest norm of each block; its radius, least projection, or step; and its largest residual."""
    inside = blocks < NB
    largest = tl.load(NORM + place + blocks, mask=inside, other=0.0)
    scalar, other = largest, largest
    if KIND == 5:
        scalar = tl.load(SCALARS + (place + blocks) * 2, mask=inside, other=0.0)
        other = tl.load(SCALARS + (place + blocks) * 2 + 1, mask=inside, other=0.0)
    elif KIND >= 3:
        scalar = tl.load(SCALARS + place + blocks, mask=inside, other=0.0)
    return largest, scalar, other


@triton.jit(do_not_specialize=SIZES)
def screen_kernel(
    Q1, Q2, TAU, LENGTHS, NORM1, VECTORS1, SCALARS1, NORM2, VECTORS2, SCALARS2, LISTS, COUNTS, G, H, T, S, ROWS,
    ROW_BLOCKS, NB, TILES, qb1, qh1, qt1, qb2, qh2, qt2, tau_b, tau_h, tau_t, SCALE, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, VIEWS: tl.constexpr, RAGGED: tl.constexpr, NORMALIZE: tl.constexpr, ULP: tl.constexpr,
    PREC: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """COUNT blocks a program, STEP at a time: those that may hold a survivor, in order, and how many."""
    wait_for_predecessor(EARLY)
    tile, unit = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    b, g, head, token, exists = unit_of(unit, G, H, T, ROWS, ROW_BLOCKS, BM)
    length = S
    if RAGGED:
        length = tl.minimum(tl.maximum(tl.load(LENGTHS + b), 0), S)
    first = tile * COUNT
    stop = tl.minimum(first + COUNT, tl.cdiv(length, BLOCK))
    cols, lane = tl.arange(0, DP), tl.arange(0, STEP)
    last = tl.where(exists, length - T + token, -1)
    out = LISTS + unit.to(tl.int64) * NB + first
    found = tile * 0
    if KIND == 0:
        for at in range(first, stop, STEP):
            kept = tl.max(tl.where(((at + lane) * BLOCK)[None, :] <= last[:, None], 1, 0), 0)
            tl.store(out + found + tl.cumsum(kept, 0) - kept, at + lane, mask=kept != 0)
            found += tl.sum(kept, 0)
    else:
        tau = row_thresholds(TAU, b, head, token, exists, tau_b, tau_h, tau_t)
        place = (b * G + g).to(tl.int64) * NB
        q1 = query_rows(Q1, b, head, token, exists, qb1, qh1, qt1, cols, D, NORMALIZE, UPCAST)
        step1 = _step(q1)
        side1 = _side(q1, step1, KIND, BM, DP)
        size1, total1 = _norms(q1, side1, step1, KIND)
        side2, size2, total2, step2 = side1, size1, total1, step1
        if VIEWS == 2:
            q2 = query_rows(Q2, b, head, token, exists, qb2, qh2, qt2, cols, D, NORMALIZE, UPCAST)
            step2 = _step(q2)
            side2 = _side(q2, step2, KIND, BM, DP)
            size2, total2 = _norms(q2, side2, step2, KIND)
        # Loaded a step ahead: the pipeline takes care of the vectors only.
        largest1, scalar1, other1 = _numbers(NORM1, SCALARS1, place, first + lane, NB, KIND)
        largest2, scalar2, other2 = largest1, scalar1, other1
        if VIEWS == 2:
            largest2, scalar2, other2 = _numbers(NORM2, SCALARS2, place, first + lane, NB, KIND)
        for at in range(first, stop, STEP):
            blocks = at + lane
            upper = _upper(side1, size1, total1, step1, VECTORS1, place, at, NB, largest1, scalar1, other1, D, DP,
                           BM, STEP, BLOCK, KIND, ULP, PREC, UPCAST)  # fmt: skip
            alive = tl.where(upper * SCALE + 1e-37 < tau[:, None], 0, 1)
            largest1, scalar1, other1 = _numbers(NORM1, SCALARS1, place, blocks + STEP, NB, KIND)
            if VIEWS == 2:
                upper = _upper(side2, size2, total2, step2, VECTORS2, place, at, NB, largest2, scalar2, other2, D,
                               DP, BM, STEP, BLOCK, KIND, ULP, PREC, UPCAST)  # fmt: skip
                alive = alive | tl.where(upper * SCALE + 1e-37 < tau[:, None], 0, 1)
                largest2, scalar2, other2 = _numbers(NORM2, SCALARS2, place, blocks + STEP, NB, KIND)
            alive = tl.where((blocks * BLOCK)[None, :] <= last[:, None], alive, 0)
            kept = tl.max(alive, 0)
            tl.store(out + found + tl.cumsum(kept, 0) - kept, blocks, mask=kept != 0)
            found += tl.sum(kept, 0)
    tl.store(COUNTS + unit * TILES + tile, found)


@triton.jit(do_not_specialize=SIZES)
def pack_kernel(
    LISTS, COUNTS, PACKED, TOTALS, NB, TILES, COUNT: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr
):
    """Join the lists of a unit's tiles, in order."""
    wait_for_predecessor(EARLY)
    tile, unit = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    before = tile * 0
    for first in range(0, tile, CHUNK):
        index = first + tl.arange(0, CHUNK)
        before += tl.sum(tl.load(COUNTS + unit * TILES + index, mask=index < tile, other=0), 0)
    own = tl.load(COUNTS + unit * TILES + tile)
    lane = tl.arange(0, COUNT)
    row = unit.to(tl.int64) * NB
    block = tl.load(LISTS + row + tile * COUNT + lane, mask=lane < own, other=0)
    tl.store(PACKED + row + before + lane, block, mask=lane < own)
    if tile == TILES - 1:
        tl.store(TOTALS + unit, before + own)
