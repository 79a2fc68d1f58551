"""Rows longer than a program's registers, in parts. Imports triton: load this module lazily.

The threshold of a part of a row is never above the row's own: with more scores the sum only grows. So each part is
read once, solved for itself, and only what lies above its own threshold is kept, in order; its weights become 0. A
second kernel solves the row on the kept scores of all parts and scatters their weights. A row of which some part keeps
more than ``CAPACITY`` scores (a flat one) is read again, pass by pass, by a third kernel. Nothing is added atomically:
two runs agree bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import narrow
from .triton_rows import (
    alpha_terms,
    between_ends,
    closed_step,
    closed_sums,
    general_step,
    general_weights,
    group_tops,
    row_weights,
    share_between,
    slopes,
    solve_some_closed,
    solve_some_general,
)

# A bound that rounding moved up could lose a score of weight 1e-6^(1/eps); this much lower it cannot.
_SLACK = tl.constexpr(1e-5)


@triton.jit
def parts_forward(
    X, P, ALPHA, SCORES, PLACES, COUNTS, TOPS, N, PARTS, stride, alpha_stride,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr, POWER: tl.constexpr, PLAIN: tl.constexpr,
    MOST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, part = (program // PARTS).to(tl.int64), program % PARTS
    col = part * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(X + row * stride + col, mask=col < N, other=float("-inf")).to(tl.float32)[None, :]
    tl.store(P + row * N + col, tl.zeros([BLOCK], P.dtype.element_ty), mask=col < N)
    z, tops, top, bad = group_tops(z, GROUP, UPCAST)
    u = z - top[:, None]
    if POWER == 0:
        eps = tl.load(ALPHA + row * alpha_stride + tl.zeros([1], tl.int32)) - 1.0
        lam = solve_some_general(tops, top, eps, BLOCK, PLAIN, MOST, UPCAST)
        # u exp(-eps lam) eps > -1, a little below: all for softmax.
        bound = tl.where(eps > 0.0, -(1.0 + _SLACK) * tl.exp(eps * lam) / tl.where(eps > 0.0, eps, 1.0), float("-inf"))
    else:
        b, _ = solve_some_closed(tops, top, POWER, MOST)
        bound = -(1.0 + _SLACK) * POWER * b
    kept = tl.ravel((u > bound[:, None]) & (z > float("-inf"))).to(tl.int32)
    place = tl.cumsum(kept, 0) - kept
    held = (kept > 0) & (place < CAPACITY)
    at = program.to(tl.int64) * CAPACITY + place
    tl.store(SCORES + at, tl.ravel(z), mask=held)
    tl.store(PLACES + at, col, mask=held)
    one = tl.zeros([1], tl.int32)
    tl.store(COUNTS + program + one, tl.where(bad, BLOCK + 1, one + tl.sum(kept, 0)))
    # A part without a score must not pass for one whose largest is 0.
    tl.store(TOPS + program + one, tl.where(bad, float("nan"), tl.max(tops, 1)))


@triton.jit
def join_forward(
    P, ALPHA, SCORES, PLACES, COUNTS, N, PARTS, alpha_stride, PARTS_P: tl.constexpr,
    CAPACITY: tl.constexpr, POWER: tl.constexpr, STEEP: tl.constexpr, PLAIN: tl.constexpr, MOST: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, PARTS_P)
    if tl.max(tl.load(COUNTS + row * PARTS + each, mask=each < PARTS, other=0), 0) > CAPACITY:
        return
    slot = tl.arange(0, PARTS_P * CAPACITY)
    part, place = slot // CAPACITY, slot % CAPACITY
    count = tl.load(COUNTS + row * PARTS + part, mask=part < PARTS, other=0)
    held = place < count
    at = row * PARTS * CAPACITY + slot
    z = tl.load(SCORES + at, mask=held, other=float("-inf"))[None, :]
    eps = tl.zeros([1], tl.float32)
    if POWER == 0:
        eps = tl.load(ALPHA + row * alpha_stride + tl.zeros([1], tl.int32)) - 1.0
    p = tl.ravel(row_weights(z, eps, 4, POWER, STEEP, PLAIN, MOST, UPCAST))
    col = tl.load(PLACES + at, mask=held, other=0)
    tl.store(P + row * N + col, narrow(p, P.dtype.element_ty, UPCAST), mask=held)


@triton.jit
def passes_forward(
    X, P, ALPHA, COUNTS, TOPS, N, PARTS, stride, alpha_stride, PARTS_P: tl.constexpr, BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr, POWER: tl.constexpr, STEEP: tl.constexpr, PLAIN: tl.constexpr, MOST: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, PARTS_P)
    if tl.max(tl.load(COUNTS + row * PARTS + each, mask=each < PARTS, other=0), 0) <= CAPACITY:
        return
    tops = tl.load(TOPS + row * PARTS + each, mask=each < PARTS, other=float("-inf"))
    bad = tl.max((tops != tops).to(tl.int32), 0)
    top = tl.max(tl.where(tops == tops, tops, float("-inf")), 0) + tl.zeros([1], tl.float32)
    top = tl.where(top == float("-inf"), 0.0, top)
    eps = tl.zeros([1], tl.float32)
    if POWER == 0:
        eps = tl.load(ALPHA + row * alpha_stride + tl.zeros([1], tl.int32)) - 1.0
    col = tl.arange(0, BLOCK)
    at = X + row * stride
    b, step = tl.zeros_like(top) + 1.0, tl.zeros_like(top)
    lam, high = tl.zeros_like(top), tl.zeros_like(top)
    low = tl.zeros_like(top) - tl.log(N.to(tl.float32))
    going, count = 1 - bad, 0
    while (going > 0) & (count < MOST):
        total, slope = tl.zeros_like(top), tl.zeros_like(top)
        b -= step
        for start in range(0, N, BLOCK):
            z = tl.load(at + start + col, mask=start + col < N, other=float("-inf")).to(tl.float32)[None, :]
            z = tl.where(bad > 0, 0.0, z)
            if POWER == 0:
                p, steep = general_weights(z - top[:, None], lam, eps, PLAIN, UPCAST)
                total += tl.sum(p, 1)
                slope += tl.sum(steep, 1)
            else:
                more, first = closed_sums(tl.maximum(b[:, None] + (z - top[:, None]) * (1.0 / POWER), 0.0), POWER)
                total += more
                slope += first
        if POWER == 0:
            lam, low, high, done = general_step(total, slope, lam, low, high, eps)
            going = tl.max((done == 0).to(tl.int32), 0)
        else:
            step = closed_step(total, slope, POWER)
            going = tl.max((step > 4.8e-7 * b).to(tl.int32), 0)
        count += 1
    share = tl.zeros_like(top)
    if STEEP:
        low, high = tl.where(eps > 1.0, low, lam), tl.where(eps > 1.0, high, lam)
        below, above = tl.zeros_like(top), tl.zeros_like(top)
        for start in range(0, N, BLOCK):
            z = tl.load(at + start + col, mask=start + col < N, other=float("-inf")).to(tl.float32)[None, :]
            z = tl.where(bad > 0, 0.0, z)
            less, _ = general_weights(z - top[:, None], low, eps, False, UPCAST)
            more, _ = general_weights(z - top[:, None], high, eps, False, UPCAST)
            below += tl.sum(less, 1)
            above += tl.sum(more, 1)
        share = share_between(below, above)
    for start in range(0, N, BLOCK):
        z = tl.load(at + start + col, mask=start + col < N, other=float("-inf")).to(tl.float32)[None, :]
        z = tl.where(bad > 0, 0.0, z)
        if STEEP:
            p = between_ends(z - top[:, None], low, high, share, eps, UPCAST)
        elif POWER == 0:
            p, _ = general_weights(z - top[:, None], lam, eps, PLAIN, UPCAST)
        else:
            base = tl.maximum((b[:, None] + (z - top[:, None]) * (1.0 / POWER)) - step[:, None], 0.0)
            p = base if POWER == 1 else base * base
        p = tl.where(bad > 0, float("nan"), p)
        tl.store(P + row * N + start + col, tl.ravel(narrow(p, P.dtype.element_ty, UPCAST)), mask=start + col < N)


@triton.jit
def parts_backward(
    P, GRAD, ALPHA, SUMS, N, PARTS, stride, alpha_stride, BLOCK: tl.constexpr, POWER: tl.constexpr,
    WANTS_ALPHA: tl.constexpr,
):  # fmt: skip
    """Sums over a part of s, s g, and for alpha of its terms and those times g: (4, rows * parts)."""
    program = tl.program_id(0)
    row, part = (program // PARTS).to(tl.int64), program % PARTS
    col = part * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(P + row * N + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    # Most weights are 0, and gradients in front of them need not be read.
    grad = tl.load(GRAD + row * stride + col, mask=tl.ravel(p) > 0.0, other=0.0).to(tl.float32)[None, :]
    eps = tl.zeros([1], tl.float32)
    if POWER == 0:
        eps = tl.load(ALPHA + row * alpha_stride + tl.zeros([1], tl.int32)) - 1.0
    s = slopes(p, eps, POWER)
    out = SUMS + program + tl.zeros([1], tl.int32)
    total = tl.num_programs(0)
    tl.store(out, tl.sum(s, 1))
    tl.store(out + total, tl.sum(s * grad, 1))
    if WANTS_ALPHA:
        terms = alpha_terms(p, eps)
        tl.store(out + 2 * total, tl.sum(terms, 1))
        tl.store(out + 3 * total, tl.sum(terms * grad, 1))


@triton.jit
def join_backward(
    P, GRAD, DX, ALPHA, SUMS, DALPHA, N, PARTS, stride, alpha_stride, BLOCK: tl.constexpr, PARTS_P: tl.constexpr,
    POWER: tl.constexpr, WANTS_ALPHA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, part = (program // PARTS).to(tl.int64), program % PARTS
    total = tl.num_programs(0)
    each = tl.arange(0, PARTS_P)
    at = SUMS + row * PARTS + each
    weight = tl.sum(tl.load(at, mask=each < PARTS, other=0.0), 0)
    mean = tl.sum(tl.load(at + total, mask=each < PARTS, other=0.0), 0) / tl.where(weight > 0.0, weight, 1.0)
    col = part * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(P + row * N + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    grad = tl.load(GRAD + row * stride + col, mask=tl.ravel(p) > 0.0, other=0.0).to(tl.float32)[None, :]
    eps = tl.zeros([1], tl.float32)
    if POWER == 0:
        eps = tl.load(ALPHA + row * alpha_stride + tl.zeros([1], tl.int32)) - 1.0
    dx = slopes(p, eps, POWER) * (grad - mean)
    tl.store(DX + row * N + col, tl.ravel(narrow(dx, DX.dtype.element_ty, UPCAST)), mask=col < N)
    if WANTS_ALPHA:
        terms = tl.sum(tl.load(at + 2 * total, mask=each < PARTS, other=0.0), 0)
        found = tl.sum(tl.load(at + 3 * total, mask=each < PARTS, other=0.0), 0) - mean * terms
        if part == 0:
            tl.store(DALPHA + row, found)
