"""Rows of 16 bits in one warp each: many rows at once, and no sum that crosses warps. Imports triton.

As in ``triton_stream.py`` a row is read once, zeros are written for its weights, and the maxima of groups of its scores
are solved for a bound on its threshold. A row is read in four parts, of which only the maxima are kept: up to 4,096
scores a thread then needs 64 registers, and a multiprocessor holds 32 rows. The groups that pass the bound, mostly as
many as the row has weights, are read again whole, solved in registers and written over the zeros; a row of more is left
to :func:`.triton_stream.flat_row`. Closed forms (alpha = 1.5 and 2) only.

Scores are loaded as int32 words, of which bfloat16 has the maxima of both halves in one instruction.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import bit_count, first_bit, narrow
from .triton_rows import higher, solve_some_closed, weights_below
from .triton_stream import _SLACK, flat_row

# Neighbors of a group: a load of 16 bytes.
GROUP = 8
_GROUP = tl.constexpr(GROUP)
_WORDS = tl.constexpr(GROUP // 2)
# For the second-level cache: most scores are read once, and what comes next reads the weights.
_ONCE = tl.constexpr("evict_first")
_NEXT = tl.constexpr("evict_last")


@triton.jit
def scores_of(words, DTYPE: tl.constexpr):
    """float32 scores (A, 2 W) of int32 words (A, W)."""
    if tl.bfloat16 == DTYPE:
        first = (words << 16).to(tl.float32, bitcast=True)
        second = (words & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(first, second), [words.shape[0], 2 * words.shape[1]])
    else:
        first = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(first, second), [words.shape[0], 2 * words.shape[1]])


@triton.jit
def _maxima(z, UPCAST: tl.constexpr):
    """Maxima of the last dimension, NaN or inf where one is."""
    if UPCAST:
        # The interpreter runs a custom reduction element by element, and warns of arithmetic with NaN.
        return tl.max(tl.where(z < float("inf"), z, float("inf")), 1)
    return tl.reduce(z, 1, higher)


@triton.jit
def _higher_halves(a, b):
    """The larger ones of two pairs of bfloat16 in int32, NaN where one is."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def _tops(words, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Maxima of groups of eight neighbors, NaN or inf where one is, from their words; a group lies in one thread."""
    GROUPS: tl.constexpr = words.shape[0] // 4
    if tl.bfloat16 == DTYPE and not UPCAST:
        best = tl.reduce(tl.reshape(words, [GROUPS, 4]), 1, _higher_halves)
        return _maxima(scores_of(tl.reshape(best, [GROUPS, 1]), DTYPE), UPCAST)
    else:
        return _maxima(scores_of(tl.reshape(words, [GROUPS, 4]), DTYPE), UPCAST)


