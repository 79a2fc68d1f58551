"""The screen: which tiles can hold a survivor, decided with int8 products and a rigorous margin.

With ``q = a q' + e`` and ``k = b k' + f`` (q', k' the int8 roundings, e and f what they miss),

    <q, k> = a b <q', k'> + <a q', f> + <e, k>,

so a survivor ``<q, k> > tau`` has ``a b <q', k'> > tau - |a q'| |f| - |e| |k|`` by Cauchy-Schwarz. The
norms are measured, not assumed, and rounded outwards; int8 products are exact in int32. A flag can
be a false alarm, a cleared flag cannot be a miss. Imports triton: load this module lazily.
"""

# ruff: noqa: SIM102, SIM108 - branches on compile-time flags stay apart from branches on data
# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .geometry import Geometry, without_padding
from .primitives import INTERPRETED, SIZES, any_bits, load_rows, sequence, unit_rows

# Found on an H200: three programs fit a multiprocessor, one's maxima run beside the others' products.
SCREEN_OPTIONS = {"BM": 128, "BN": 128, "num_warps": 4, "num_stages": 3, "maxnreg": 168}


class Operands(NamedTuple):
    """A view ready for the exact kernels.

    ``q``, ``k``: normalized (or raw) rows, contiguous; ``inverse_q``, ``inverse_k``: reciprocal norms;
    ``amax``: largest entry of every block of keys; ``tau``: thresholds (B, H, T).
    """

    q: torch.Tensor
    k: torch.Tensor
    inverse_q: torch.Tensor
    inverse_k: torch.Tensor
    amax: torch.Tensor
    tau: torch.Tensor


class Gate(NamedTuple):
    """Codes int32 of what each head does, and one of them.

    Of query heads: work for heads with ``code`` is left out. Of key heads (``keys``): only that work is done.
    """

    codes: torch.Tensor
    code: int
    keys: bool = False


class Quantized(NamedTuple):
    """A view ready for the screen: int8 rows, and the integer that a product must exceed, (B, H, T)."""

    q: torch.Tensor
    k: torch.Tensor
    level: torch.Tensor


