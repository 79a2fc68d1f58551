"""Weights max(x - tau, 0)^p, by rows and by columns, on the tiles that hold one. Imports triton.

TRA and TDA take their tiles from the exact screen of :mod:`theory_kernels.screen`; entmax, whose weights have this
form once its threshold is known, from :mod:`.triton_entmax`. Few tiles are walked in the sparse case; in the dense
one all of them, twice (rows, columns). Long sums are pairs of float32.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..geometry import Geometry
from ..primitives import INTERPRETED, bit_count, first_bit, live_words, load_rows, rectified_power
from ..screen import prepare, quantize, screen, transpose
from .request import Request, stored
from .triton_common import (
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
    square_tiles,
    visible,
)  # fmt: skip
from .visibility import remember

TILE = 64
# Below this many keys the screen costs more than it saves.
SCREEN_FROM = 2048
# Planes of the row sums of one view: mass (a pair), -sum w log w (a pair), maximum; of two: then mass (a pair) and
# maximum of each.
ROW_FLOATS = (5, 11)
# Planes of the row counts of one view, where the first stays empty, and of two: support, survivors by view, consensus.
ROW_COUNTS = (2, 4)


class Listed(NamedTuple):
    """Operands, thresholds and the tiles to walk, if listed.

    ``tau``: float32 (B, H, T), inf for rows that do not exist; or (2, B, H, T), a pair whose sum it is.
    """

    views: list[tuple[torch.Tensor, torch.Tensor]]
    tau: torch.Tensor
    words: torch.Tensor | None
    factor: float
    cap: float | None
    power: float


@triton.jit
def _excess(
    a, B, start, stop, cols, level, low, seen, FACTOR, CAP, D: tl.constexpr, DP: tl.constexpr, COUNT: tl.constexpr,
    POWER: tl.constexpr, SOFTCAP: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """max(x - level, 0) of a tile and its power; hidden pairs give 0 whatever the sign of the level."""
    s = products(a, B, start, stop, cols, D, D, DP, COUNT, True, PREC, UPCAST)
    x = (logits(s, level, FACTOR, CAP, 0.0, SOFTCAP, 0) - level) - low
    x = tl.where(seen, tl.maximum(x, 0.0), 0.0)
    return x, rectified_power(x, POWER)


@triton.jit
def _reaching(counts, w, BOUNDS_AT, AXIS: tl.constexpr, BOUND_COUNT: tl.constexpr, COUNTERS: tl.constexpr):
    """counts plus, by row, the weights that reach each bound."""
    for index in tl.static_range(BOUND_COUNT):
        more = tl.sum(tl.where(w >= tl.load(BOUNDS_AT + index), 1, 0), AXIS)
        counts += tl.where(tl.arange(0, COUNTERS)[None, :] == index, more[:, None], 0)
    return counts


@triton.jit
def _row_sums(
    state, q1, q2, K1, K2, start, key1, cols, tau, tau_low, lam, rows, row0, row1, key0, off, BEFORE, AFTER, LEVELS,
    FACTOR, CAP, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, VIEWS: tl.constexpr, POWER: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, BOUND_COUNT: tl.constexpr,
    COUNTERS: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    (mass, mass_low, ent, ent_low, top, support, large, mass1, low1, top1, alive1, large1, mass2, low2, top2, alive2,
     large2, both) = state  # fmt: skip
    keys = start + tl.arange(0, BN)
    seen = visible(rows[:, None], keys[None, :], row0, row1, key0, key1, off, BEFORE, AFTER, HAS_BEFORE, HAS_AFTER)
    x, w = _excess(q1, K1, start, key1, cols, tau[:, None], tau_low[:, None], seen, FACTOR, CAP, D, DP, BN, POWER,
                   SOFTCAP, PREC, UPCAST)  # fmt: skip
    alive1 += tl.sum((x > 0.0).to(tl.int32), 1)
    if VIEWS == 2:
        y, w2 = _excess(q2, K2, start, key1, cols, tau[:, None], tau_low[:, None], seen, FACTOR, CAP, D, DP, BN,
                        POWER, SOFTCAP, PREC, UPCAST)  # fmt: skip
        alive2 += tl.sum((y > 0.0).to(tl.int32), 1)
        both += tl.sum(((x > 0.0) & (y > 0.0)).to(tl.int32), 1)
        mass1, low1 = add_pair(mass1, low1, tl.sum(w, 1))
        mass2, low2 = add_pair(mass2, low2, tl.sum(w2, 1))
        top1, top2 = tl.maximum(top1, tl.max(w, 1)), tl.maximum(top2, tl.max(w2, 1))
        large1 = _reaching(large1, w, LEVELS, 1, BOUND_COUNT, COUNTERS)
        large2 = _reaching(large2, w2, LEVELS, 1, BOUND_COUNT, COUNTERS)
        w = tl.abs(w - lam * w2)
        support += tl.sum((w > 0.0).to(tl.int32), 1)
    mass, mass_low = add_pair(mass, mass_low, tl.sum(w, 1))
    # log2 of the smallest normal number stands for that of 0, which it is multiplied by.
    logs = tl.log2(tl.maximum(w, 1.1754944e-38))
    ent, ent_low = add_pair(ent, ent_low, -tl.sum(w * logs, 1))
    top = tl.maximum(top, tl.max(w, 1))
    large = _reaching(large, w, LEVELS, 1, BOUND_COUNT, COUNTERS)
    return (mass, mass_low, ent, ent_low, top, support, large, mass1, low1, top1, alive1, large1, mass2, low2, top2,
            alive2, large2, both)  # fmt: skip


@triton.jit
def _store_counts(to, plane, counts, inside, BOUND_COUNT: tl.constexpr, COUNTERS: tl.constexpr):
    slot = tl.arange(0, COUNTERS)[None, :]
    tl.store(to[:, None] + slot * plane, counts, mask=inside[:, None] & (slot < BOUND_COUNT))


@triton.jit(do_not_specialize=SIZES)
def _rows_kernel(
    Q1, K1, Q2, K2, TAU, LAM, LEVELS, WORDS, FLOATS, COUNTS, LARGE, BOUNDS, B, H, G, T, S, BEFORE, AFTER, NI, NW,
    BLOCKS, plane, FACTOR, CAP, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    VIEWS: tl.constexpr, POWER: tl.constexpr, SOFTCAP: tl.constexpr, HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr, LISTED: tl.constexpr, PAIR: tl.constexpr, BOUND_COUNT: tl.constexpr,
    COUNTERS: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    plane = plane.to(tl.int64)
    nh = tl.program_id(0) // BLOCKS
    block = BLOCKS - 1 - tl.program_id(0) % BLOCKS
    b, h = nh // H, nh % H
    row0, row1, key0, key1, off = bounds_of(BOUNDS, b, B)
    first = block * BM
    if (first >= row1) | (first + BM <= row0):
        return
    line = nh.to(tl.int64) * T
    k_at = (b * G + h // (H // G)).to(tl.int64) * S * D
    rows, cols = first + tl.arange(0, BM), tl.arange(0, DP)
    q1 = load_rows(Q1 + line * D, first, row1, cols, D, D, DP, BM, True)
    q2 = q1
    lam = 0.0
    if VIEWS == 2:
        q2 = load_rows(Q2 + line * D, first, row1, cols, D, D, DP, BM, True)
        lam = tl.load(LAM + h)
    tau = tl.load(TAU + line + rows, mask=rows < row1, other=float("inf"))
    tau_low = tl.zeros([BM], tl.float32)
    if PAIR:
        tau_low = tl.load(TAU + plane + line + rows, mask=rows < row1, other=0.0)
    start, _, _, stop = key_tiles(
        first, tl.minimum(first + BM, row1) - 1, key0, key1, off, BEFORE, AFTER, BN, HAS_BEFORE, HAS_AFTER
    )
    zero, none = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.int32)
    many = tl.zeros([BM, COUNTERS], tl.int32)
    state = (zero, zero, zero, zero, zero, none, many, zero, zero, zero, none, many, zero, zero, zero, none, many, none)
    if LISTED:
        at = WORDS + (nh.to(tl.int64) * NI + block) * NW
        words = tl.cdiv(stop, 32)
        for chunk in range(0, words, 32):
            live = live_words(at, chunk, words)
            for _ in range(bit_count(live)):
                w = chunk + first_bit(live)
                live = live & (live - 1)
                word = tl.load(at + w)
                for _ in range(bit_count(word)):
                    key = (w * 32 + first_bit(word)) * BN
                    word = word & (word - 1)
                    state = _row_sums(state, q1, q2, K1 + k_at, K2 + k_at, key, key1, cols, tau, tau_low, lam, rows,
                                      row0, row1, key0, off, BEFORE, AFTER, LEVELS, FACTOR, CAP, D, DP, BN, VIEWS,
                                      POWER, SOFTCAP, HAS_BEFORE, HAS_AFTER, BOUND_COUNT, COUNTERS, PREC,
                                      UPCAST)  # fmt: skip
    else:
        for j in range(start, stop):
            state = _row_sums(state, q1, q2, K1 + k_at, K2 + k_at, j * BN, key1, cols, tau, tau_low, lam, rows, row0,
                              row1, key0, off, BEFORE, AFTER, LEVELS, FACTOR, CAP, D, DP, BN, VIEWS, POWER, SOFTCAP,
                              HAS_BEFORE, HAS_AFTER, BOUND_COUNT, COUNTERS, PREC, UPCAST)  # fmt: skip
    (mass, mass_low, ent, ent_low, top, support, large, mass1, low1, top1, alive1, large1, mass2, low2, top2, alive2,
     large2, both) = state  # fmt: skip
    inside = (rows >= row0) & (rows < row1)
    to = FLOATS + line + rows
    tl.store(to, mass, mask=inside)
    tl.store(to + plane, mass_low, mask=inside)
    tl.store(to + 2 * plane, ent, mask=inside)
    tl.store(to + 3 * plane, ent_low, mask=inside)
    tl.store(to + 4 * plane, top, mask=inside)
    count = COUNTS + line + rows
    near = LARGE + line + rows
    tl.store(count + plane, alive1, mask=inside)
    _store_counts(near, plane, large, inside, BOUND_COUNT, COUNTERS)
    if VIEWS == 2:
        tl.store(to + 5 * plane, mass1, mask=inside)
        tl.store(to + 6 * plane, low1, mask=inside)
        tl.store(to + 7 * plane, top1, mask=inside)
        tl.store(to + 8 * plane, mass2, mask=inside)
        tl.store(to + 9 * plane, low2, mask=inside)
        tl.store(to + 10 * plane, top2, mask=inside)
        tl.store(count, support, mask=inside)
        tl.store(count + 2 * plane, alive2, mask=inside)
        tl.store(count + 3 * plane, both, mask=inside)
        _store_counts(near + BOUND_COUNT * plane, plane, large1, inside, BOUND_COUNT, COUNTERS)
        _store_counts(near + 2 * BOUND_COUNT * plane, plane, large2, inside, BOUND_COUNT, COUNTERS)


@triton.jit
def _column_sums(
    state, k1, k2, Q1, Q2, start, cols, TAU, pair, lam, keys, row0, row1, key0, key1, off, BEFORE, AFTER, FACTOR, CAP,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, VIEWS: tl.constexpr, POWER: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, PAIR: tl.constexpr,
    PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    mass, low, mass1, low1, mass2, low2 = state
    rows = start + tl.arange(0, BM)
    tau = tl.load(TAU + rows, mask=rows < row1, other=float("inf"))
    tau_low = tl.zeros([BM], tl.float32)
    if PAIR:
        tau_low = tl.load(TAU + pair + rows, mask=rows < row1, other=0.0)
    seen = visible(rows[None, :], keys[:, None], row0, row1, key0, key1, off, BEFORE, AFTER, HAS_BEFORE, HAS_AFTER)
    _, w = _excess(k1, Q1, start, row1, cols, tau[None, :], tau_low[None, :], seen, FACTOR, CAP, D, DP, BM, POWER,
                   SOFTCAP, PREC, UPCAST)  # fmt: skip
    if VIEWS == 2:
        _, w2 = _excess(k2, Q2, start, row1, cols, tau[None, :], tau_low[None, :], seen, FACTOR, CAP, D, DP, BM,
                        POWER, SOFTCAP, PREC, UPCAST)  # fmt: skip
        mass1, low1 = add_pair(mass1, low1, tl.sum(w, 1))
        mass2, low2 = add_pair(mass2, low2, tl.sum(w2, 1))
        w = tl.abs(w - lam * w2)
    mass, low = add_pair(mass, low, tl.sum(w, 1))
    return mass, low, mass1, low1, mass2, low2


@triton.jit(do_not_specialize=SIZES)
def _columns_kernel(
    Q1, K1, Q2, K2, TAU, LAM, WORDS, FLOATS, BOUNDS, B, H, G, T, S, BEFORE, AFTER, NI, NW, BLOCKS, plane, FACTOR, CAP,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VIEWS: tl.constexpr,
    POWER: tl.constexpr, SOFTCAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr,
    LISTED: tl.constexpr, PAIR: tl.constexpr, PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``WORDS`` is the transposed bitmap: NI key tiles, NW words of row tiles."""
    plane = plane.to(tl.int64)
    nh, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    b, h = nh // H, nh % H
    row0, row1, key0, key1, off = bounds_of(BOUNDS, b, B)
    first = block * BN
    if (first >= key1) | (first + BN <= key0):
        return
    q_at = nh.to(tl.int64) * T * D
    k_at = (b * G + h // (H // G)).to(tl.int64) * S * D
    keys, cols = first + tl.arange(0, BN), tl.arange(0, DP)
    k1 = load_rows(K1 + k_at, first, key1, cols, D, D, DP, BN, True)
    k2 = k1
    lam = 0.0
    if VIEWS == 2:
        k2 = load_rows(K2 + k_at, first, key1, cols, D, D, DP, BN, True)
        lam = tl.load(LAM + h)
    tau = TAU + nh.to(tl.int64) * T
    start, _, _, stop = row_tiles(
        first, tl.minimum(first + BN, key1) - 1, row0, row1, off, BEFORE, AFTER, BM, HAS_BEFORE, HAS_AFTER
    )
    # From the first part of the thresholds to the second.
    pair = B.to(tl.int64) * H * T
    zero = tl.zeros([BN], tl.float32)
    state = (zero, zero, zero, zero, zero, zero)
    if LISTED:
        at = WORDS + (nh.to(tl.int64) * NI + block) * NW
        words = tl.cdiv(stop, 32)
        for chunk in range(0, words, 32):
            live = live_words(at, chunk, words)
            for _ in range(bit_count(live)):
                w = chunk + first_bit(live)
                live = live & (live - 1)
                word = tl.load(at + w)
                for _ in range(bit_count(word)):
                    row = (w * 32 + first_bit(word)) * BM
                    word = word & (word - 1)
                    state = _column_sums(state, k1, k2, Q1 + q_at, Q2 + q_at, row, cols, tau, pair, lam, keys, row0,
                                         row1, key0, key1, off, BEFORE, AFTER, FACTOR, CAP, D, DP, BM, VIEWS, POWER,
                                         SOFTCAP, HAS_BEFORE, HAS_AFTER, PAIR, PREC, UPCAST)  # fmt: skip
    else:
        for j in range(start, stop):
            state = _column_sums(state, k1, k2, Q1 + q_at, Q2 + q_at, j * BM, cols, tau, pair, lam, keys, row0, row1,
                                 key0, key1, off, BEFORE, AFTER, FACTOR, CAP, D, DP, BM, VIEWS, POWER,
                                 SOFTCAP, HAS_BEFORE, HAS_AFTER, PAIR, PREC, UPCAST)  # fmt: skip
    mass, low, mass1, low1, mass2, low2 = state
    inside = (keys >= key0) & (keys < key1)
    to = FLOATS + nh.to(tl.int64) * S + keys
    tl.store(to, mass, mask=inside)
    tl.store(to + plane, low, mask=inside)
    if VIEWS == 2:
        tl.store(to + 2 * plane, mass1, mask=inside)
        tl.store(to + 3 * plane, low1, mask=inside)
        tl.store(to + 4 * plane, mass2, mask=inside)
        tl.store(to + 5 * plane, low2, mask=inside)


def screened(
    views: list[tuple[torch.Tensor, torch.Tensor]], request: Request, tau: torch.Tensor, screen_from: int
) -> Listed:
    """Unit rows of TRA's or TDA's views, thresholds, and the tiles that may hold a survivor."""
    q, k = views[0]
    (b, h, t), s = q.shape[:3], k.shape[2]
    row0, row1, key0, key1, offset = request.see.bounds
    listed = s >= screen_from and (INTERPRETED or square_tiles(q, len(views))["BM"] == TILE)

    def lay_out() -> torch.Tensor:
        return torch.stack([torch.zeros_like(row1), row1, torch.zeros_like(key1), key1, offset]).to(torch.int32)

    geometry = Geometry(remember(request.see, "layout", lay_out), b, t, s, 0, False, request.see.causal)
    words = None
    if listed:
        shape = (b * h, triton.cdiv(t, TILE), triton.cdiv(s, TILE * 32))
        words = torch.zeros(shape, dtype=torch.int32, device=q.device)
    given = tau.float().contiguous()
    ready = []
    for index, (a, c) in enumerate(views):
        level = torch.empty((b, h, t), dtype=torch.float32, device=q.device)
        clean = (a, c) if request.see.key is not None else (stored(a, row0, row1), stored(c, key0, key1))
        x = prepare(*clean, request.normalize, listed, given, None, level)
        if words is not None:
            screen(quantize(x, None), geometry, words, TILE, None, join=index > 0)
        ready.append((x.q, x.k))
    return Listed(ready, given, words, 1.0, None, request.power)


def threshold_sums(listed: Listed, request: Request) -> dict[str, torch.Tensor]:
    """Row and column sums of the weights, and of each view's.

    Returns
    -------
    dict
        "mass", "entropy" (-sum w log w), "maximum", "support", "large", "columns" of the whole; "survivors"
        (views, B, H, T), "consensus"; "mass1", "maximum1", "large1", "columns1" and so on of the views.
    """
    (q1, k1), (q2, k2) = listed.views[0], listed.views[-1]
    (b, h, t), (g, s), count = q1.shape[:3], k1.shape[1:3], len(listed.views)
    where, device = Positions(request, q1.device), q1.device
    tiles = square_tiles(q1, count)
    if listed.words is not None:
        tiles |= {"BM": TILE, "BN": TILE}
    tile = tiles["BM"]
    near = len(request.near_zero) if request.wants("near_zero") else 0
    plane = b * h * t
    planes = (ROW_FLOATS[count - 1], ROW_COUNTS[count - 1], max((2 * count - 1) * near, 1))
    floats, counts, large = torch.zeros((sum(planes), b, h, t), dtype=torch.int32, device=device).split(planes)
    floats = floats.view(torch.float32)
    words = floats if listed.words is None else listed.words
    lam = request.lam.float().contiguous()
    fixed = {
        **flags_of(q1), **where.flags, **tiles, "VIEWS": count, "POWER": listed.power,
        "SOFTCAP": listed.cap is not None, "LISTED": listed.words is not None, "PAIR": listed.tau.dim() == 4,
    }  # fmt: skip
    numbers = (listed.factor, listed.cap or 1.0)
    sizes = (b, h, g, t, s, where.before, where.after)
    shape = (words.shape[1], words.shape[2]) if listed.words is not None else (1, 1)
    blocks = triton.cdiv(t, tile)
    _rows_kernel[(b * h * blocks,)](
        q1, k1, q2, k2, listed.tau, lam, padded_list(request.near_zero, device), words, floats, counts, large,
        where.bounds, *sizes, *shape, blocks, plane, *numbers, **fixed, BOUND_COUNT=near, COUNTERS=next_power(near),
    )  # fmt: skip
    mass, entropy = floats[:4].view(2, 2, b, h, t).sum(1, dtype=torch.float64)
    out = {
        "mass": mass, "entropy": entropy.mul_(0.6931471805599453), "maximum": floats[4].double(),
        "support": counts[0 if count == 2 else 1].long(), "survivors": counts[1 : 1 + count].long(),
    }  # fmt: skip
    if count == 2:
        own = floats[5:].view(2, 3, b, h, t)
        out["consensus"] = counts[3].long()
        out |= zip(("mass1", "mass2"), own[:, :2].sum(1, dtype=torch.float64), strict=True)
        out |= zip(("maximum1", "maximum2"), own[:, 2].double(), strict=True)
    if near:
        flat = large.sum(-1, dtype=torch.int64).permute(1, 2, 0)
        out |= zip(("large", "large1", "large2"), flat.split(near, -1), strict=False)
    if request.wants("columns"):
        sums = torch.zeros((6, b, h, s), dtype=torch.float32, device=device)
        turned = words
        if listed.words is not None:
            turned = transpose(listed.words, triton.cdiv(s, TILE))
            shape = (turned.shape[1], turned.shape[2])
        blocks = triton.cdiv(s, tile)
        _columns_kernel[(b * h * blocks,)](
            q1, k1, q2, k2, listed.tau, lam, turned, sums, where.bounds, *sizes, *shape, blocks, b * h * s, *numbers,
            **fixed,
        )  # fmt: skip
        both = sums.view(3, 2, b, h, s).sum(1, dtype=torch.float64)
        out |= zip(("columns", "columns1", "columns2"), both, strict=True)
    return out