@triton.jit
def _part(
    WORDS_OF_X, out, part, N, NW, PART: tl.constexpr, DTYPE: tl.constexpr, NOTHING: tl.constexpr,
    FULL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Maxima of the ``PART`` groups of a part of a row, whose weights become 0."""
    word = part * (PART * _WORDS) + tl.arange(0, PART * _WORDS)
    col = part * (PART * _GROUP) + tl.arange(0, PART * _GROUP)
    zeros = tl.zeros([PART * _GROUP], out.dtype.element_ty)
    if FULL:
        words = tl.load(WORDS_OF_X + word, eviction_policy=_ONCE)
        tl.store(out + col, zeros, eviction_policy=_NEXT)
    else:
        words = tl.load(WORDS_OF_X + word, mask=word < NW, other=NOTHING, eviction_policy=_ONCE)
        tl.store(out + col, zeros, mask=col < N, eviction_policy=_NEXT)
    return _tops(words, DTYPE, UPCAST)


@triton.jit
def _list_groups(LIST, above, THREADS: tl.constexpr):
    """Write down the groups that pass, those of a thread one after another; returns how many there are."""
    EACH: tl.constexpr = above.shape[0] // THREADS
    # Every THREADS-th group lies in one thread, as a bit of its own.
    bits = tl.sum(tl.reshape(above, [EACH, THREADS]).to(tl.int32) << tl.arange(0, EACH)[:, None], 0)
    count = bit_count(bits)
    at = LIST + (tl.cumsum(count, 0) - count)
    thread = tl.arange(0, THREADS)
    for step in range(tl.max(count, 0)):
        group = first_bit(tl.where(bits != 0, bits, 1)) * THREADS + thread
        tl.store(at + step, group.to(LIST.dtype.element_ty), mask=bits != 0)
        bits = bits & (bits - 1)
    return tl.sum(count, 0)


@triton.jit
def _write_weights(
    WORDS_OF_X, out, groups, exists, top, start, N, DTYPE: tl.constexpr, POWER: tl.constexpr, NOTHING: tl.constexpr,
    MOST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Read the groups again, all that exist, solve them, and write their weights."""
    NUMBER: tl.constexpr = groups.shape[0]
    word = (groups * _WORDS)[:, None] + tl.arange(0, _WORDS)[None, :]
    words = tl.load(WORDS_OF_X + word, mask=exists[:, None], other=NOTHING)
    u = tl.reshape(scores_of(words, DTYPE), [1, NUMBER * _GROUP]) - top[:, None]
    p = weights_below(u, start, top, N, POWER, False, False, MOST, UPCAST)
    p = tl.reshape(narrow(p, out.dtype.element_ty, UPCAST), [NUMBER, _GROUP])
    col = (groups * _GROUP)[:, None] + tl.arange(0, _GROUP)[None, :]
    tl.store(out + col, p, mask=exists[:, None])


@triton.jit
def warp_forward(
    X, WORDS_OF_X, P, LIST, N, NW, stride, word_stride,
    WIDTH: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr, POWER: tl.constexpr,
    NOTHING: tl.constexpr, FULL: tl.constexpr, MOST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A row of up to ``WIDTH`` groups a program; its length is a multiple of a group's."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    PART: tl.constexpr = WIDTH // 4
    SPAN: tl.constexpr = WIDTH * _GROUP
    row = tl.program_id(0).to(tl.int64)
    X, WORDS_OF_X, out, LIST = X + row * stride, WORDS_OF_X + row * word_stride, P + row * N, LIST + row * WIDTH
    first = _part(WORDS_OF_X, out, 0, N, NW, PART, DTYPE, NOTHING, FULL, UPCAST)
    second = _part(WORDS_OF_X, out, 1, N, NW, PART, DTYPE, NOTHING, FULL, UPCAST)
    third = _part(WORDS_OF_X, out, 2, N, NW, PART, DTYPE, NOTHING, FULL, UPCAST)
    fourth = _part(WORDS_OF_X, out, 3, N, NW, PART, DTYPE, NOTHING, FULL, UPCAST)
    both = tl.join(tl.join(first, second), tl.join(third, fourth))
    tops = tl.reshape(tl.permute(both, (2, 1, 0)), [WIDTH])
    peak = tl.max(tops, 0) if UPCAST else tl.reduce(tops, 0, higher)
    if (peak < float("inf")) == 0:
        # Zeros come before anything that is written over them.
        tl.debug_barrier()
        col = tl.arange(0, SPAN)
        tl.store(out + col, tl.full([SPAN], float("nan"), tl.float32).to(P.dtype.element_ty), mask=col < N)
    else:
        highest = tl.where(peak > float("-inf"), peak, 0.0)
        top = tl.zeros([1], tl.float32) + highest
        start = solve_some_closed(tops[None, :], top, POWER, MOST)
        bound = tl.max(start * (-1.0 - _SLACK) * POWER, 0)
        number = _list_groups(LIST, tops - highest > bound, THREADS)
        # What one thread wrote, another reads; and zeros come before weights.
        tl.debug_barrier()
        if number <= CAPACITY:
            slot = tl.arange(0, CAPACITY)
            listed = tl.load(LIST + slot, mask=slot < number, other=0).to(tl.int32)
            _write_weights(
                WORDS_OF_X, out, listed, slot < number, top, start, N, DTYPE, POWER, NOTHING, MOST, UPCAST
            )  # fmt: skip
        else:
            flat_row(
                X, out, LIST, number, top, start, top, N, SPAN, SPAN, _GROUP, 1, CHUNK, POWER, False, False, MOST,
                UPCAST,
            )  # fmt: skip
