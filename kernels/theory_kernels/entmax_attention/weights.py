"""Jitted weights of alpha-entmax and the step of its solver. Imports triton: load this module lazily.

``a`` is (alpha - 1)(z - anchor), and the state of a row is what the solver looks for:
s of :mod:`.rows` for the alphas with closed steps (MODE 1: 1.5, MODE 2: 2), L = log P for any other (MODE 0), where s
would be too close to 1 to hold it.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from ..primitives import INTERPRETED, dot, higher, narrow

# The chip's own logarithm, within 2^-22; the interpreter has none.
_FAST = tl.constexpr(not INTERPRETED)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _log2_1p(x):
    """log2(1 + x), -10^9 for x <= -1.

    Near 0 a polynomial, within 1.3e-7 of it relatively (float32 Horner, fitted on [-0.2, 0.2]); elsewhere the logarithm
    is at least 0.26, so that an absolute 2^-22 is small beside it.
    """
    p = 0.48090091347694397 + x * (
        -0.3604068458080292 + x * (0.2882106304168701 + x * (-0.2536123991012573 + x * 0.21932469308376312))
    )
    near = x * (1.4426950216293335 + x * (-0.7213488817214966 + x * p))
    y = tl.maximum(1.0 + x, 0.0)
    far = libdevice.fast_log2f(y) if _FAST else tl.log2(tl.where(y > 0.0, y, 2.0**-126))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(y > 0.0, far, -1e9))


@triton.jit
def log_weights(a, state, eps):
    """log2 p and whether p > 0 (MODE 0), which NaN is taken for."""
    ratio = a * tl.exp(-eps * state)
    return state / _LN2 + _log2_1p(ratio) * (1.0 / eps), (ratio <= -1.0) == 0


@triton.jit
def weights(a, state, eps, seen, MODE: tl.constexpr, MASKED: tl.constexpr):
    """Weights p and slopes s = p^(2 - alpha), 0 where not ``seen`` (MASKED); ``state`` broadcasts to a.

    Both are NaN where a or ``state`` is, but for the slope of MODE 2.
    """
    if MODE == 0:
        log_p, alive = log_weights(a, state, eps)
        if MASKED:
            alive = alive & seen
        return tl.where(alive, tl.exp2(log_p), 0.0), tl.where(alive, tl.exp2((1.0 - eps) * log_p), 0.0)
    y = higher(a + state, 0.0)
    if MASKED:
        y = tl.where(seen, y, 0.0)
    if MODE == 1:
        return y * y, y
    else:
        return y, (y > 0.0).to(tl.float32)


@triton.jit
def largest_root(state, eps, MODE: tl.constexpr):
    """s = P^(alpha - 1) of a row's state: how far below the anchor (alpha - 1) z may lie."""
    if MODE == 0:
        return tl.exp(eps * state)
    else:
        return state


@triton.jit
def solver_step(state, low, high, total, slope, count, eps, close, MODE: tl.constexpr):
    """One safeguarded step to sum p = 1.

    ``total`` sum p, ``slope`` sum s, ``count`` size of the support (MODE 1), at ``state``. Returns the new state and
    bracket, and whether the step was larger than ``close``, relative to the state (MODE 0: to 1). The error after it is
    of the order of its square, and mostly of its cube in MODE 1.
    """
    high = tl.where(total >= 1.0, tl.minimum(high, state), high)
    low = tl.where(total < 1.0, tl.maximum(low, state), low)
    if MODE == 0:
        bottom = tl.exp(eps * state) * slope
        step = -tl.log(tl.where(total > 0.0, total, 1.0)) * total / tl.where(bottom > 0.0, bottom, 1.0)
        large = tl.abs(step) > close
    elif MODE == 1:
        # The support being right, sum (y + d)^2 = 1 is a quadratic equation; without a root, Newton's step.
        gap = 1.0 - total
        inside = slope * slope + count * gap
        bottom = slope + tl.where(inside > 0.0, tl.sqrt(tl.where(inside > 0.0, inside, 0.0)), slope)
        step = tl.where(bottom > 0.0, gap / tl.where(bottom > 0.0, bottom, 1.0), 2.0)
        large = tl.abs(step) > close * tl.abs(state)
    else:
        step = tl.where(slope > 0.0, (1.0 - total) / tl.where(slope > 0.0, slope, 1.0), 2.0)
        large = tl.abs(step) > close * tl.abs(state)
    new = state + step
    inside = (new > low) & (new < high)
    new = tl.where(large & (inside == 0), 0.5 * (low + high), new)
    return new, low, high, large


@triton.jit
def narrow_dot(a, b, acc, PREC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a @ b with the float32 tile ``a`` rounded to b's dtype (or b widened, for float16)."""
    if WIDE:
        return dot(a, b.to(tl.float32), acc, PREC, UPCAST)
    return dot(narrow(a, b.dtype, UPCAST), b, acc, PREC, UPCAST)


@triton.jit
def eighths(x):
    """(rows, 8) sums over every eighth column: those of one thread in a product's layout, so none needs another's."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), 1)
