"""The threshold of entmax, row block by row block. Imports triton.

Newton on the norm ``(sum_j (x_j - tau)_+^p)^(1/p) = 1`` from the left, as in :mod:`.weights`. The first step notes
which key tiles hold an entry within 1 of the maximum; only these can have weight, and only these are read again.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..primitives import INTERPRETED, bit_count, first_bit, load_rows, rectified_power
from .request import Request
from .triton_common import (
    SIZES,
    Positions,
    add_pair,
    bounds_of,
    flags_of,
    key_tiles,
    logits,
    products,
    square_tiles,
    visible,
)  # fmt: skip
from .triton_threshold import TILE, Listed

STEPS = 40


@triton.jit
def _scaled(
    q, K, start, cols, rows, row0, row1, key0, key1, off, BEFORE, AFTER, FACTOR, CAP, D: tl.constexpr,
    DP: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr,
    PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    s = products(q, K, start, key1, cols, D, D, DP, BN, True, PREC, UPCAST)
    keys = start + tl.arange(0, BN)
    seen = visible(rows[:, None], keys[None, :], row0, row1, key0, key1, off, BEFORE, AFTER, HAS_BEFORE, HAS_AFTER)
    return tl.where(seen, logits(s, s, FACTOR, CAP, 0.0, SOFTCAP, 0), -1e30)


@triton.jit(do_not_specialize=SIZES)
def _threshold_kernel(
    Q, K, TAU, WORDS, BOUNDS, B, H, G, T, S, BEFORE, AFTER, NI, NW, BLOCKS, FACTOR, CAP, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, POWER: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, MOST: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    nh = tl.program_id(0) // BLOCKS
    block = BLOCKS - 1 - tl.program_id(0) % BLOCKS
    b, h = nh // H, nh % H
    row0, row1, key0, key1, off = bounds_of(BOUNDS, b, B)
    first = block * BM
    if (first >= row1) | (first + BM <= row0):
        return
    line = nh.to(tl.int64) * T
    at = K + (b * G + h // (H // G)).to(tl.int64) * S * D
    rows, cols = first + tl.arange(0, BM), tl.arange(0, DP)
    q = load_rows(Q + line * D, first, row1, cols, D, D, DP, BM, True)
    start, _, _, stop = key_tiles(
        first, tl.minimum(first + BM, row1) - 1, key0, key1, off, BEFORE, AFTER, BN, HAS_BEFORE, HAS_AFTER
    )
    top = tl.zeros([BM], tl.float32) - 1e29
    for j in range(start, stop):
        x = _scaled(q, at, j * BN, cols, rows, row0, row1, key0, key1, off, BEFORE, AFTER, FACTOR, CAP, D, DP, BN,
                    SOFTCAP, HAS_BEFORE, HAS_AFTER, PREC, UPCAST)  # fmt: skip
        top = tl.maximum(top, tl.max(x, 1))
    marks = WORDS + (nh.to(tl.int64) * NI + block) * NW
    for w in range(start // 32, tl.cdiv(stop, 32)):
        word = tl.full([], 0, tl.int32)
        for j in range(tl.maximum(w * 32, start), tl.minimum(w * 32 + 32, stop)):
            x = _scaled(q, at, j * BN, cols, rows, row0, row1, key0, key1, off, BEFORE, AFTER, FACTOR, CAP, D, DP, BN,
                        SOFTCAP, HAS_BEFORE, HAS_AFTER, PREC, UPCAST)  # fmt: skip
            some = tl.max(tl.max((x > top[:, None] - 1.0).to(tl.int32), 1), 0)
            word = word | (some << (j - w * 32))
        tl.store(marks + w, word)
    # The words are read again by other threads of the program.
    tl.debug_barrier()
    # A pair: the threshold's own rounding, times the support, would show in the row's sum.
    tau, low = top - 1.0, tl.zeros([BM], tl.float32)
    going, step = 1, 0
    while (going > 0) & (step < MOST):
        total, slope = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
        for w in range(start // 32, tl.cdiv(stop, 32)):
            word = tl.load(marks + w)
            for _ in range(bit_count(word)):
                key = (w * 32 + first_bit(word)) * BN
                word = word & (word - 1)
                x = _scaled(q, at, key, cols, rows, row0, row1, key0, key1, off, BEFORE, AFTER, FACTOR, CAP, D, DP, BN,
                            SOFTCAP, HAS_BEFORE, HAS_AFTER, PREC, UPCAST)  # fmt: skip
                y = tl.maximum((x - tau[:, None]) - low[:, None], 0.0)
                less = tl.where(y > 0.0, 1.0, 0.0)
                if POWER != 1.0:
                    less = rectified_power(y, POWER - 1.0)
                slope += tl.sum(less, 1)
                total += tl.sum(less * y, 1)
        some = total > 0.0
        safe = tl.where(some, total, 1.0)
        norm = safe
        if POWER == 2.0:
            norm = tl.sqrt_rn(safe)
        elif POWER != 1.0:
            norm = tl.exp2(tl.log2(safe) / POWER)
        more = (norm - 1.0) * safe / (norm * tl.where(some, slope, 1.0))
        # Exact Newton never passes the root; what rounding adds is not followed back.
        more = tl.where(some, tl.maximum(more, 0.0), 0.0)
        going = tl.max((some & (norm - 1.0 > 4.8e-7)).to(tl.int32), 0)
        tau, low = add_pair(tau, low, more)
        step += 1
    inside = (rows >= row0) & (rows < row1)
    tl.store(TAU + line + rows, tau, mask=inside)
    tl.store(TAU + B.to(tl.int64) * H * T + line + rows, low, mask=inside)


def entmax_thresholds(q: torch.Tensor, k: torch.Tensor, request: Request) -> Listed:
    """Thresholds in units of (alpha - 1) times the logits, and the tiles that may hold weight."""
    q, k = q.contiguous(), k.contiguous()
    (b, h, t), (g, s) = q.shape[:3], k.shape[1:3]
    where, device = Positions(request, q.device), q.device
    tiles = square_tiles(q, 1)
    if INTERPRETED:
        tiles |= {"BM": TILE, "BN": TILE}
    tile = tiles["BM"]
    rows, words = triton.cdiv(t, tile), triton.cdiv(s, tile * 32)
    tau = torch.zeros((2, b, h, t), dtype=torch.float32, device=device)
    tau[0] = torch.inf
    marks = torch.zeros((b * h, rows, words), dtype=torch.int32, device=device)
    power, cap = 1.0 / (request.alpha - 1.0), request.softcap
    factor = request.scale * (request.alpha - 1.0) if cap is None else request.scale / cap
    top = None if cap is None else cap * (request.alpha - 1.0)
    _threshold_kernel[(b * h * rows,)](
        q, k, tau, marks, where.bounds, b, h, g, t, s, where.before, where.after, rows, words, rows, factor,
        top or 1.0, **flags_of(q), **where.flags, **tiles, POWER=power, SOFTCAP=cap is not None, MOST=STEPS,
    )  # fmt: skip
    # Larger head dims have smaller tiles than the list kernels: they walk every tile.
    return Listed([(q, k)], tau, marks if tile == TILE else None, factor, top, power)
