"""Gradients of rows longer than a program's registers, in parts. Imports triton: load this module lazily.

Nothing is added atomically: two runs agree bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import narrow
from .triton_rows import alpha_terms, slopes


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
