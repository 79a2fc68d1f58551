"""Jitted helpers of the decode kernels: rows of a paged cache, query rows of a unit. Imports triton: load lazily.

A unit is the work that one list of blocks belongs to: (sequence, key head, block of query rows). The query heads of
a key head are folded into one, T rows each, so that they share its loads.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import unit_rows

# Not specialized: a kernel for every length, batch or grid would be compiled otherwise.
SIZES = [
    "UNITS", "G", "H", "T", "S", "ROWS", "ROW_BLOCKS", "NB", "TILES", "PAGE_SIZE", "MAX_PAGES", "PROGRAMS", "start",
    "count", "TOUCHED",
]  # fmt: skip


@triton.jit
def wait_for_predecessor(EARLY: tl.constexpr):
    """With ``EARLY`` a kernel is launched while the one before still runs: wait here until that has finished."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def cache_rows(
    X, TABLE, start, rows, stop, wanted, page_stride, row_stride, PAGE_SIZE, cols, D: tl.constexpr, DP: tl.constexpr,
    PLACE: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Rows ``rows`` of a cache, 0 from ``stop`` on and (SOME) where not ``wanted``.

    ``PLACE``: 0 side by side from ``start`` on, 1 the same in one page, 2 anywhere, each in its page, 3 anywhere.
    """
    inside = (rows < stop)[:, None]
    if SOME:
        inside = inside & wanted[:, None]
    if D != DP:
        inside = inside & (cols < D)[None, :]
    if PLACE == 2:
        page = tl.load(TABLE + rows // PAGE_SIZE, mask=rows < stop, other=0).to(tl.int64)
        at = X + ((page * page_stride + (rows % PAGE_SIZE).to(tl.int64) * row_stride)[:, None] + cols[None, :])
    elif PLACE == 3:
        at = X + ((rows.to(tl.int64) * row_stride)[:, None] + cols[None, :])
    else:
        if PLACE == 1:
            page = tl.load(TABLE + start // PAGE_SIZE, mask=start < stop, other=0).to(tl.int64)
            base = X + (page * page_stride + (start % PAGE_SIZE).to(tl.int64) * row_stride)
        else:
            base = X + start.to(tl.int64) * row_stride
        at = base + (((rows - start) * row_stride)[:, None] + cols[None, :])
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def unit_of(unit, G, H, T, ROWS, ROW_BLOCKS, BM: tl.constexpr):
    """Sequence, key head, and of BM rows: query head, token, and whether the row exists."""
    bg = unit // ROW_BLOCKS
    b, g = bg // G, bg % G
    rows = (unit % ROW_BLOCKS) * BM + tl.arange(0, BM)
    return b, g, g * (H // G) + rows // T, rows % T, rows < ROWS


@triton.jit
def query_rows(
    Q, b, head, token, exists, stride_b, stride_h, stride_t, cols, D: tl.constexpr, NORMALIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Query rows of a unit, 0 where there is none; screen and attention must see the same bits."""
    at = Q + (b.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + token.to(tl.int64) * stride_t)[:, None]
    q = tl.load(at + cols[None, :], mask=exists[:, None] & (cols < D)[None, :], other=0.0)
    if NORMALIZE:
        q, _ = unit_rows(q, q.dtype, UPCAST)
    return q


@triton.jit
def row_thresholds(TAU, b, head, token, exists, stride_b, stride_h, stride_t):
    """Thresholds of a unit's rows, infinite where there is none."""
    at = TAU + b.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + token.to(tl.int64) * stride_t
    return tl.load(at, mask=exists, other=float("inf"))
