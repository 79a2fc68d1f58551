"""Bounds of the blocks that new keys lie in. Imports triton: load this module lazily."""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import maxima, narrow
from .triton_cache import SIZES, cache_rows


@triton.jit
def _norms(x):
    """Norms of the rows of x, a little too large."""
    return tl.sqrt_rn(tl.sum(x * x, 1)) * 1.0001 + 2e-18


@triton.jit(do_not_specialize=SIZES)
def bounds_kernel(
    K, TABLE, NORM, VECTORS, SCALARS, START, LENGTH, start_b, length_b, G, S, NB, TOUCHED, PAGE_SIZE, MAX_PAGES, kb, kg,
    ks, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PLACE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One block a program."""
    offset, bg = tl.program_id(0) % TOUCHED, tl.program_id(0) // TOUCHED
    b, g = bg // G, bg % G
    begin = tl.load(START + b * start_b)
    stop = tl.minimum(begin + tl.load(LENGTH + b * length_b), S)
    block = tl.maximum(begin, 0) // BLOCK + offset
    first = block * BLOCK
    if first >= stop:
        return
    cols = tl.arange(0, DP)
    at = K + g.to(tl.int64) * kg
    if PLACE == 0:
        at += b.to(tl.int64) * kb
    table = TABLE + b.to(tl.int64) * MAX_PAGES
    rows = first + tl.arange(0, BLOCK)
    inside = rows < stop
    k = cache_rows(at, table, first, rows, stop, inside, kb, ks, PAGE_SIZE, cols, D, DP, PLACE, False).to(tl.float32)
    norm = tl.where(inside, _norms(k), 0.0)
    place = bg.to(tl.int64) * NB + block
    # NaN where a key is: such a block is always read.
    tl.store(NORM + place, maxima(norm, 0, UPCAST))
    dtype = VECTORS.dtype.element_ty
    if KIND == 2:
        out = VECTORS + place * 2 * D + cols
        low = tl.min(tl.where(inside[:, None], k, float("inf")), 0)
        high = tl.max(tl.where(inside[:, None], k, float("-inf")), 0)
        tl.store(out, narrow(low, dtype, UPCAST), mask=cols < D)
        tl.store(out + D, narrow(high, dtype, UPCAST), mask=cols < D)
    if KIND == 5:
        # As in theory_kernels.screen, with one step a block.
        step = tl.max(tl.max(tl.abs(k), 1), 0) / 127.0
        step = tl.where(step > 0.0, step, 1.0)
        rounded = tl.minimum(tl.maximum(tl.floor(k / step + 0.5), -127.0), 127.0)
        out = VECTORS + (place * BLOCK + tl.arange(0, BLOCK))[:, None] * D + cols[None, :]
        tl.store(out, rounded.to(tl.int8), mask=(cols < D)[None, :])
        missed = tl.where(inside, _norms(k - rounded * step) + 1e-6 * norm, 0.0)
        tl.store(SCALARS + place * 2, step)
        tl.store(SCALARS + place * 2 + 1, tl.max(missed, 0) * 1.000001)
    elif KIND >= 3:
        out = VECTORS + place * D + cols
        center = tl.sum(k, 0) / tl.minimum(stop - first, BLOCK).to(tl.float32)
        if KIND == 4:
            length = tl.sqrt_rn(tl.sum(center * center, 0))
            center = tl.where(length > 0.0, center / tl.where(length > 0.0, length, 1.0), 0.0)
        stored = narrow(center, dtype, UPCAST)
        tl.store(out, stored, mask=cols < D)
        stored = stored.to(tl.float32)
        if KIND == 3:
            apart = tl.where(inside, _norms(k - stored[None, :]), 0.0)
            # A relative 1e-6 covers rounding of the difference.
            tl.store(SCALARS + place, tl.max(apart, 0) * 1.000001)
        else:
            size = tl.sqrt_rn(tl.sum(stored * stored, 0))
            along = tl.sum(k * stored[None, :], 1) / tl.where(size > 0.0, size, 1.0)
            along = along - ((2 * D + 16) * 1.1920929e-7) * _norms(k) - 2e-18
            tl.store(SCALARS + place, tl.min(tl.where(inside, along, float("inf")), 0))
