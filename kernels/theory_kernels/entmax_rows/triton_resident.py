"""Rows that are streamed by programs that stay: the next row is on its way while one is solved. Imports triton.

As in ``triton_stream.py`` a row is read once, zeros are written for its weights, and the maxima of groups of its scores
are solved for a bound on its threshold. Here a program goes through several rows, as many programs as the device holds
at once, and may ask for its next row before it solves this one. The groups that pass the bound, mostly as many as the
row has weights, are read again whole, solved in registers and written over the zeros; a row of more is left to
:func:`.triton_stream.flat_row`. Closed forms (alpha = 1.5 and 2) only.

Scores come as int32 words: what is on its way is kept as it was loaded, so that nothing waits for it.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import bit_count, first_bit, narrow
from .triton_rows import higher, solve_some_closed, weights_below
from .triton_stream import _SLACK, flat_row


@triton.jit
def scores_of(words, DTYPE: tl.constexpr):
    """float32 scores (A, W) or (A, 2 W) of int32 words (A, W)."""
    if tl.float32 == DTYPE:
        return words.to(tl.float32, bitcast=True)
    elif tl.bfloat16 == DTYPE:
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
def group_tops(words, DTYPE: tl.constexpr, PIECES: tl.constexpr, W: tl.constexpr, UPCAST: tl.constexpr):
    """Maxima of the groups of a row, NaN or inf where one is, from its words; a group lies in one thread."""
    WIDTH: tl.constexpr = words.shape[0] // (PIECES * W)
    if tl.bfloat16 == DTYPE and not UPCAST:
        best = tl.reduce(tl.reshape(words, [PIECES * WIDTH, W]), 1, _higher_halves)
        if PIECES > 1:
            best = tl.reduce(tl.reshape(best, [PIECES, WIDTH]), 0, _higher_halves)
        return _maxima(scores_of(tl.reshape(best, [WIDTH, 1]), DTYPE), UPCAST)
    else:
        best = _maxima(scores_of(tl.reshape(words, [PIECES * WIDTH, W]), DTYPE), UPCAST)
        if PIECES > 1:
            best = _maxima(tl.trans(tl.reshape(best, [PIECES, WIDTH])), UPCAST)
        return best


@triton.jit
def _row(X, row, ROWS, NW, stride, WORDS: tl.constexpr, NOTHING: tl.constexpr, FULL: tl.constexpr):
    """The words of a row, anything where there is no such row."""
    word = tl.arange(0, WORDS)
    at = X + row.to(tl.int64) * stride + word
    if FULL:
        return tl.load(at, mask=(word >= 0) & (row < ROWS))
    return tl.load(at, mask=(word < NW) & (row < ROWS), other=NOTHING)


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
    WORDS_OF_X, out, groups, exists, top, start, N, NW, DTYPE: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, POWER: tl.constexpr, NOTHING: tl.constexpr, MOST: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Read the groups again, all that exist, solve them, and write their weights."""
    NUMBER: tl.constexpr = groups.shape[0] * PIECES
    piece = tl.arange(0, PIECES)[None, :] * WIDTH
    first = tl.reshape(groups[:, None] + piece, [NUMBER])
    there = tl.reshape(exists[:, None] & (piece >= 0), [NUMBER])
    col = (first * W)[:, None] + tl.arange(0, W)[None, :]
    again = tl.load(WORDS_OF_X + col, mask=there[:, None] & (col < NW), other=NOTHING)
    u = tl.reshape(scores_of(again, DTYPE), [1, NUMBER * GROUP]) - top[:, None]
    p = weights_below(u, start, top, N, POWER, False, False, MOST, UPCAST)
    p = tl.reshape(narrow(p, out.dtype.element_ty, UPCAST), [NUMBER, GROUP])
    col = (first * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    tl.store(out + col, p, mask=there[:, None] & (col < N))


@triton.jit
def resident_forward(
    X, WORDS_OF_X, P, LIST, ROWS, N, NW, stride, word_stride, STEP,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr,
    THREADS: tl.constexpr, POWER: tl.constexpr, AHEAD: tl.constexpr, NOTHING: tl.constexpr,
    FULL: tl.constexpr, MOST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Every STEP-th row a program, as PIECES tiles of WIDTH times GROUP neighbors; a group has those of all tiles."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    W: tl.constexpr = GROUP if tl.float32 == DTYPE else GROUP // 2
    WORDS: tl.constexpr = PIECES * WIDTH * W
    SPAN: tl.constexpr = PIECES * WIDTH * GROUP
    LIST = LIST + tl.program_id(0) * WIDTH
    row = tl.program_id(0)
    words = _row(WORDS_OF_X, row, ROWS, NW, word_stride, WORDS, NOTHING, FULL)
    slot = tl.arange(0, CAPACITY)
    while row < ROWS:
        at = row.to(tl.int64)
        tops = group_tops(words, DTYPE, PIECES, W, UPCAST)
        out = P + at * N
        span = tl.arange(0, SPAN)
        if FULL:
            tl.store(out + span, tl.zeros([SPAN], P.dtype.element_ty))
        else:
            tl.store(out + span, tl.zeros([SPAN], P.dtype.element_ty), mask=span < N)
        row += STEP
        if AHEAD:
            words = _row(WORDS_OF_X, row, ROWS, NW, word_stride, WORDS, NOTHING, FULL)
        peak = tl.max(tops, 0) if UPCAST else tl.reduce(tops, 0, higher)
        if (peak < float("inf")) == 0:
            tl.debug_barrier()
            nothing = tl.full([SPAN], float("nan"), tl.float32).to(P.dtype.element_ty)
            tl.store(out + span, nothing, mask=span < N)
        else:
            highest = tl.where(peak > float("-inf"), peak, 0.0)
            top = tl.zeros([1], tl.float32) + highest
            start = solve_some_closed(tops[None, :], top, POWER, MOST)
            bound = tl.max(start * (-1.0 - _SLACK) * POWER, 0)
            number = _list_groups(LIST, tops - highest > bound, THREADS)
            # What one thread wrote, another reads; and zeros come before weights.
            tl.debug_barrier()
            if number <= CAPACITY:
                listed = tl.load(LIST + slot, mask=slot < number, other=0).to(tl.int32)
                _write_weights(
                    WORDS_OF_X + at * word_stride, out, listed, slot < number, top, start, N, NW, DTYPE, GROUP, W,
                    WIDTH, PIECES, POWER, NOTHING, MOST, UPCAST,
                )  # fmt: skip
            else:
                flat_row(
                    X + at * stride, out, LIST, number, top, start, top, N, SPAN, WIDTH * GROUP, GROUP, PIECES,
                    CHUNK, POWER, False, False, MOST, UPCAST,
                )  # fmt: skip
        if not AHEAD:
            words = _row(WORDS_OF_X, row, ROWS, NW, word_stride, WORDS, NOTHING, FULL)
