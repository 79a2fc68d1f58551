"""How dense each head is, from a few tiles of it, and the path it takes. Imports triton: load this module lazily."""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..geometry import Geometry
from ..primitives import INTERPRETED, SIZES, dot, load_rows, sequence
from ..screen import Operands, common_flags, shapes
from . import plan as limits
from .plan import DENSE, LISTS, SAMPLES, TILE, TILES


@triton.jit(do_not_specialize=SIZES)
def _sample_kernel(
    Q, K, TAU, TALLY, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, D: tl.constexpr, DP: tl.constexpr,
    B: tl.constexpr, SAMPLES: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    PACKED: tl.constexpr, FIRST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile a program: is there a survivor (bit 0), in how many columns (bits 8..), in how many rows (16..)."""
    nh, index = tl.program_id(0) // SAMPLES, tl.program_id(0) % SAMPLES
    n, h = nh // H, nh % H
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    b = n * 0 if PACKED else n
    # Rows by the square root: below a diagonal, later row groups have proportionally more tiles.
    part = (index + 0.5) / SAMPLES
    groups = tl.cdiv(q_len, B)
    group = tl.minimum((tl.sqrt(part) * groups).to(tl.int32), tl.maximum(groups - 1, 0))
    first = group * B
    hi = k_len
    if CAUSAL:
        hi = tl.minimum(k_len, tl.maximum(tl.minimum(first + B, q_len) + off, 0))
    golden = index * 0.6180339887
    key = ((golden - tl.floor(golden)) * tl.cdiv(hi, B)).to(tl.int32) * B
    rows, keys, cols = first + tl.arange(0, B), key + tl.arange(0, B), tl.arange(0, DP)
    q_base = ((b * H + h) * T + q0).to(tl.int64)
    k_base = ((b * G + h // (H // G)) * S + k0).to(tl.int64) * D
    q = load_rows(Q + q_base * D, first, q_len, cols, D, D, DP, B, True)
    k = load_rows(K + k_base, key, hi, cols, D, D, DP, B, True)
    tau = tl.load(TAU + q_base + rows, mask=rows < q_len, other=float("inf"))
    # An estimate, so one tf32 product is good enough for float32 operands.
    score = dot(q, tl.trans(k), tl.zeros([B, B], tl.float32), "tf32", UPCAST)
    hit = (score > tau[:, None]) & (keys < hi)[None, :]
    if CAUSAL:
        hit = hit & (keys[None, :] <= (rows + off)[:, None])
    one = hit.to(tl.int32)
    columns, lines = tl.sum(tl.max(one, 0), 0), tl.sum(tl.max(one, 1), 0)
    tally = (columns > 0).to(tl.int32) | (columns * (64 // B) << 8) | (lines * (64 // B) << 16)
    at = TALLY + nh * SAMPLES + index
    if not FIRST:
        # Columns and rows of two views add up: a bound of their union.
        old = tl.load(at)
        tally = ((tally | old) & 1) | ((tally & -2) + (old & -2))
    tl.store(at, tally)


@triton.jit
def _path(active, share, heads, DENSE_FROM, LIST_FROM, LIST_MOST, SAMPLES, TILES, LISTS, DENSE):
    """Path by the active tiles and the hit columns (or rows, of 64 a tile) in the samples of ``heads`` heads."""
    path = tl.where(active >= DENSE_FROM * heads, DENSE, TILES)
    few = share * 100 <= LIST_MOST * heads * (64 * SAMPLES)
    return tl.where((active >= LIST_FROM * heads) & few, LISTS, path)


@triton.jit(do_not_specialize=SIZES)
def _choose_kernel(
    TALLY, PATHS, N, R, DENSE_FROM, LIST_FROM, DENSE_FROM_KEYS, LIST_FROM_KEYS, LIST_MOST, SAMPLES: tl.constexpr,
    TILES: tl.constexpr, LISTS: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Paths of N query heads by columns, then of N // R key heads, whose R query heads decide together, by rows."""
    pid = tl.program_id(0)
    if pid < N:
        tally = tl.load(TALLY + pid * SAMPLES + tl.arange(0, SAMPLES))
        active, columns = tl.sum(tally & 1, 0), tl.sum((tally >> 8) & 0xFF, 0)
        path = _path(active, columns, 1, DENSE_FROM, LIST_FROM, LIST_MOST, SAMPLES, TILES, LISTS, DENSE)
        tl.store(PATHS + pid, path)
    else:
        tiles, rows, unseen = 0, 0, 0
        for r in range(R):
            tally = tl.load(TALLY + ((pid - N) * R + r) * SAMPLES + tl.arange(0, SAMPLES))
            active, columns = tl.sum(tally & 1, 0), tl.sum((tally >> 8) & 0xFF, 0)
            path = _path(active, columns, 1, DENSE_FROM, LIST_FROM, LIST_MOST, SAMPLES, TILES, LISTS, DENSE)
            unseen += (path == DENSE).to(tl.int32)
            tiles += active
            rows += tl.sum(tally >> 16, 0)
        path = _path(tiles, rows, R, DENSE_FROM_KEYS, LIST_FROM_KEYS, LIST_MOST, SAMPLES, TILES, LISTS, DENSE)
        # Nobody has looked at the tiles of a dense query head.
        tl.store(PATHS + pid, tl.where((path == TILES) & (unseen > 0), DENSE, path))


def choose_paths(views: list[Operands], geometry: Geometry, paths: torch.Tensor, lists: bool) -> None:
    """Fill ``paths``, int32: a code for each query head of each sequence, then for each key head.

    ``lists`` tells whether there is room for lists of single keys.
    """
    h, g = views[0].q.shape[1], views[0].k.shape[1]
    heads = geometry.sequences * h
    tally = torch.empty((heads, SAMPLES), dtype=torch.int32, device=paths.device)
    for index, x in enumerate(views):
        _sample_kernel[(tally.numel(),)](
            x.q, x.k, x.tau, tally, *shapes(x.q, x.k, geometry, tally), **common_flags(x.q.shape[-1], geometry),
            B=32 if INTERPRETED else TILE, SAMPLES=SAMPLES, FIRST=index == 0, num_warps=4,
        )  # fmt: skip
    _choose_kernel[(paths.numel(),)](
        tally, paths, heads, h // g, limits.DENSE_FROM, limits.LIST_FROM, limits.DENSE_FROM_KEYS, limits.LIST_FROM_KEYS,
        limits.LIST_MOST * len(views) if lists else -1, SAMPLES=SAMPLES, TILES=TILES, LISTS=LISTS, DENSE=DENSE,
        num_warps=1,
    )  # fmt: skip
