"""Jitted helpers that every kernel of the package shares. Imports triton: load this module lazily."""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton's interpreter multiplies bfloat16 wrongly without a word; operands are widened there.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Sizes and counts are passed as they are: a kernel per length would be compiled otherwise, and with the 1s
# of a single token folded in, one of them crashed ptxas.
SIZES = [
    "T", "S", "H", "G", "N", "MAX_Q", "MAX_K", "OFFSET", "NI", "NW", "NJ", "NIW", "NL", "plane", "capacity",
    "BLOCKS", "Q_BLOCKS", "K_BLOCKS", "K_PROGRAMS", "SPLITS", "SPAN", "R", "ROWS", "TRIALS", "TRIAL_BLOCKS",
    "SPANS", "seed", "TOKENS", "DENSE_FROM", "LIST_FROM", "DENSE_FROM_KEYS", "LIST_FROM_KEYS", "LIST_MOST",
]  # fmt: skip


@triton.jit
def either(a, b):
    """For reductions: whether any is true, or the bits that any has."""
    return a | b


@triton.jit
def higher(a, b):
    """The larger, or NaN: ``tl.max`` and ``tl.maximum`` pass NaN over."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maxima(x, AXIS: tl.constexpr, UPCAST: tl.constexpr):
    """Maxima along an axis, NaN where there is one."""
    if UPCAST:
        # The interpreter runs a custom reduction element by element, and warns of maxima of NaN alone.
        number = x == x
        found = tl.max(tl.where(number, x, float("-inf")), AXIS)
        return tl.where(tl.min(number.to(tl.int32), AXIS) > 0, found, float("nan"))
    return tl.reduce(x, AXIS, higher)


@triton.jit
def any_bits(x, UPCAST: tl.constexpr):
    """Bitwise OR over axis 1 of an int32 matrix."""
    if UPCAST:
        # The interpreter runs a custom reduction element by element; 32 maxima are far faster there.
        out = tl.max(x & 1, 1)
        for bit in tl.static_range(1, 32):
            out |= tl.max((x >> bit) & 1, 1) << bit
        return out
    return tl.reduce(x, 1, either)


@triton.jit
def dot(a, b, acc, PREC: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a @ b in float32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PREC)


@triton.jit
def sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED: tl.constexpr):
    """First query row, query length, first key, key length and query offset of sequence n."""
    if RAGGED:
        q0 = tl.load(LAYOUT + n)
        q_len = tl.load(LAYOUT + N + n)
        k0 = tl.load(LAYOUT + 2 * N + n)
        k_len = tl.load(LAYOUT + 3 * N + n)
        off = tl.load(LAYOUT + 4 * N + n)
        return q0, q_len, k0, k_len, off
    else:
        return n * 0, n * 0 + MAX_Q, n * 0, n * 0 + MAX_K, n * 0 + OFFSET


@triton.jit
def head_at(X, b, h, first, xb, xh, xt):
    """Where row ``first`` of head h of sequence b of X lies, by its strides; offsets pass 2^31."""
    return X + b.to(tl.int64) * xb + h.to(tl.int64) * xh + first.to(tl.int64) * xt


@triton.jit
def row_block(
    LAYOUT, N, H, G, MAX_Q, MAX_K, OFFSET, BLOCKS, BM: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """What a program that owns a block of BM rows of one query head works on.

    Number of the head among all, its batch entry, query head, key head and first row; then what :func:`sequence` says.
    The last rows come first: under a causal mask they see the most keys.
    """
    nh, block = tl.program_id(0) // BLOCKS, BLOCKS - 1 - tl.program_id(0) % BLOCKS
    n, h = nh // H, nh % H
    q0, q_len, k0, k_len, off = sequence(LAYOUT, n, N, MAX_Q, MAX_K, OFFSET, RAGGED)
    b = n * 0 if PACKED else n
    return nh, b, h, h // (H // G), block * BM, q0, q_len, k0, k_len, off


@triton.jit
def first_bit(word):
    """Index of the lowest set bit of a non-zero int32."""
    low = (word & -word).to(tl.uint32, bitcast=True)
    # A power of two converts to float32 without rounding; its exponent is the index.
    return ((low.to(tl.float32).to(tl.uint32, bitcast=True) >> 23) - 127).to(tl.int32)


@triton.jit
def bit_count(word):
    """Number of set bits of an int32."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def fast_log2(x, UPCAST: tl.constexpr):
    """log2(x) by the GPU's own instruction, to 2^-22 absolutely; ``tl.log2`` is accurate near 1, and far slower."""
    if UPCAST:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rectified_power(x, POWER: tl.constexpr):
    """x^POWER for x >= 0, NaN for NaN."""
    if POWER == 1.0:
        return x
    elif POWER == 2.0:
        return x * x
    else:
        # NaN stays NaN.
        return tl.where(x <= 0.0, 0.0, tl.exp2(POWER * tl.log2(tl.where(x <= 0.0, 1.0, x))))


