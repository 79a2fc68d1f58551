"""Rows that fit the registers of one program: read once, solved there, written once. Imports triton.

With eps = alpha - 1, d_j = eps (x_j - max) and b the distance from the threshold to the maximum,
``p_j = (b + d_j)_+^(1/eps)``. The norm ``(sum p)^eps`` is convex in b, so that Newton's steps on it from b = 1
(the threshold is never more than 1 below the maximum) come down to the solution and never pass it, for alpha <= 2:
a step is ``(F - F^(1-eps)) / G`` with F = sum p and G = sum p^(1-eps).

Closed forms for alpha = 2 and 1.5 (POWER = 1/eps = 1, 2) hold b as it is. Any other alpha (POWER = 0) holds lam,
the logarithm of the largest weight b^(1/eps), see ``reference.py``; above 2, where the slope at the threshold is
infinite, it halves its bracket [-log n, 0].
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import INTERPRETED, fast_log2, narrow

# How closely a bound on the threshold is solved, relative to it: what it lets in is a few scores.
_COARSE = tl.constexpr(2.0**-10)
# The same for the step of alpha = 1.5 after which it ends: what is left then is of the order of its square.
_LAST = tl.constexpr(2.0**-5)
# What may be left of b, relative to it, when the last step has been taken.
_LEFT = tl.constexpr(3e-8)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def log1p(x):
    """log(1 + x) for x > -1, accurate near 0 (W. Kahan): the rounding of 1 + x is divided out again."""
    y = 1.0 + x
    # At y = 1 the quotient is 0 / 0 and x itself is the answer.
    flat = y == 1.0
    return tl.where(flat, x, tl.log(y) * (x / tl.where(flat, 1.0, y - 1.0)))


@triton.jit
def general_weights(u, lam, eps, PLAIN: tl.constexpr, UPCAST: tl.constexpr):
    """p and p / (1 + eps u exp(-eps lam)) of u = x - max (R, n), lam and eps (R,).

    PLAIN, for eps of at least 0.1, takes the logarithm of 1 + x as it is: its rounding over eps stays below 2^-19.
    """
    # Kept finite, so that 0 times it is 0: only scores within 1e-26 of the maximum could tell.
    rate = (eps * tl.exp(tl.minimum(-eps * lam, 60.0)))[:, None]
    ratio = tl.where(u > float("-inf"), u, 0.0) * rate
    alive = (ratio > -1.0) & (u > float("-inf"))
    ratio = tl.where(alive, ratio, 0.0)
    if PLAIN:
        inner = 1.0 + ratio
        p = tl.exp2(lam[:, None] * 1.4426950408889634 + fast_log2(inner, UPCAST) * (1.0 / eps)[:, None])
    else:
        inner = 1.0 + ratio
        soft = eps <= 0.0
        logs = log1p(ratio) * (1.0 / tl.where(soft, 1.0, eps))[:, None]
        logs = tl.where(soft[:, None], tl.where(alive, u, 0.0), logs)
        p = tl.exp(lam[:, None] + logs)
    p = tl.where(alive, p, 0.0)
    return p, p / inner


@triton.jit
def closed_step(total, first, POWER: tl.constexpr):
    """Newton's step down from F = ``total`` and G = ``first``; 0 for a row without support."""
    if POWER == 1:
        step = (total - 1.0) / tl.where(first > 0.0, first, 1.0)
    else:
        # total - sqrt(total), without what cancels there: an approximate root is enough.
        root = tl.sqrt(total)
        step = root * (total - 1.0) / (tl.where(first > 0.0, first, 1.0) * (root + 1.0))
    return tl.where(first > 0.0, step, 0.0)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def both_sums(a, b):
    """Sums of the rows of a and of b, with one exchange between warps for both."""
    if _INTERPRETED:
        # The interpreter runs a custom reduction element by element.
        return tl.sum(a, 1), tl.sum(b, 1)
    return tl.reduce((a, b), 1, _add_pairs)


