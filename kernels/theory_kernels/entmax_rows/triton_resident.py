"""Rows that are streamed by programs that stay: the next row is on its way while one is solved. Imports triton.

As in ``triton_stream.py`` a row is read once, zeros are written for its weights, and the maxima of groups of its scores
are solved for a bound on its threshold. Here a program goes through several rows, as many programs as the device holds
at once, and asks for its next row before it solves this one. The groups that pass the bound, mostly as many as the row
has weights, are read again whole, solved in registers and written over the zeros; a row of more is left to
:func:`.triton_stream.flat_row`. Closed forms (alpha = 1.5 and 2) only.

Scores come as int32 words: what is on its way is kept as it was loaded, so that nothing waits for it.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import narrow
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
def _maxima(z, UPCAST: tl.constexpr):
    """Maxima of the last dimension, NaN or inf where one is."""
    if UPCAST:
        # The interpreter runs a custom reduction element by element, and warns of arithmetic with NaN.
        return tl.max(tl.where(z < float("inf"), z, float("inf")), 1)
    return tl.reduce(z, 1, higher)


@triton.jit
def _row(X, row, ROWS, NW, stride, WORDS: tl.constexpr, NOTHING: tl.constexpr, FULL: tl.constexpr):
    """The words of a row, of the last one once more where there are no more."""
    word = tl.arange(0, WORDS)
    at = X + tl.minimum(row, ROWS - 1).to(tl.int64) * stride + word
    if FULL:
        return tl.load(at)
    return tl.load(at, mask=word < NW, other=NOTHING)


@triton.jit
def resident_forward(
    X, WORDS_OF_X, P, LIST, ROWS, N, NW, stride, word_stride, STEP,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr,
    THREADS: tl.constexpr, POWER: tl.constexpr, AHEAD: tl.constexpr, NOTHING: tl.constexpr, FULL: tl.constexpr,
    MOST: tl.constexpr, UPCAST: tl.constexpr,
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
    group = tl.ravel(tl.trans(tl.reshape(tl.arange(0, WIDTH), [WIDTH // THREADS, THREADS])))
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
            # In an order in which neighbors lie in one thread: the sums before them cross threads once.
            kept = tl.ravel(tl.trans(tl.reshape(tops - highest > bound, [WIDTH // THREADS, THREADS])))
            one = kept.to(tl.int32)
            tl.store(LIST + tl.cumsum(one, 0) - one, group.to(LIST.dtype.element_ty), mask=kept)
            number = tl.sum(one, 0)
            # What one thread wrote, another reads; and zeros come before weights.
            tl.debug_barrier()
            if number <= CAPACITY:
                listed = tl.load(LIST + slot, mask=slot < number, other=0).to(tl.int32)
                piece = tl.arange(0, PIECES)[None, :] * WIDTH
                first = tl.reshape(listed[:, None] + piece, [CAPACITY * PIECES])
                there = tl.reshape((slot < number)[:, None] & (piece >= 0), [CAPACITY * PIECES])
                col = (first * W)[:, None] + tl.arange(0, W)[None, :]
                again = tl.load(
                    WORDS_OF_X + at * word_stride + col, mask=there[:, None] & (col < NW), other=NOTHING
                )  # fmt: skip
                u = tl.reshape(scores_of(again, DTYPE), [1, CAPACITY * PIECES * GROUP]) - top[:, None]
                p = weights_below(u, start, top, N, POWER, False, False, MOST, UPCAST)
                p = tl.reshape(narrow(p, P.dtype.element_ty, UPCAST), [CAPACITY * PIECES, GROUP])
                col = (first * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
                tl.store(out + col, p, mask=there[:, None] & (col < N))
            else:
                flat_row(
                    X + at * stride, out, LIST, number, top, start, top, N, SPAN, WIDTH * GROUP, GROUP, PIECES, CHUNK,
                    POWER, False, False, MOST, UPCAST,
                )  # fmt: skip
        if not AHEAD:
            words = _row(WORDS_OF_X, row, ROWS, NW, word_stride, WORDS, NOTHING, FULL)
