"""Rows whose scores are read once, with little beside. Imports triton: load this module lazily.

The threshold of some of a row's scores is never above the row's own: with more scores the sum only grows. So while a
row is read, and zeros are written for its weights, the maxima of small groups of its scores are kept. They are solved
for themselves; groups whose maximum lies below that bound hold no weight and are not looked at again. In what remains,
the places of scores above it are listed in order, solved, and their weights written over the zeros. Where the list is
too short for them (flat rows), each step reads the remaining groups instead.

Rows of up to some 10^4 scores are one program each. Longer ones are read in parts, and a second kernel goes on from the
maxima of all parts. Nothing is added atomically: two runs agree bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import narrow
from .triton_rows import (
    between_ends,
    both_sums,
    closed_step,
    closed_sums,
    general_step,
    general_weights,
    higher,
    share_between,
    solve_some_closed,
    solve_some_general,
    step_is_large,
    weights_below,
)

# A bound that rounding moved up could lose a score of weight 1e-6^(1/eps); this much lower it cannot.
_SLACK = tl.constexpr(1e-5)


@triton.jit
def group_maxima(X, P, start, stop, BLOCK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr):
    """Maxima (BLOCK / GROUP,) of groups of X from ``start`` to ``stop``, NaN or inf if any is; P there becomes 0.

    A group is ``GROUP`` neighbors, which lie in one thread, of every tile of ``BLOCK`` scores.
    """
    GROUPS: tl.constexpr = BLOCK // GROUP
    each = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tops = tl.full([GROUPS], float("-inf"), tl.float32)
    first = start
    # With ``for``, a pass of the compiler would keep a maximum for every score of a tile.
    while first < stop:
        col = first + each
        z = tl.load(X + col, mask=col < stop, other=float("-inf")).to(tl.float32)
        tl.store(P + col, tl.zeros([GROUPS, GROUP], P.dtype.element_ty), mask=col < stop)
        if UPCAST:
            # The interpreter runs a custom reduction element by element, and warns of arithmetic with NaN.
            tops = tl.maximum(tops, tl.max(tl.where(z < float("inf"), z, float("inf")), 1))
        else:
            tops = tl.maximum(tops, tl.reduce(z, 1, higher), propagate_nan=tl.PropagateNan.ALL)
        first += BLOCK
    return tops


@triton.jit
def listed(
    X, GROUPS, first, number, N, SPAN, BLOCK: tl.constexpr, GROUP: tl.constexpr, PIECES_P: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Scores (CHUNK, PIECES_P GROUP) of the groups from ``first`` of the list on, their columns, and which exist."""
    place = first + tl.arange(0, CHUNK)
    group = tl.load(GROUPS + place, mask=place < number, other=0).to(tl.int32)
    PER_PART: tl.constexpr = BLOCK // GROUP
    at = group // PER_PART * SPAN + group % PER_PART * GROUP
    each = tl.arange(0, PIECES_P * GROUP)
    within = each // GROUP * BLOCK
    col = at[:, None] + (within + each % GROUP)[None, :]
    inside = (place < number)[:, None] & (within < SPAN)[None, :] & (col < N)
    return tl.load(X + col, mask=inside, other=float("-inf")).to(tl.float32), col, inside