@triton.jit
def closed_sums(base, POWER: tl.constexpr):
    """F and G of the rows of base = (b + d)_+."""
    if POWER == 1:
        return both_sums(base, (base > 0.0).to(tl.float32))
    else:
        return both_sums(base * base, base)


@triton.jit
def step_is_large(step, first, b, size, POWER: tl.constexpr):
    """Whether more than rounding is left of b after the step of rows with at most ``size`` scores.

    The norm's second derivative is at most size (alpha = 1.5), so that Newton leaves size step^2 / (2 G).
    """
    if POWER == 1:
        return step > 4.8e-7 * b
    else:
        return step * step * (0.5 * size) > _LEFT * b * first


@triton.jit
def solve_closed(d, b, size, POWER: tl.constexpr, MOST: tl.constexpr, COARSE: tl.constexpr):
    """b (R,) from which ``step`` (R,) is left; neither passes the solution, but for rounding."""
    step = tl.zeros_like(b)
    going, count = 1, 0
    while (going > 0) & (count < MOST):
        b -= step
        total, first = closed_sums(tl.maximum(b[:, None] + d, 0.0), POWER)
        step = closed_step(total, first, POWER)
        large = step > (_COARSE if POWER == 1 else _LAST) * b
        if not COARSE:
            large = step_is_large(step, first, b, size, POWER)
        going = tl.max(large.to(tl.int32), 0)
        count += 1
    return b, step


@triton.jit
def general_step(total, slope, lam, low, high, eps, SMALL: tl.constexpr):
    """The next lam and its bracket, from F = ``total`` and sum p / (1 + ratio) = ``slope`` at lam."""
    high = tl.where(total >= 1.0, lam, high)
    low = tl.where(total <= 1.0, lam, low)
    some = total > 0.0
    log_total = tl.log(tl.where(some, total, 1.0))
    soft = eps <= 0.0
    x = -eps * log_total
    # -expm1(x), without cancellation near 0.
    part = tl.where(tl.abs(x) < 0.1, -x * (1.0 + x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x / 120)))), 1.0 - tl.exp(x))
    moved = tl.maximum(-total * part / tl.where(some, slope, 1.0), -0.9999999)
    step = lam + tl.where(soft, -log_total, log1p(moved) / tl.where(soft, 1.0, eps))
    inside = (step > low) & (step < high) & (eps <= 1.0)
    following = tl.where(inside, step, low + (high - low) * 0.5)
    done = (
        ((tl.abs(total - 1.0) <= 2.0 * SMALL) & (eps <= 1.0))
        | (tl.abs(following - lam) <= SMALL * tl.abs(lam))
        | (total <= 0.0)
    )
    return tl.where(done, lam, following), low, high, done


@triton.jit
def solve_general(
    u, lam, low, eps, PLAIN: tl.constexpr, MOST: tl.constexpr, UPCAST: tl.constexpr, SMALL: tl.constexpr
):  # fmt: skip
    """lam (R,), and the ends of its bracket: F <= 1 at the low one, F >= 1 at the high one."""
    high = lam
    going, count = 1, 0
    while (going > 0) & (count < MOST):
        p, steep = general_weights(u, lam, eps, PLAIN, UPCAST)
        total, slope = both_sums(p, steep)
        lam, low, high, done = general_step(total, slope, lam, low, high, eps, SMALL)
        going = tl.max((done == 0).to(tl.int32), 0)
        count += 1
    return lam, low, high


@triton.jit
def share_between(below, above):
    """How far from weights of sum ``below`` towards those of sum ``above`` the sum is one."""
    part = (1.0 - below) / tl.where(above > below, above - below, 1.0)
    return tl.where(above > below, tl.minimum(tl.maximum(part, 0.0), 1.0), 0.0)


@triton.jit
def between_ends(u, low, high, share, eps, UPCAST: tl.constexpr):
    """Weights between those at the ends of a bracket."""
    less, _ = general_weights(u, low, eps, False, UPCAST)
    more, _ = general_weights(u, high, eps, False, UPCAST)
    return less + share[:, None] * (more - less)


