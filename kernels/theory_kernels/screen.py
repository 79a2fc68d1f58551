"""The screen: which tiles can hold a survivor, decided with int8 products and a rigorous margin.

With ``q = a q' + e`` and ``k = b k' + f`` (q', k' the int8 roundings, e and f what they miss),

    <q, k> = a b <q', k'> + <a q', f> + <e, k>,

so a survivor ``<q, k> > tau`` has ``a b <q', k'> > tau - |a q'| |f| - |e| |k|`` by Cauchy-Schwarz. The
norms are measured, not assumed, and rounded outwards; int8 products are exact in int32. A flag can
be a false alarm, a cleared flag cannot be a miss. Imports triton: load this module lazily.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .geometry import Geometry
from .primitives import INTERPRETED, either, kernel_dtype, load_rows, sequence, unit_rows

ROWS = 128


class Operand:
    """Rows ready for the kernels: unit (or raw) rows, contiguous; reciprocal norms; int8 rows if asked for."""

    def __init__(self, x: torch.Tensor):
        b, h, t, _ = x.shape
        self.unit = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.inverse = torch.empty((b, h, t), dtype=torch.float32, device=x.device)
        self.int8: torch.Tensor | None = None
        self.threshold: torch.Tensor | None = None
        self.stats: torch.Tensor | None = None


@triton.jit
def _prepare_kernel(
    X, UNIT, INV, AMAX, T, H, BLOCKS, sb, sh, st,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, NORMALIZE: tl.constexpr, DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    block, bh = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    rows = block * BR + tl.arange(0, BR)
    cols = tl.arange(0, DP)
    x = load_rows(X + (bh // H) * sb + (bh % H) * sh, block * BR, T, cols, st, D, DP, BR, True)
    if NORMALIZE:
        x, inverse = unit_rows(x, DTYPE, UPCAST)
    else:
        inverse = tl.full([BR], 1.0, tl.float32)
    inside = (rows < T)[:, None] & (cols < D)[None, :]
    tl.store(UNIT + bh * T * D + rows[:, None].to(tl.int64) * D + cols[None, :], x, mask=inside)
    tl.store(INV + bh * T + rows, inverse, mask=rows < T)
    tl.store(AMAX + bh * BLOCKS + block, tl.max(tl.max(tl.abs(x.to(tl.float32)), 1), 0))


@triton.jit
def _quantize(x, scale):
    """int8 rounding of x / scale, its norm and that of the residual, both a little too large."""
    y = x / scale
    rounded = tl.floor(y + 0.5)
    rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
    back = rounded * scale
    miss = x - back
    # Relative slack of 1e-4 covers the float32 rounding of the sums (at most 256 terms) many times over.
    size = tl.sqrt_rn(tl.sum(back * back, 1)) * 1.0001
    residual = tl.sqrt_rn(tl.sum(miss * miss, 1)) * 1.0001 + 1e-6 * size
    return rounded.to(tl.int8), size, residual


@triton.jit
def _row_maximum(P, count, BLOCK: tl.constexpr):
    best = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(P + at, mask=at < count, other=0.0))
    return tl.max(best, 0)


@triton.jit
def _quantize_keys_kernel(
    UNIT, AMAX, INT8, STATS, T, BLOCKS, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One scale a head, so that the integer threshold of a row is the same for every tile."""
    block, bh = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    rows = block * BR + tl.arange(0, BR)
    cols = tl.arange(0, DP)
    largest = _row_maximum(AMAX + bh * BLOCKS, BLOCKS, BLOCK)
    scale = tl.where(largest > 0.0, largest / 127.0, 1.0)
    x = load_rows(UNIT + bh * T * D, block * BR, T, cols, D, D, DP, BR, True).to(tl.float32)
    y, size, residual = _quantize(x, scale)
    inside = (rows < T)[:, None] & (cols < D)[None, :]
    tl.store(INT8 + bh * T * D + rows[:, None].to(tl.int64) * D + cols[None, :], y, mask=inside)
    tl.store(STATS + bh * 2 * BLOCKS + block, tl.max(size + residual, 0))
    tl.store(STATS + bh * 2 * BLOCKS + BLOCKS + block, tl.max(residual, 0))