@triton.jit
def flat_row(
    X, P, GROUPS, number, top, start, eps, N, SPAN, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PIECES_P: tl.constexpr, CHUNK: tl.constexpr, POWER: tl.constexpr, STEEP: tl.constexpr, PLAIN: tl.constexpr,
    MOST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A row of which more is alive than the list of scores holds: every step reads the listed groups."""
    ALL: tl.constexpr = CHUNK * PIECES_P * GROUP
    b, step = start, tl.zeros_like(top)
    lam, high = start, start
    low = tl.zeros_like(top) - tl.log(N.to(tl.float32))
    going, count = 1, 0
    while (going > 0) & (count < MOST):
        total, slope = tl.zeros_like(top), tl.zeros_like(top)
        b -= step
        for first in range(0, number, CHUNK):
            z, _, _ = listed(X, GROUPS, first, number, N, SPAN, BLOCK, GROUP, PIECES_P, CHUNK)
            u = tl.reshape(z, [1, ALL]) - top[:, None]
            if POWER == 0:
                p, steep = general_weights(u, lam, eps, PLAIN, UPCAST)
                more, part = both_sums(p, steep)
            else:
                more, part = closed_sums(tl.maximum(b[:, None] + u * (1.0 / POWER), 0.0), POWER)
            total += more
            slope += part
        if POWER == 0:
            lam, low, high, done = general_step(total, slope, lam, low, high, eps, 1.2e-7)
            going = tl.max((done == 0).to(tl.int32), 0)
        else:
            step = closed_step(total, slope, POWER)
            going = tl.max(step_is_large(step, slope, b, N.to(tl.float32), POWER).to(tl.int32), 0)
        count += 1
    share = tl.zeros_like(top)
    if STEEP:
        low, high = tl.where(eps > 1.0, low, lam), tl.where(eps > 1.0, high, lam)
        below, above = tl.zeros_like(top), tl.zeros_like(top)
        for first in range(0, number, CHUNK):
            z, _, _ = listed(X, GROUPS, first, number, N, SPAN, BLOCK, GROUP, PIECES_P, CHUNK)
            u = tl.reshape(z, [1, ALL]) - top[:, None]
            less, _ = general_weights(u, low, eps, False, UPCAST)
            more, _ = general_weights(u, high, eps, False, UPCAST)
            below += tl.sum(less, 1)
            above += tl.sum(more, 1)
        share = share_between(below, above)
    for first in range(0, number, CHUNK):
        z, col, inside = listed(X, GROUPS, first, number, N, SPAN, BLOCK, GROUP, PIECES_P, CHUNK)
        u = tl.reshape(z, [1, ALL]) - top[:, None]
        if STEEP:
            p = between_ends(u, low, high, share, eps, UPCAST)
        elif POWER == 0:
            p, _ = general_weights(u, lam, eps, PLAIN, UPCAST)
        else:
            base = tl.maximum((b[:, None] + u * (1.0 / POWER)) - step[:, None], 0.0)
            p = base if POWER == 1 else base * base
        p = tl.reshape(narrow(p, P.dtype.element_ty, UPCAST), [CHUNK, PIECES_P * GROUP])
        tl.store(P + col, p, mask=inside)


@triton.jit
def finish(
    X, P, GROUPS, PLACES, tops, eps, N, SPAN, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PIECES_P: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr, POWER: tl.constexpr, STEEP: tl.constexpr,
    PLAIN: tl.constexpr, MOST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Weights of a row, where they are not 0, from the maxima ``tops`` (WIDTH,) of its groups."""
    WIDTH: tl.constexpr = tops.shape[0]
    peak = tl.max(tops, 0) if UPCAST else tl.reduce(tops, 0, higher)
    if (peak < float("inf")) == 0:
        each = tl.arange(0, WIDTH)
        for first in range(0, N, WIDTH):
            value = tl.full([WIDTH], float("nan"), P.dtype.element_ty)
            tl.store(P + first + each, value, mask=first + each < N)
    else:
        highest = tl.where(peak > float("-inf"), peak, 0.0)
        top = tl.zeros([1], tl.float32) + highest
        if POWER == 0:
            start = solve_some_general(tops[None, :], top, eps, WIDTH, PLAIN, MOST, UPCAST)
            # u exp(-eps lam) eps > -1, a little below: all for softmax.
            soft = eps <= 0.0
            bound = tl.exp(eps * start) * (-1.0 - _SLACK) / tl.where(soft, 1.0, eps)
            bound = tl.max(tl.where(soft, float("-inf"), bound), 0)
        else:
            start = solve_some_closed(tops[None, :], top, POWER, MOST)
            bound = tl.max(start * (-1.0 - _SLACK) * POWER, 0)
        kept = tops - highest > bound
        one = kept.to(tl.int32)
        tl.store(GROUPS + tl.cumsum(one, 0) - one, tl.arange(0, WIDTH).to(GROUPS.dtype.element_ty), mask=kept)
        number = tl.sum(one, 0)
        # What one thread wrote, another reads.
        tl.debug_barrier()
        first, total = 0, 0
        while (first < number) & (total <= CAPACITY):
            z, col, _ = listed(X, GROUPS, first, number, N, SPAN, BLOCK, GROUP, PIECES_P, CHUNK)
            z, col = tl.ravel(z), tl.ravel(col)
            alive = (z - highest > bound).to(tl.int32)
            place = total + tl.cumsum(alive, 0) - alive
            held = (alive > 0) & (place < CAPACITY)
            tl.store(PLACES + place, col, mask=held)
            total += tl.sum(alive, 0)
            first += CHUNK
        tl.debug_barrier()
        if total <= CAPACITY:
            slot = tl.arange(0, CAPACITY)
            col = tl.load(PLACES + slot, mask=slot < total, other=0)
            z = tl.load(X + col, mask=slot < total, other=float("-inf")).to(tl.float32)
            p = tl.ravel(weights_below((z - highest)[None, :], start, eps, N, POWER, STEEP, PLAIN, MOST, UPCAST))
            tl.store(P + col, narrow(p, P.dtype.element_ty, UPCAST), mask=slot < total)
        else:
            # More scores at a time, where registers hold them, are fewer loads to wait for.
            MORE: tl.constexpr = 2 * CHUNK if POWER else CHUNK
            flat_row(
                X, P, GROUPS, number, top, start, eps, N, SPAN, BLOCK, GROUP, PIECES_P, MORE, POWER, STEEP, PLAIN,
                MOST, UPCAST,
            )  # fmt: skip


@triton.jit
def stream_forward(
    X, P, ALPHA, GROUPS, PLACES, N, SPAN, stride, alpha_stride,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PIECES_P: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
    POWER: tl.constexpr, STEEP: tl.constexpr, PLAIN: tl.constexpr, MOST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A row a program."""
    row = tl.program_id(0).to(tl.int64)
    eps = tl.zeros([1], tl.float32)
    if POWER == 0:
        eps = tl.load(ALPHA + row * alpha_stride + tl.zeros([1], tl.int32)) - 1.0
    X, P = X + row * stride, P + row * N
    tops = group_maxima(X, P, 0, N, BLOCK, GROUP, UPCAST)
    finish(
        X, P, GROUPS + row * (BLOCK // GROUP), PLACES + row * CAPACITY, tops, eps, N, SPAN,
        BLOCK, GROUP, PIECES_P, CHUNK, CAPACITY, POWER, STEEP, PLAIN, MOST, UPCAST,
    )  # fmt: skip


@triton.jit
def parts_forward(
    X, P, TOPS, N, SPAN, PARTS, stride, BLOCK: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """Maxima of the groups of a part of ``SPAN`` scores a program."""
    program = tl.program_id(0)
    row, start = (program // PARTS).to(tl.int64), program % PARTS * SPAN
    tops = group_maxima(
        X + row * stride, P + row * N, start, tl.minimum(start + SPAN, N), BLOCK, GROUP, UPCAST
    )  # fmt: skip
    WIDTH: tl.constexpr = BLOCK // GROUP
    tl.store(TOPS + program.to(tl.int64) * WIDTH + tl.arange(0, WIDTH), tops)


@triton.jit
def join_forward(
    X, P, ALPHA, TOPS, GROUPS, PLACES, N, SPAN, PARTS, stride, alpha_stride,
    PARTS_P: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PIECES_P: tl.constexpr, CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr, POWER: tl.constexpr, STEEP: tl.constexpr, PLAIN: tl.constexpr, MOST: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The row of ``PARTS`` parts a program."""
    row = tl.program_id(0).to(tl.int64)
    eps = tl.zeros([1], tl.float32)
    if POWER == 0:
        eps = tl.load(ALPHA + row * alpha_stride + tl.zeros([1], tl.int32)) - 1.0
    each, width = tl.arange(0, PARTS_P * (BLOCK // GROUP)), PARTS * (BLOCK // GROUP)
    tops = tl.load(TOPS + row * width + each, mask=each < width, other=float("-inf"))
    finish(
        X + row * stride, P + row * N, GROUPS + row * width, PLACES + row * CAPACITY, tops,
        eps, N, SPAN, BLOCK, GROUP, PIECES_P, CHUNK, CAPACITY, POWER, STEEP, PLAIN, MOST, UPCAST,
    )  # fmt: skip