@triton.jit
def _quantize(x, scale):
    """int8 rounding of x / scale, its norm and that of the residual, both a little too large."""
    rounded = tl.floor(x / scale + 0.5)
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
def _unit_tile(
    X, UNIT, INV, start, T, row0, cols, stride, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr,
    NORMALIZE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Normalize BR rows, store them and their reciprocal norms, and return them."""
    rows = start + tl.arange(0, BR)
    x = load_rows(X, start, T, cols, stride, D, DP, BR, True)
    inverse = tl.full([BR], 1.0, tl.float32)
    if NORMALIZE:
        x, inverse = unit_rows(x, UNIT.dtype.element_ty, UPCAST)
    at = UNIT + row0 * D + (rows[:, None] * D + cols[None, :])
    tl.store(at, x, mask=(rows < T)[:, None] & (cols < D)[None, :])
    tl.store(INV + row0 + rows, inverse, mask=rows < T)
    return x.to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def _operands_kernel(
    Q, K, UNIT_Q, UNIT_K, INV_Q, INV_K, AMAX, GIVEN, BETA, TAU, T, S, H, G, Q_BLOCKS, K_BLOCKS,
    K_PROGRAMS, qb, qh, qt, kb, kh, kt, tau_b, tau_h, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr,
    NORMALIZE: tl.constexpr, SCREENED: tl.constexpr, SCALED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Keys in the first programs, queries in the others, so that a dense call needs one launch."""
    pid = tl.program_id(0)
    cols = tl.arange(0, DP)
    if pid < K_PROGRAMS:
        block, bg = pid % K_BLOCKS, (pid // K_BLOCKS).to(tl.int64)
        x = _unit_tile(K + (bg // G) * kb + (bg % G) * kh, UNIT_K, INV_K, block * BR, S, bg * S, cols, kt, D, DP,
                       BR, NORMALIZE, UPCAST)  # fmt: skip
        if SCREENED:
            tl.store(AMAX + bg * K_BLOCKS + block, tl.max(tl.max(tl.abs(x), 1), 0))
    else:
        pid = pid - K_PROGRAMS
        block, bh = pid % Q_BLOCKS, (pid // Q_BLOCKS).to(tl.int64)
        b, h = bh // H, bh % H
        rows = block * BR + tl.arange(0, BR)
        x = _unit_tile(Q + b * qb + h * qh, UNIT_Q, INV_Q, block * BR, T, bh * T, cols, qt, D, DP, BR, NORMALIZE,
                       UPCAST)  # fmt: skip
        tau = tl.load(GIVEN + b * tau_b + h * tau_h + rows, mask=rows < T, other=0.0)
        if SCALED:
            # Stored, not recomputed by the consumers: a fused multiply-add would round it differently.
            tau = tau * tl.load(BETA + h)
        tl.store(TAU + bh * T + rows, tau, mask=rows < T)


@triton.jit(do_not_specialize=SIZES)
def _quantize_queries_kernel(
    UNIT, TAU, AMAX, STATS, CODES, INT8, LEVEL, T, H, G, BLOCKS, K_BLOCKS, D: tl.constexpr,
    DP: tl.constexpr, BR: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """int8 queries, one scale a row, and the integer that a product must exceed to be a possible survivor."""
    block, bh = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    b, h = bh // H, bh % H
    key = b * G + h // (H // G)
    if GATE == 1:
        if tl.load(CODES + bh) == CODE:
            return
    if GATE == 2:
        if tl.load(CODES + key) != CODE:
            return
    rows = block * BR + tl.arange(0, BR)
    cols = tl.arange(0, DP)
    largest = _row_maximum(AMAX + key * K_BLOCKS, K_BLOCKS, BLOCK)
    key_scale = tl.where(largest > 0.0, largest / 127.0, 1.0)
    key_size = _row_maximum(STATS + key * 2 * K_BLOCKS, K_BLOCKS, BLOCK)
    key_residual = _row_maximum(STATS + key * 2 * K_BLOCKS + K_BLOCKS, K_BLOCKS, BLOCK)
    x = load_rows(UNIT + bh * T * D, block * BR, T, cols, D, D, DP, BR, True).to(tl.float32)
    tau = tl.load(TAU + bh * T + rows, mask=rows < T, other=0.0)
    own = tl.max(tl.abs(x), 1)
    scale = tl.where(own > 0.0, own / 127.0, 1.0)
    y, size, residual = _quantize(x, scale[:, None])
    at = INT8 + bh * T * D + (rows[:, None] * D + cols[None, :])
    tl.store(at, y, mask=(rows < T)[:, None] & (cols < D)[None, :])
    # The exact kernels accumulate in float32 (or three tf32 products): their score can exceed the real one
    # by at most a few (D + 8) units of rounding of |q| |k|.
    slack = (D + 8) * 4.8e-7 * (size + residual) * key_size
    margin = size * key_residual + residual * key_size + slack
    level = (tau - margin) / (scale * key_scale)
    level = tl.where(level == level, level, -1.0e9)
    # Rounded outwards: the float32 error of level is below |level| * 1e-6 + 1.
    level = tl.minimum(tl.maximum(level - tl.abs(level) * 1e-6, -1.0e9), 1.0e9)
    tl.store(LEVEL + bh * T + rows, tl.floor(level).to(tl.int32) - 2, mask=rows < T)


@triton.jit(do_not_specialize=SIZES)
def _quantize_keys_kernel(
    UNIT, AMAX, CODES, INT8, STATS, T, R, BLOCKS, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr,
    BLOCK: tl.constexpr, GATE: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """One scale a head, so that the integer threshold of a row is the same for every tile."""
    block, bh = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    if GATE == 1:
        wanted = 0
        for r in range(R):
            wanted += (tl.load(CODES + bh * R + r) != CODE).to(tl.int32)
        if wanted == 0:
            return
    if GATE == 2:
        if tl.load(CODES + bh) != CODE:
            return
    rows = block * BR + tl.arange(0, BR)
    cols = tl.arange(0, DP)
    largest = _row_maximum(AMAX + bh * BLOCKS, BLOCKS, BLOCK)
    scale = tl.where(largest > 0.0, largest / 127.0, 1.0)
    x = load_rows(UNIT + bh * T * D, block * BR, T, cols, D, D, DP, BR, True).to(tl.float32)
    y, size, residual = _quantize(x, scale)
    at = INT8 + bh * T * D + (rows[:, None] * D + cols[None, :])
    tl.store(at, y, mask=(rows < T)[:, None] & (cols < D)[None, :])
    # A key of NaN has no bound: all that its head could meet is looked at.
    residual = tl.where(residual == residual, residual, float("inf"))
    size = tl.where(size == size, size, float("inf"))
    tl.store(STATS + bh * 2 * BLOCKS + block, tl.max(size + residual, 0))
    tl.store(STATS + bh * 2 * BLOCKS + BLOCKS + block, tl.max(residual, 0))


@triton.jit
def _screen_tile(
    q, at, step, j, hi, cols, bits, thr, pos, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, G: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    NG: tl.constexpr = BN // G
    keys = j * BN + tl.arange(0, BN)
    if MASKED or D != DP:
        k = tl.load(at + step, mask=(keys < hi)[None, :] & (cols < D)[:, None], other=0)
    else:
        k = tl.load(at + step)
    if UPCAST:
        acc = tl.dot(q.to(tl.float32), k.to(tl.float32)).to(tl.int32)
    else:
        acc = tl.dot(q, k, out_dtype=tl.int32)
    if MASKED:
        seen = (keys < hi)[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= pos[:, None])
        acc = tl.where(seen, acc, -268435456)
    # Eight columns stay apart: they lie in different threads of the product's layout, so the
    # maximum needs no exchange between threads until a whole word of flags is full.
    best = tl.max(tl.reshape(acc, [BM, NG, G // 8, 8]), 2)
    # The sign of thr - best is the flag; shifting it in is one funnel shift.
    sign = (thr[:, None, None] - best).to(tl.uint32, bitcast=True) >> 31
    return (bits << 1) | sign


@triton.jit
def reverse_bits(x):
    """Bit b of a uint32 to place 31 - b."""
    x = ((x >> 1) & 0x55555555) | ((x & 0x55555555) << 1)
    x = ((x >> 2) & 0x33333333) | ((x & 0x33333333) << 2)
    x = ((x >> 4) & 0x0F0F0F0F) | ((x & 0x0F0F0F0F) << 4)
    x = ((x >> 8) & 0x00FF00FF) | ((x & 0x00FF00FF) << 8)
    return (x >> 16) | (x << 16)


@triton.jit
def spread(x):
    """Bits 0..15 to the even places."""
    x = (x | (x << 8)) & 0x00FF00FF
    x = (x | (x << 4)) & 0x0F0F0F0F
    x = (x | (x << 2)) & 0x33333333
    return (x | (x << 1)) & 0x55555555


@triton.jit
def _flush(
    at, word, inside, bits, count, BM: tl.constexpr, GM: tl.constexpr, NG: tl.constexpr, JOIN: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """OR the ``count`` flags shifted in for GM rows each, and write one word a row group, tile 0 in bit 0."""
    TPW: tl.constexpr = 32 // NG
    lane = tl.arange(0, NG)[None, :, None].to(tl.uint32)
    bits = (bits << (TPW - count).to(tl.uint32)) << (lane * TPW)
    flat = tl.reshape(bits.to(tl.int32, bitcast=True), [BM // GM, GM * NG * 8])
    x = any_bits(flat, UPCAST).to(tl.uint32, bitcast=True)
    x = reverse_bits(x)
    if NG == 2:
        x = spread(x >> 16) | (spread(x & 0xFFFF) << 1)
    out = x.to(tl.int32, bitcast=True)
    if JOIN:
        out |= tl.load(at + word, mask=inside, other=0)
    tl.store(at + word, out, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _screen_kernel(
    Q8, K8, THR, WORDS, CODES, LAYOUT, N, H, G, T, S, MAX_Q, MAX_K, OFFSET, NI, NW, BLOCKS,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GRAIN: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, GATE: tl.constexpr,
    JOIN: tl.constexpr, CODE: tl.constexpr, UPCAST: tl.constexpr,
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
    thr = tl.load(THR + q_base + rows, mask=rows < q_len, other=1000000000)
    hi = k_len
    full = k_len // BN
    if CAUSAL:
        hi = tl.minimum(k_len, tl.maximum(tl.minimum(first + BM, q_len) + off, 0))
        full = tl.minimum(full, tl.maximum(first + off + 1, 0) // BN)
    at = K8 + k_base
    step = tl.arange(0, BN)[None, :] * D + cols[:, None]
    groups = first // GRAIN + tl.arange(0, BM // GRAIN)
    word_at = WORDS + (nh.to(tl.int64) * NI + groups) * NW
    inside = groups < NI
    stop = tl.cdiv(hi, BN)
    if GATE:
        if tl.load(CODES + nh) != CODE:
            # Its group of heads may walk tiles all the same: then all of them. Flags of tiles past the last key do
            # no harm, the exact kernels mask what lies there.
            for word in range(tl.cdiv(stop, TPW)):
                tl.store(word_at + word, tl.full([BM // GRAIN], -1, tl.int32), mask=inside)
            return
    bits = tl.zeros([BM, NG, 8], tl.uint32)
    for j in range(full):
        bits = _screen_tile(q, at, step, j, hi, cols, bits, thr, pos, D, DP, BM, BN, GRAIN, CAUSAL, False, UPCAST)
        if j % TPW == TPW - 1:
            _flush(word_at, j // TPW, inside, bits, full * 0 + TPW, BM, GRAIN, NG, JOIN, UPCAST)
            bits = tl.zeros([BM, NG, 8], tl.uint32)
        at += BN * D
    for j in tl.range(full, stop, num_stages=1):
        bits = _screen_tile(q, at, step, j, hi, cols, bits, thr, pos, D, DP, BM, BN, GRAIN, CAUSAL, True, UPCAST)
        if j % TPW == TPW - 1:
            _flush(word_at, j // TPW, inside, bits, full * 0 + TPW, BM, GRAIN, NG, JOIN, UPCAST)
            bits = tl.zeros([BM, NG, 8], tl.uint32)
        at += BN * D
    if stop % TPW != 0:
        _flush(word_at, stop // TPW, inside, bits, stop % TPW, BM, GRAIN, NG, JOIN, UPCAST)


@triton.jit(do_not_specialize=SIZES)
def _transpose_kernel(WORDS, OUT, NI, NW, NJ, NIW):
    """Bit (row group, key tile) becomes bit (key tile, row group)."""
    pid = tl.program_id(0)
    jw, iw = pid % NW, (pid // NW) % NIW
    nh = (pid // (NW * NIW)).to(tl.int64)
    lane = tl.arange(0, 32)
    i = iw * 32 + lane
    word = tl.load(WORDS + (nh * NI + i) * NW + jw, mask=i < NI, other=0)
    bit = ((word[:, None] >> lane[None, :]) & 1) << lane[:, None]
    j = jw * 32 + lane
    tl.store(OUT + (nh * NJ + j) * NIW + iw, tl.sum(bit, 0), mask=j < NJ)


def padded(dim: int) -> int:
    """Head dim as the kernels see it: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(dim))


def cleaned(view: tuple[torch.Tensor, torch.Tensor], geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    """The view with padding set to 0: the int8 scales and margins are maxima over all stored rows."""
    if geometry.packed:
        return view
    return without_padding(view[0], geometry, False), without_padding(view[1], geometry, True)


def _row_block(dim: int) -> int:
    return max(16, min(64, 4096 // padded(dim)))


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    normalize: bool,
    screened: bool,
    given: torch.Tensor,
    beta: torch.Tensor | None,
    tau: torch.Tensor,
    raw_keys: bool = False,
) -> Operands:
    """Operands of one view, and the thresholds.

    Parameters
    ----------
    q, k : torch.Tensor
        (B, H, T, D) and (B, G, S, D), any strides.
    given : torch.Tensor
        float32, broadcastable to (B, H, T), row stride 1: thresholds, or what beta (H,) multiplies.
    tau : torch.Tensor
        Output, (B, H, T) float32: ``given``, times beta if there is one.
    raw_keys : bool
        Keep contiguous keys as they are: a consumer that reads them once normalizes them itself.
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    (b, h, t, d), (g, s) = q.shape, k.shape[1:3]
    rows = _row_block(d)
    q_blocks, k_blocks = triton.cdiv(t, rows), triton.cdiv(s, rows)
    given = given.expand(b, h, t)
    # Raw contiguous keys are used in place: a decoding step with normalized keys in its cache copies nothing.
    as_is = (raw_keys or not normalize) and not screened and k.is_contiguous()
    unit_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    unit_k = k if as_is else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    inv_q = torch.empty((b, h, t), dtype=torch.float32, device=q.device)
    inv_k = torch.empty((b, g, s), dtype=torch.float32, device=q.device)
    amax = torch.empty((b * g, k_blocks), dtype=torch.float32, device=q.device) if screened else tau
    key_programs = 0 if as_is else b * g * k_blocks
    if key_programs + b * h * q_blocks:
        _operands_kernel[(key_programs + b * h * q_blocks,)](
            q, k, unit_q, unit_k, inv_q, inv_k, amax, given, given if beta is None else beta, tau, t, s, h, g,
            q_blocks, k_blocks, key_programs, *q.stride()[:3], *k.stride()[:3], given.stride(0), given.stride(1),
            D=d, DP=padded(d), BR=rows, NORMALIZE=normalize, SCREENED=screened, SCALED=beta is not None,
            UPCAST=INTERPRETED, num_warps=4,
        )  # fmt: skip
    return Operands(unit_q, unit_k, inv_q, inv_k, amax, tau)


def quantize(x: Operands, gate: Gate | None) -> Quantized:
    """int8 rows and integer thresholds of a view prepared with ``screened``."""
    (b, h, t, d), (g, s) = x.q.shape, x.k.shape[1:3]
    rows = _row_block(d)
    q_blocks, k_blocks = triton.cdiv(t, rows), triton.cdiv(s, rows)
    int8_q = torch.empty(x.q.shape, dtype=torch.int8, device=x.q.device)
    int8_k = torch.empty(x.k.shape, dtype=torch.int8, device=x.k.device)
    stats = torch.empty((b * g, 2, k_blocks), dtype=torch.float32, device=x.q.device)
    level = torch.empty((b, h, t), dtype=torch.int32, device=x.q.device)
    fixed = {
        "D": d, "DP": padded(d), "BR": rows, "BLOCK": max(16, min(1024, triton.next_power_of_2(k_blocks))),
        "GATE": 0 if gate is None else 2 if gate.keys else 1, "CODE": -1 if gate is None else gate.code,
        "num_warps": 4,
    }  # fmt: skip
    codes = level if gate is None else gate.codes
    _quantize_keys_kernel[(b * g * k_blocks,)](x.k, x.amax, codes, int8_k, stats, s, h // g, k_blocks, **fixed)
    _quantize_queries_kernel[(b * h * q_blocks,)](
        x.q, x.tau, x.amax, stats, codes, int8_q, level, t, h, g, q_blocks, k_blocks, **fixed
    )
    return Quantized(int8_q, int8_k, level)


def shapes(q: torch.Tensor, k: torch.Tensor, geometry: Geometry, other: torch.Tensor) -> tuple:
    """Arguments that tell a kernel its sizes; ``other`` stands in for a layout that is not there."""
    return (
        geometry.layout if geometry.layout is not None else other, geometry.sequences, q.shape[1], k.shape[1],
        q.shape[2], k.shape[2], geometry.max_q, geometry.max_k, geometry.offset,
    )  # fmt: skip


def common_flags(dim: int, geometry: Geometry) -> dict:
    """Compile-time arguments that kernels over rows and keys share."""
    return {
        "D": dim, "DP": max(32, padded(dim)), "CAUSAL": geometry.causal, "RAGGED": geometry.layout is not None,
        "PACKED": geometry.packed, "UPCAST": INTERPRETED,
    }  # fmt: skip


def screen(
    x: Quantized,
    geometry: Geometry,
    words: torch.Tensor,
    grain: int,
    gate: Gate | None,
    join: bool = False,
) -> None:
    """Fill ``words`` (N * H, row groups, words), zero on entry: bit j of a row group tells of its key tile j.

    With ``join`` the flags are added to those of an earlier view.

    Heads with another code than the gate's get all their bits, unseen.
    """
    options = dict(SCREEN_OPTIONS)
    if options["BN"] > 2 * grain:
        raise ValueError(f"a screen tile spans at most 2 key tiles of {grain}, got {options['BN']} keys")
    if INTERPRETED:
        options = {"BM": grain, "BN": grain}
    blocks = triton.cdiv(geometry.max_q, options["BM"])
    # One grid axis throughout: the others end at 65,535.
    _screen_kernel[(words.shape[0] * blocks,)](
        x.q, x.k, x.level, words, words if gate is None else gate.codes, *shapes(x.q, x.k, geometry, words),
        words.shape[1], words.shape[2], blocks, **common_flags(x.q.shape[-1], geometry), GRAIN=grain,
        GATE=gate is not None, JOIN=join, CODE=-1 if gate is None else gate.code, **options,
    )  # fmt: skip


def transpose(words: torch.Tensor, key_tiles: int) -> torch.Tensor:
    """``words`` (N * H, NI, NW) transposed: (N * H, NJ, ceil(NI / 32))."""
    nh, ni, nw = words.shape
    out = torch.empty((nh, key_tiles, triton.cdiv(ni, 32)), dtype=torch.int32, device=words.device)
    _transpose_kernel[(nh * out.shape[2] * nw,)](words, out, ni, nw, key_tiles, out.shape[2], num_warps=4)
    return out
