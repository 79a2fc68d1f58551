"""Counts on the tiles that the screen leaves. Imports triton: load this module lazily."""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..geometry import Geometry
from ..primitives import INTERPRETED, SIZES, bit_count, dot, first_bit, load_rows, sequence
from ..screen import cleaned, padded, prepare, quantize, screen

TILE = 64
SCREEN_FROM = 1024


@triton.jit
def _alive(
    q, K, start, k_len, cols, tau, pos, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    k = load_rows(K, start, k_len, cols, D, D, DP, BN, True)
    s = dot(q, tl.trans(k), tl.zeros([BM, BN], tl.float32), PREC, UPCAST)
    keys = start + tl.arange(0, BN)
    seen = (keys < k_len)[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= pos[:, None])
    return seen & (s > tau[:, None])


@triton.jit(do_not_specialize=SIZES)
def _count_kernel(
    Q1, K1, Q2, K2, TAU1, TAU2, OUT, WORDS, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, NI, NW, plane, BLOCKS,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VIEWS: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, LISTED: tl.constexpr,
    PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    nh = tl.program_id(0) // BLOCKS
    block = BLOCKS - 1 - tl.program_id(0) % BLOCKS
    n, h = nh // H, nh % H
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    first = block * BM
    if first >= q_len:
        return
    b = n * 0 if PACKED else n
    q_row = (b * H + h).to(tl.int64) * T + q0
    k_at = ((b * G + h // (H // G)).to(tl.int64) * S + k0) * D
    rows, cols = first + tl.arange(0, BM), tl.arange(0, DP)
    pos = rows + off
    q1 = load_rows(Q1 + q_row * D, first, q_len, cols, D, D, DP, BM, True)
    tau1 = tl.load(TAU1 + q_row + rows, mask=rows < q_len, other=float("inf"))
    q2, tau2 = q1, tau1
    if VIEWS == 2:
        q2 = load_rows(Q2 + q_row * D, first, q_len, cols, D, D, DP, BM, True)
        tau2 = tl.load(TAU2 + q_row + rows, mask=rows < q_len, other=float("inf"))
    hi = k_len
    if CAUSAL:
        hi = tl.minimum(k_len, tl.maximum(tl.minimum(first + BM, q_len) + off, 0))
    count = tl.zeros([BM], tl.int32)
    tiles = tl.cdiv(hi, BN)
    at = WORDS + (nh.to(tl.int64) * NI + block) * NW
    for w in range(tl.cdiv(tiles, 32)):
        left = tl.minimum(tiles - w * 32, 32)
        word = tl.full([], -1, tl.int32)
        if LISTED:
            word = tl.load(at + w)
            if VIEWS == 2:
                # A consensus needs a survivor in both views.
                word &= tl.load(at + plane + w)
            left = bit_count(word)
        for _ in range(left):
            start = (w * 32 + first_bit(word)) * BN
            word = word & (word - 1)
            alive = _alive(q1, K1 + k_at, start, k_len, cols, tau1, pos, D, DP, BM, BN, CAUSAL, PREC, UPCAST)
            if VIEWS == 2:
                alive = alive & _alive(
                    q2, K2 + k_at, start, k_len, cols, tau2, pos, D, DP, BM, BN, CAUSAL, PREC, UPCAST
                )
            count += tl.sum(alive.to(tl.int32), 1)
    tl.store(OUT + q_row + rows, count, mask=rows < q_len)


def counts(
    views: list[tuple[torch.Tensor, torch.Tensor]],
    taus: list[torch.Tensor],
    geometry: Geometry,
    normalize: bool,
    screen_from: int | None,
) -> torch.Tensor:
    """Number of keys a row sees whose score exceeds the threshold in every view; int32 (B, H, T)."""
    q, k = views[0]
    (b, h, t, d), (g, s) = q.shape, k.shape[1:3]
    out = torch.zeros((b, h, t), dtype=torch.int32, device=q.device)
    if min(b, t, s, geometry.max_q, geometry.max_k) == 0:
        return out
    # Two views of 512 bytes a row are what shared memory holds of 64-row tiles.
    large = padded(d) * q.element_size() > 512
    tile = 32 if large else TILE
    heads = geometry.sequences * h
    screened = not large and geometry.max_k >= (SCREEN_FROM if screen_from is None else screen_from)
    ni = triton.cdiv(geometry.max_q, tile)
    shape = (len(views), heads, ni, triton.cdiv(geometry.max_k, TILE * 32)) if screened else (1, 1, 1, 1)
    words = torch.zeros(shape, dtype=torch.int32, device=q.device)
    ready, levels = [], []
    for index, (view, given) in enumerate(zip(views, taus, strict=True)):
        if screened:
            view = cleaned(view, geometry)
        tau = torch.empty((b, h, t), dtype=torch.float32, device=q.device)
        x = prepare(*view, normalize, screened, given.expand(b, h, t).contiguous(), None, tau)
        if screened:
            screen(quantize(x, None), geometry, words[index], TILE, None)
        ready.append((x.q, x.k))
        levels.append(tau)
    (q1, k1), (q2, k2) = ready[0], ready[-1]
    _count_kernel[(heads * ni,)](
        q1, k1, q2, k2, levels[0], levels[-1], out, words,
        geometry.layout if geometry.layout is not None else words, geometry.sequences, h, g, t, s, geometry.max_q,
        geometry.max_k, geometry.offset, words.shape[2], words.shape[3], words.stride(0), ni,
        D=d, DP=padded(d), BM=tile, BN=tile, VIEWS=len(views), CAUSAL=geometry.causal,
        RAGGED=geometry.layout is not None, PACKED=geometry.packed, LISTED=screened,
        PREC="tf32x3" if q.dtype == torch.float32 else "tf32", UPCAST=INTERPRETED,
        num_warps=4 if padded(d) <= 128 else 8, num_stages=2 if padded(d) <= 128 else 1,
    )  # fmt: skip
    return out