@triton.jit
def bracketed_weights(u, lam, low, high, eps, STEEP: tl.constexpr, PLAIN: tl.constexpr, UPCAST: tl.constexpr):
    """Weights at lam; for alpha > 2 (STEEP) between those of the bracket's ends, so that they sum to one.

    There a weight at the threshold moves by (2^-23)^(1/eps) within lam's last digit, 0.17 at alpha = 10.
    """
    if STEEP:
        # At alpha <= 2 both ends are lam.
        low, high = tl.where(eps > 1.0, low, lam), tl.where(eps > 1.0, high, lam)
        less, _ = general_weights(u, low, eps, False, UPCAST)
        more, _ = general_weights(u, high, eps, False, UPCAST)
        return less + share_between(tl.sum(less, 1), tl.sum(more, 1))[:, None] * (more - less)
    return general_weights(u, lam, eps, PLAIN, UPCAST)[0]


@triton.jit
def higher(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_tops(z, GROUP: tl.constexpr, UPCAST: tl.constexpr):
    """Scores without NaN and +inf, the maxima of groups of neighbors (R, groups), and rows that had such scores.

    Neighbors lie in one thread, so that the maxima of groups cost no exchange.
    """
    R: tl.constexpr = z.shape[0]
    GROUPS: tl.constexpr = z.shape[1] // GROUP
    if UPCAST:
        # The interpreter runs a custom reduction element by element, and warns of arithmetic with NaN.
        bad = tl.max(((z < float("inf")) == 0).to(tl.int32), 1) > 0
        z = tl.where(bad[:, None], 0.0, z)
        tops = tl.max(tl.reshape(z, [R, GROUPS, GROUP]), 2)
        top = tl.max(tops, 1)
    else:
        tops = tl.reduce(tl.reshape(z, [R, GROUPS, GROUP]), 2, higher)
        top = tl.reduce(tops, 1, higher)
        bad = (top < float("inf")) == 0
    return z, tops, tl.where(top > float("-inf"), top, 0.0), bad


@triton.jit
def solve_some_closed(tops, top, POWER: tl.constexpr, MOST: tl.constexpr):
    """b of a few scores of each row (R, groups), to about 2^-10: never below that of the whole row."""
    b, step = solve_closed((tops - top[:, None]) * (1.0 / POWER), tl.zeros_like(top) + 1.0, 0, POWER, MOST, True)
    return b - step


@triton.jit
def solve_some_general(
    tops, top, eps, COUNT: tl.constexpr, PLAIN: tl.constexpr, MOST: tl.constexpr, UPCAST: tl.constexpr
):
    """lam of a few scores of each row (R, groups), to 2^-10 and not passed: never below that of the whole row."""
    low = tl.zeros_like(top) - tl.log(tl.zeros_like(top) + COUNT)
    _, _, lam = solve_general(tops - top[:, None], tl.zeros_like(top), low, eps, PLAIN, MOST, UPCAST, _COARSE)
    return lam


@triton.jit
def weights_below(
    u, start, eps, COUNT, POWER: tl.constexpr, STEEP: tl.constexpr, PLAIN: tl.constexpr, MOST: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Weights of u = x - max (R, n), of rows of ``COUNT`` scores, from a b or lam (R,) that is not below theirs."""
    if POWER == 0:
        low = tl.zeros_like(start) - tl.log(tl.zeros_like(start) + COUNT)
        lam, low, high = solve_general(u, start, low, eps, PLAIN, MOST, UPCAST, 1.2e-7)
        return bracketed_weights(u, lam, low, high, eps, STEEP, PLAIN, UPCAST)
    else:
        d = u * (1.0 / POWER)
        b, step = solve_closed(d, start, d.shape[1], POWER, MOST, False)
        # Where digits cancel, b + d is exact, so the step that is left comes after it.
        base = tl.maximum((b[:, None] + d) - step[:, None], 0.0)
        return base if POWER == 1 else base * base


@triton.jit
def row_weights(
    z, eps, GROUP: tl.constexpr, POWER: tl.constexpr, STEEP: tl.constexpr, PLAIN: tl.constexpr, MOST: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Weights of the rows of z (R, n), where -inf is masked.

    The threshold of some of the scores is never above the row's, and that of the maxima of small groups is nearly the
    row's already: it is found at a fraction of the cost, and a step or two over the whole row remain.
    """
    z, tops, top, bad = group_tops(z, GROUP, UPCAST)
    COUNT: tl.constexpr = z.shape[1]
    if POWER == 0:
        start = solve_some_general(tops, top, eps, COUNT, PLAIN, MOST, UPCAST)
    else:
        start = solve_some_closed(tops, top, POWER, MOST)
    p = weights_below(z - top[:, None], start, eps, COUNT, POWER, STEEP, PLAIN, MOST, UPCAST)
    return tl.where(bad[:, None], float("nan"), p)


@triton.jit
def rows_forward(
    X, P, ALPHA, ROWS, N, stride, alpha_stride,
    BLOCK: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, POWER: tl.constexpr, STEEP: tl.constexpr,
    PLAIN: tl.constexpr, MOST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.arange(0, BLOCK)
    inside = (row < ROWS)[:, None] & (col < N)[None, :]
    z = tl.load(X + row[:, None] * stride + col[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    eps = tl.zeros([R], tl.float32)
    if POWER == 0:
        eps = tl.load(ALPHA + row * alpha_stride, mask=row < ROWS, other=2.0) - 1.0
    p = row_weights(z, eps, GROUP, POWER, STEEP, PLAIN, MOST, UPCAST)
    tl.store(P + row[:, None] * N + col[None, :], narrow(p, P.dtype.element_ty, UPCAST), mask=inside)


@triton.jit
def slopes(p, eps, POWER: tl.constexpr):
    """s = p^(2 - alpha) on the support, 0 outside."""
    if POWER == 1:
        return tl.where(p > 0.0, 1.0, 0.0)
    elif POWER == 2:
        return tl.sqrt_rn(p)
    else:
        return tl.where(p > 0.0, tl.exp((1.0 - eps)[:, None] * tl.log(tl.where(p > 0.0, p, 1.0))), 0.0)


@triton.jit
def psi(x):
    """(1 - exp(-x) - x) / x^2, by its series near 0."""
    small = tl.abs(x) < 0.5
    near = tl.where(small, -x, 0.0)
    series = tl.zeros_like(x)
    # 1/11! 0.5^9 is below float32's rounding of the first term.
    term = tl.zeros_like(x) - 0.5
    for m in tl.static_range(3, 12):
        series += term
        term = term * near * (1.0 / m)
    far = tl.where(small, 1.0, x)
    return tl.where(small, series, (1.0 - tl.exp(-far) - far) / (far * far))


@triton.jit
def alpha_terms(p, eps):
    """The derivative of p to alpha at a fixed distance from the threshold."""
    logs = tl.log(tl.where(p > 0.0, p, 1.0))
    return p * logs * logs * psi(eps[:, None] * logs)


@triton.jit
def rows_backward(
    P, GRAD, DX, ALPHA, DALPHA, ROWS, N, stride, alpha_stride, BLOCK: tl.constexpr, R: tl.constexpr,
    POWER: tl.constexpr, WANTS_ALPHA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.arange(0, BLOCK)
    inside = (row < ROWS)[:, None] & (col < N)[None, :]
    p = tl.load(P + row[:, None] * N + col[None, :], mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    eps = tl.zeros([R], tl.float32)
    if POWER == 0:
        eps = tl.load(ALPHA + row * alpha_stride, mask=row < ROWS, other=2.0) - 1.0
    s = slopes(p, eps, POWER)
    total = tl.sum(s, 1)
    grad = grad - (tl.sum(s * grad, 1) / tl.where(total > 0.0, total, 1.0))[:, None]
    tl.store(DX + row[:, None] * N + col[None, :], narrow(s * grad, DX.dtype.element_ty, UPCAST), mask=inside)
    if WANTS_ALPHA:
        tl.store(DALPHA + row, tl.sum(grad * alpha_terms(p, eps), 1), mask=row < ROWS)