@triton.jit
def _quantize_queries_kernel(
    UNIT, AMAX, STATS, TAU, INT8, THR, T, H, G, BLOCKS, QUERY_BLOCKS, tau_b, tau_h,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """int8 queries, one scale a row, and the integer each product must exceed to be a possible survivor."""
    block = tl.program_id(0) % QUERY_BLOCKS
    bh = (tl.program_id(0) // QUERY_BLOCKS).to(tl.int64)
    b, h = bh // H, bh % H
    kh = b * G + h // (H // G)
    rows = block * BR + tl.arange(0, BR)
    cols = tl.arange(0, DP)
    largest = _row_maximum(AMAX + kh * BLOCKS, BLOCKS, BLOCK)
    key_scale = tl.where(largest > 0.0, largest / 127.0, 1.0)
    key_size = _row_maximum(STATS + kh * 2 * BLOCKS, BLOCKS, BLOCK)
    key_residual = _row_maximum(STATS + kh * 2 * BLOCKS + BLOCKS, BLOCKS, BLOCK)
    x = load_rows(UNIT + bh * T * D, block * BR, T, cols, D, D, DP, BR, True).to(tl.float32)
    own = tl.max(tl.abs(x), 1)
    scale = tl.where(own > 0.0, own / 127.0, 1.0)
    y, size, residual = _quantize(x, scale[:, None])
    inside = (rows < T)[:, None] & (cols < D)[None, :]
    tl.store(INT8 + bh * T * D + rows[:, None].to(tl.int64) * D + cols[None, :], y, mask=inside)
    tau = tl.load(TAU + b * tau_b + h * tau_h + rows, mask=rows < T, other=float("inf"))
    # The exact kernels accumulate in float32 (or three tf32 products): their score can exceed the real
    # one by at most a few (D + 8) units of rounding of |q| |k|.
    slack = (D + 8) * 4.8e-7 * (size + residual) * key_size
    margin = size * key_residual + residual * key_size + slack
    missing = tau == float("inf")
    level = (tl.where(missing, 0.0, tau) - margin) / (scale * key_scale)
    # floor(level) - 2 rounds the threshold itself outwards: |level| * 2^-22 < 1 wherever it matters.
    level = tl.minimum(tl.maximum(level - tl.abs(level) * 1e-6, -2.0e9), 2.0e9)
    thr = tl.where(missing, 2147483647, tl.floor(level).to(tl.int32) - 2)
    tl.store(THR + bh * T + rows, thr, mask=rows < T)


@triton.jit
def _screen_tile(
    q, at, j, hi, cols, bits, thr, pos, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, G: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    NG: tl.constexpr = BN // G
    TPW: tl.constexpr = 32 // NG
    keys = j * BN + tl.arange(0, BN)
    if MASKED or D != DP:
        k = tl.load(at, mask=(keys < hi)[None, :] & (cols < D)[:, None], other=0)
    else:
        k = tl.load(at)
    if UPCAST:
        acc = tl.dot(q.to(tl.float32), k.to(tl.float32)).to(tl.int32)
    else:
        acc = tl.dot(q, k, out_dtype=tl.int32)
    if MASKED:
        seen = (keys < hi)[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= pos[:, None])
        acc = tl.where(seen, acc, -2147483648)
    # Eight columns stay apart: they lie in different threads of the product's layout, so the
    # maximum needs no exchange between threads until a whole word of flags is full.
    best = tl.max(tl.reshape(acc, [BM, NG, G // 8, 8]), 2)
    hit = (best > thr[:, None, None]).to(tl.int32)
    return bits | (hit << ((j % TPW) * NG + tl.arange(0, NG)[None, :, None]))


@triton.jit
def _flush(at, word, inside, bits, BM: tl.constexpr, GM: tl.constexpr, NG: tl.constexpr):
    """OR the flags of GM rows each and write one word a row group."""
    flat = tl.reshape(bits, [BM // GM, GM * NG * 8])
    tl.store(at + word, tl.reduce(flat, 1, either), mask=inside)


@triton.jit
def _screen_kernel(
    Q8, K8, THR, WORDS, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, NI, NW, BLOCKS,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GRAIN: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    nh = tl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    # Heavy row blocks first: under a causal mask the last rows see the most keys.
    block = BLOCKS - 1 - tl.program_id(0) % BLOCKS
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    first = block * BM
    if first >= q_len:
        return
    b = n * 0 if PACKED else n
    NG: tl.constexpr = BN // GRAIN
    TPW: tl.constexpr = 32 // NG
    q_base = ((b * H + h) * T + q0).to(tl.int64)
    k_base = ((b * G + h // (H // G)) * S + k0).to(tl.int64) * D
    rows = first + tl.arange(0, BM)
    pos = rows + off
    cols = tl.arange(0, DP)
    q = load_rows(Q8 + q_base * D, first, q_len, cols, D, D, DP, BM, True)
    thr = tl.load(THR + q_base + rows, mask=rows < q_len, other=2147483647)
    hi = k_len
    full = k_len // BN
    if CAUSAL:
        hi = tl.minimum(k_len, tl.maximum(tl.minimum(first + BM, q_len) + off, 0))
        full = tl.minimum(full, tl.maximum(first + off + 1, 0) // BN)
    at = K8 + k_base + tl.arange(0, BN)[None, :].to(tl.int64) * D + cols[:, None]
    groups = first // GRAIN + tl.arange(0, BM // GRAIN)
    word_at = WORDS + (nh.to(tl.int64) * NI + groups) * NW
    inside = groups < NI
    bits = tl.zeros([BM, NG, 8], tl.int32)
    for j in range(0, full):
        bits = _screen_tile(q, at, j, hi, cols, bits, thr, pos, D, DP, BM, BN, GRAIN, CAUSAL, False, UPCAST)
        if j % TPW == TPW - 1:
            _flush(word_at, j // TPW, inside, bits, BM, GRAIN, NG)
            bits = tl.zeros([BM, NG, 8], tl.int32)
        at += BN * D
    stop = tl.cdiv(hi, BN)
    for j in tl.range(full, stop, num_stages=1):
        bits = _screen_tile(q, at, j, hi, cols, bits, thr, pos, D, DP, BM, BN, GRAIN, CAUSAL, True, UPCAST)
        if j % TPW == TPW - 1:
            _flush(word_at, j // TPW, inside, bits, BM, GRAIN, NG)
            bits = tl.zeros([BM, NG, 8], tl.int32)
        at += BN * D
    if stop % TPW != 0:
        _flush(word_at, stop // TPW, inside, bits, BM, GRAIN, NG)


@triton.jit
def _transpose_kernel(WORDS, OUT, NI, NW, NJ, NIW, VIEWS: tl.constexpr, plane):
    """Bit (row group, key tile) of the union of the views becomes bit (key tile, row group)."""
    pid = tl.program_id(0)
    jw, iw = pid % NW, (pid // NW) % NIW
    nh = (pid // (NW * NIW)).to(tl.int64)
    lane = tl.arange(0, 32)
    i = iw * 32 + lane
    word = tl.load(WORDS + (nh * NI + i) * NW + jw, mask=i < NI, other=0)
    if VIEWS == 2:
        word |= tl.load(WORDS + plane + (nh * NI + i) * NW + jw, mask=i < NI, other=0)
    bit = ((word[:, None] >> lane[None, :]) & 1) << lane[:, None]
    j = jw * 32 + lane
    tl.store(OUT + (nh * NJ + j) * NIW + iw, tl.reduce(bit, 0, either), mask=j < NJ)


def padded(dim: int) -> int:
    """Head dim as the kernels see it: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(dim))


def prepare(x: torch.Tensor, normalize: bool) -> tuple[Operand, torch.Tensor]:
    """Normalize (B, H, T, D) rows; also the largest absolute entry of every block of rows."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    b, h, t, d = x.shape
    out = Operand(x)
    blocks = triton.cdiv(t, ROWS)
    amax = torch.empty((b * h, blocks), dtype=torch.float32, device=x.device)
    if amax.numel():
        _prepare_kernel[(b * h * blocks,)](
            x, out.unit, out.inverse, amax, t, h, blocks, x.stride(0), x.stride(1), x.stride(2),
            D=d, DP=padded(d), BR=ROWS, NORMALIZE=normalize, DTYPE=kernel_dtype(x.dtype),
            UPCAST=INTERPRETED, num_warps=4,
        )  # fmt: skip
    return out, amax


def quantize(q: Operand, k: Operand, k_amax: torch.Tensor, tau: torch.Tensor) -> None:
    """Add the int8 rows to both operands and the integer thresholds to q; tau is (B or 1, H or 1, T) float32."""
    b, h, t, d = q.unit.shape
    g, s = k.unit.shape[1:3]
    blocks = triton.cdiv(s, ROWS)
    k.int8 = torch.empty(k.unit.shape, dtype=torch.int8, device=k.unit.device)
    k.stats = torch.empty((b * g, 2, blocks), dtype=torch.float32, device=k.unit.device)
    q.int8 = torch.empty(q.unit.shape, dtype=torch.int8, device=q.unit.device)
    q.threshold = torch.empty((b, h, t), dtype=torch.int32, device=q.unit.device)
    block = min(1024, triton.next_power_of_2(blocks))
    _quantize_keys_kernel[(b * g * blocks,)](
        k.unit, k_amax, k.int8, k.stats, s, blocks, D=d, DP=padded(d), BR=ROWS, BLOCK=block, num_warps=4
    )
    tau = tau.expand(b, h, t)
    _quantize_queries_kernel[(b * h * triton.cdiv(t, ROWS),)](
        q.unit, k_amax, k.stats, tau, q.int8, q.threshold, t, h, g, blocks, triton.cdiv(t, ROWS), tau.stride(0), tau.stride(1),
        D=d, DP=padded(d), BR=ROWS, BLOCK=block, num_warps=4,
    )  # fmt: skip


def screen(q: Operand, k: Operand, geometry: Geometry, words: torch.Tensor, grain: int) -> None:
    """Fill ``words`` (N * H, row groups, words), zero on entry: bit j of a row group tells of its key tile j."""
    assert q.int8 is not None and k.int8 is not None
    _, h, t, d = q.unit.shape
    g, s = k.unit.shape[1:3]
    block = 128 if not INTERPRETED else grain
    blocks = triton.cdiv(geometry.max_q, block)
    # One grid axis throughout: the others end at 65,535.
    _screen_kernel[(geometry.sequences * h * blocks,)](
        q.int8, k.int8, q.threshold, words, geometry.layout if geometry.layout is not None else words,
        geometry.sequences, h, g, t, s, geometry.max_q, geometry.max_k, geometry.offset,
        words.shape[1], words.shape[2], blocks,
        D=d, DP=max(32, padded(d)), BM=block, BN=block, GRAIN=grain, CAUSAL=geometry.causal,
        RAGGED=geometry.layout is not None, PACKED=geometry.packed, UPCAST=INTERPRETED,
        num_warps=4, num_stages=3,
    )  # fmt: skip


def transpose(words: torch.Tensor, key_tiles: int) -> torch.Tensor:
    """Union over the views of ``words`` (views, N * H, NI, NW), transposed: (N * H, NJ, ceil(NI / 32))."""
    views, nh, ni, nw = words.shape
    out = torch.empty((nh, key_tiles, triton.cdiv(ni, 32)), dtype=torch.int32, device=words.device)
    _transpose_kernel[(nh * out.shape[2] * nw,)](
        words, out, ni, nw, key_tiles, out.shape[2], VIEWS=views, plane=words.stride(0), num_warps=4
    )
    return out