@triton.jit
def rectified_slope(x, POWER: tl.constexpr):
    """Derivative of max(x, 0)^POWER, for x already rectified; 0 at 0."""
    if POWER == 1.0:
        return tl.where(x > 0.0, 1.0, 0.0)
    elif POWER == 2.0:
        return 2.0 * x
    else:
        return tl.where(x > 0.0, POWER * tl.exp2((POWER - 1.0) * tl.log2(tl.where(x > 0.0, x, 1.0))), 0.0)


@triton.jit
def load_rows(
    base, start, stop, cols, stride_t, D: tl.constexpr, DP: tl.constexpr, COUNT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + COUNT - 1 of a matrix with unit column stride; 0 outside.

    Only the first row's offset needs 64 bits: it passes 2^31 with fused projections at 10^5 tokens.
    """
    step = tl.arange(0, COUNT)
    at = base + tl.full([], 1, tl.int64) * start * stride_t
    at = at + ((step * stride_t)[:, None] + cols[None, :])
    if MASKED:
        inside = (start + step < stop)[:, None]
        if D == DP:
            return tl.load(at, mask=inside, other=0.0)
        return tl.load(at, mask=inside & (cols < D)[None, :], other=0.0)
    if D == DP:
        return tl.load(at)
    return tl.load(at, mask=(cols < D)[None, :], other=0.0)


@triton.jit
def narrow(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """x rounded to DTYPE, to nearest even; the interpreter's own cast to bfloat16 truncates."""
    if UPCAST and tl.bfloat16 == DTYPE:
        u = x.to(tl.uint32, bitcast=True)
        u = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000
        x = u.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def unit_rows(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Rows of x divided by their norms, rounded to DTYPE, and the reciprocal norms (0 for a zero row)."""
    wide = x.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    # Scaled by a power of two first, exactly, so that squares neither overflow nor vanish: 2^-e of the largest.
    exponent = tl.minimum(largest.to(tl.uint32, bitcast=True) & 0x7F800000, 253 << 23)
    scale = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    wide = wide * scale[:, None]
    norm = tl.sqrt_rn(tl.sum(wide * wide, 1))
    inverse = tl.where(largest > 0.0, 1.0 / tl.where(largest > 0.0, norm, 1.0), 0.0)
    return narrow(wide * inverse[:, None], DTYPE, UPCAST), inverse * scale


@triton.jit
def live_words(at, first, NW):
    """Which of the 32 words from ``first`` on are not zero, as bits; one load instead of 32 in a row."""
    lane = tl.arange(0, 32)
    word = tl.load(at + first + lane, mask=first + lane < NW, other=0)
    return tl.sum((word != 0).to(tl.int32) << lane, 0)


@triton.jit
def gather_rows(base, index, inside, cols, stride_t, D: tl.constexpr, DP: tl.constexpr):
    """Rows ``index`` of a matrix with unit column stride; 0 where not ``inside``."""
    at = base + ((index.to(tl.int64) * stride_t)[:, None] + cols[None, :])
    if D == DP:
        return tl.load(at, mask=inside[:, None], other=0.0)
    return tl.load(at, mask=inside[:, None] & (cols < D)[None, :], other=0.0)
