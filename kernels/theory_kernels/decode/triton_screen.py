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
def _vectors(VECTORS, first, blocks, inside, cols, STRIDE: tl.constexpr, D: tl.constexpr):
    """One vector of each block, (COUNT, DP)."""
    at = VECTORS + (first + blocks.to(tl.int64) * STRIDE)[:, None] + cols[None, :]
    return tl.load(at, mask=inside[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def _upper(
    q, NORM, VECTORS, SCALARS, place, blocks, inside, cols, D: tl.constexpr, KIND: tl.constexpr, ULP: tl.constexpr,
    PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Upper bound of the products that the attention kernel computes, (BM, COUNT).

    ``KIND``: 1 norm, 2 low and high of every channel, 3 ball, 4 cap. ``place``: index of the unit's first block.
    """
    wide = q.to(tl.float32)
    size = tl.sqrt_rn(tl.sum(wide * wide, 1)) * 1.0001 + 2e-18
    largest = tl.load(NORM + place + blocks, mask=inside, other=0.0)
    reach = size[:, None] * largest[None, :]
    zero = reach * 0.0
    bound = reach
    if KIND == 2:
        low = _vectors(VECTORS, place * 2 * D, blocks, inside, cols, 2 * D, D)
        high = _vectors(VECTORS, place * 2 * D + D, blocks, inside, cols, 2 * D, D)
        box = dot(tl.minimum(wide, 0.0).to(q.dtype), tl.trans(low), zero, PREC, UPCAST)
        box = dot(tl.maximum(wide, 0.0).to(q.dtype), tl.trans(high), box, PREC, UPCAST)
        total = tl.sum(tl.abs(wide), 1) * 1.0001
        bound = tl.minimum(reach, box + ((2 * D + 8) * ULP) * (total[:, None] * largest[None, :]))
    if KIND == 3:
        center = _vectors(VECTORS, place * D, blocks, inside, cols, D, D)
        radius = tl.load(SCALARS + place + blocks, mask=inside, other=0.0)
        along = dot(q, tl.trans(center), zero, PREC, UPCAST)
        along += size[:, None] * radius[None, :] + ((D + 8) * ULP * 1.01) * reach
        bound = tl.minimum(reach, along)
    if KIND == 4:
        axis = _vectors(VECTORS, place * D, blocks, inside, cols, D, D)
        least = tl.load(SCALARS + place + blocks, mask=inside, other=0.0)
        length = tl.sqrt_rn(tl.sum(axis.to(tl.float32) * axis.to(tl.float32), 1))
        along = dot(q, tl.trans(axis), zero, PREC, UPCAST) / tl.where(length > 0.0, length, 1.0)[None, :]
        along = tl.minimum(along + ((2 * D + 16) * ULP) * size[:, None], size[:, None])
        across = tl.sqrt_rn(tl.maximum((size[:, None] - along) * (size[:, None] + along), 0.0))
        aside = tl.sqrt_rn(tl.maximum((largest - least) * (largest + least), 0.0))
        edge = along * least[None, :] + across * aside[None, :] + (16 * ULP) * reach
        within = (along * largest[None, :] >= size[:, None] * least[None, :]) | (length == 0.0)[None, :]
        bound = tl.where(within, reach, tl.minimum(reach, edge))
    return bound + ((D + 16) * ULP) * reach + 1e-34


@triton.jit(do_not_specialize=SIZES)
def screen_kernel(
    Q1, Q2, TAU, LENGTHS, NORM1, VECTORS1, SCALARS1, NORM2, VECTORS2, SCALARS2, LISTS, COUNTS, G, H, T, S, ROWS,
    ROW_BLOCKS, NB, TILES, qb1, qh1, qt1, qb2, qh2, qt2, tau_b, tau_h, tau_t, SCALE, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    VIEWS: tl.constexpr, RAGGED: tl.constexpr, NORMALIZE: tl.constexpr, ULP: tl.constexpr, PREC: tl.constexpr,
    EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """COUNT blocks a program: those that may hold a survivor, in order, and how many."""
    wait_for_predecessor(EARLY)
    tile, unit = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    b, g, head, token, exists = unit_of(unit, G, H, T, ROWS, ROW_BLOCKS, BM)
    length = S
    if RAGGED:
        length = tl.minimum(tl.maximum(tl.load(LENGTHS + b), 0), S)
    if tile * COUNT * BLOCK >= length:
        tl.store(COUNTS + unit * TILES + tile, 0)
        return
    cols = tl.arange(0, DP)
    blocks = tile * COUNT + tl.arange(0, COUNT)
    inside = blocks < NB
    last = tl.where(exists, length - T + token, -1)
    alive = tl.where((blocks * BLOCK)[None, :] <= last[:, None], 1, 0)
    if KIND > 0:
        tau = row_thresholds(TAU, b, head, token, exists, tau_b, tau_h, tau_t)
        place = (b * G + g).to(tl.int64) * NB
        q = query_rows(Q1, b, head, token, exists, qb1, qh1, qt1, cols, D, NORMALIZE, UPCAST)
        upper = _upper(q, NORM1, VECTORS1, SCALARS1, place, blocks, inside, cols, D, KIND, ULP, PREC, UPCAST)
        low = tl.where(upper * SCALE + 1e-37 < tau[:, None], 0, 1)
        if VIEWS == 2:
            q = query_rows(Q2, b, head, token, exists, qb2, qh2, qt2, cols, D, NORMALIZE, UPCAST)
            upper = _upper(q, NORM2, VECTORS2, SCALARS2, place, blocks, inside, cols, D, KIND, ULP, PREC, UPCAST)
            low = low | tl.where(upper * SCALE + 1e-37 < tau[:, None], 0, 1)
        alive = alive & low
    kept = tl.max(alive, 0) * inside.to(tl.int32)
    at = tl.cumsum(kept, 0) - kept
    tl.store(LISTS + unit.to(tl.int64) * NB + tile * COUNT + at, blocks, mask=kept != 0)
    tl.store(COUNTS + unit * TILES + tile, tl.sum(kept, 0))


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
