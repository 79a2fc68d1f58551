"""alpha-entmax for any alpha >= 1, with gradients to the scores and to alpha.

p_j = [(alpha - 1) z_j - tau]_+^(1 / (alpha - 1)), tau such that the row sums to one; alpha = 1 is softmax.

References
----------
Martins and Astudillo, "From Softmax to Sparsemax", arXiv 1602.02068 (alpha = 2, by sorting).
Peters, Niculae and Martins, "Sparse Sequence-to-Sequence Models", arXiv 1905.05702 (alpha = 1.5 by sorting; the
Jacobian of any alpha, Proposition 2).
Correia, Niculae and Martins, "Adaptively Sparse Transformers", arXiv 1909.00015 (the gradient to alpha).
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from theory_lab.attention import doubledouble as dd
from theory_lab.attention.base import Mechanism, Scope, safe_softmax
from theory_lab.attention.checks import check_number, check_tensor, shape_of
from theory_lab.errors import InputError

_MAX_PASSES = 64
_MAX_STEPS = 200


def entmax(scores: Tensor, alpha: float | Tensor, visible: Tensor | None = None) -> Tensor:
    """alpha-entmax over the last dimension.

    Parameters
    ----------
    scores : Tensor
        (..., S), floating; -inf is masked. Lower precisions are solved in float64 and rounded once.
    alpha : float or Tensor
        At least 1. A tensor broadcastable to (..., 1) may differ by row and receives a gradient.
    visible : Tensor, optional
        Boolean, the shape of `scores`; False is masked.

    Returns
    -------
    Tensor
        Weights; a fully masked row is 0. For alpha of exactly 1.5 and 2 and float64 scores, every weight is
        within 2 ulp of the exact one. Others are accurate to a few ulp of the largest weight.

    Raises
    ------
    InputError
        alpha below 1, not finite or of a shape that does not fit; NaN or +inf scores; no keys.
    """
    check_tensor("scores", scores, 1)
    if scores.shape[-1] == 0:
        raise InputError("scores", shape_of(scores), "at least one key a row")
    if bool(torch.isnan(scores).any()) or bool((scores == math.inf).any()):
        raise InputError("scores", f"NaN or +inf in {shape_of(scores)}", "numbers, or -inf for masked")
    seen = scores != -math.inf
    if visible is not None:
        if visible.dtype != torch.bool or visible.shape != scores.shape:
            raise InputError("visible", f"{visible.dtype} of {shape_of(visible)}", f"bool of {shape_of(scores)}")
        seen = seen & visible
    a = torch.as_tensor(alpha, dtype=None if isinstance(alpha, Tensor) else torch.float64, device=scores.device)
    for number in a.detach().reshape(-1).tolist():
        check_number("alpha", number, 1.0)
    try:
        a.expand(*scores.shape[:-1], 1)
    except RuntimeError:
        raise InputError("alpha", shape_of(a), f"broadcastable to {(*scores.shape[:-1], 1)}") from None
    return _Entmax.apply(scores.masked_fill(~seen, 0.0), a, seen)


def entmax_threshold(scores: Tensor, alpha: float) -> Tensor:
    """tau of each row, (..., 1): keys with (alpha - 1) z <= tau have weight zero. NaN for a masked row.

    Not differentiable. For alpha = 1, where every key has weight, it is 0 * z - 1 = -1.
    """
    p = entmax(scores.detach(), alpha)
    top = scores.masked_fill(scores == -math.inf, -math.inf).amax(-1, keepdim=True)
    return torch.where(torch.isinf(top), math.nan, (alpha - 1.0) * top - p.amax(-1, keepdim=True).pow(alpha - 1.0))


class _Entmax(torch.autograd.Function):
    """Forward by the solvers below; backward from the weights alone."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: Tensor, visible: Tensor) -> Tensor:
        wide, a = scores.detach().double(), alpha.detach().double()
        single = float(a.reshape(-1)[0]) if a.numel() and bool((a == a.reshape(-1)[0]).all()) else None
        if single == 1.0:
            p = safe_softmax(wide, visible)
        elif single == 2.0:
            p = _by_sorting(wide, visible, 1, scores.dtype == torch.float64)
        elif single == 1.5:
            p = _by_sorting(wide, visible, 2, scores.dtype == torch.float64)
        else:
            p = _general(wide, a, visible)
        ctx.save_for_backward(p, alpha)
        ctx.score_dtype = scores.dtype
        return p.to(scores.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        p, alpha = ctx.saved_tensors
        eps = alpha.double() - 1.0
        g = grad.double()
        alive = p > 0
        safe = torch.where(alive, p, torch.ones_like(p))
        log_p = torch.log(safe)
        # The Jacobian is diag(s) - s s^T / sum(s) with s = p^(2 - alpha) on the support.
        s = torch.where(alive, torch.exp((1.0 - eps) * log_p), torch.zeros_like(p))
        total = s.sum(-1, keepdim=True)
        share = s / torch.where(total > 0, total, torch.ones_like(total))
        grad_scores = s * (g - (share * g).sum(-1, keepdim=True))
        grad_alpha = None
        if ctx.needs_input_grad[1]:
            # With log p = log1p(eps u) / eps, the derivative at fixed u is log(p)^2 psi(eps log p), where
            # psi(x) = (1 - e^-x - x) / x^2 is smooth at 0: no cancellation as alpha tends to 1.
            direct = torch.where(alive, p * log_p.square() * _psi(eps * log_p), torch.zeros_like(p))
            moved = direct - share * direct.sum(-1, keepdim=True)
            grad_alpha = (g * moved).sum(-1, keepdim=True).sum_to_size(_padded(alpha, g.ndim))
            grad_alpha = grad_alpha.reshape(alpha.shape).to(alpha.dtype)
        return grad_scores.to(ctx.score_dtype), grad_alpha, None


def _padded(alpha: Tensor, ndim: int) -> tuple[int, ...]:
    return (1,) * (ndim - alpha.ndim) + tuple(alpha.shape)


def _psi(x: Tensor) -> Tensor:
    small = x.abs() < 0.5
    far = torch.where(small, torch.ones_like(x), x)
    near = torch.where(small, x, torch.zeros_like(x))
    series, term = torch.zeros_like(x), torch.full_like(x, -0.5)
    for m in range(3, 22):
        series = series + term
        term = term * (-near) / m
    return torch.where(small, series, (-torch.expm1(-far) - far) / far.square())


# ---- alpha = 2 and 1.5: sorting, then exact arithmetic -------------------------------------------


def _by_sorting(z: Tensor, visible: Tensor, power: int, exact: bool) -> Tensor:
    """sum_j (x_j - tau)_+^power = 1 with x = z / power, power 1 (alpha = 2) or 2 (alpha = 1.5)."""
    top = z.masked_fill(~visible, -math.inf).amax(-1, keepdim=True)
    top = top.masked_fill(torch.isinf(top), 0.0)
    # Far below the threshold only the order matters, and there a difference could overflow.
    near = visible & (z / 2.0 - top / 2.0 > -2.0)
    x = (torch.where(near, z, top) - top).masked_fill(~near, -4.0) / power
    ordered = x.sort(-1, descending=True).values
    rank = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    mean = ordered.cumsum(-1) / rank
    if power == 1:
        taus = mean - 1.0 / rank
    else:
        variance = (ordered.square().cumsum(-1) / rank - mean.square()).clamp(min=0.0)
        taus = mean - (1.0 / rank - variance).clamp(min=0.0).sqrt()
    size = (taus < ordered).sum(-1, keepdim=True).clamp(min=1)
    tau = taus.gather(-1, size - 1)
    keep = near & (x > tau)
    if not exact:
        return torch.where(keep, x - tau, torch.zeros_like(x)).pow(power)
    return _polished(torch.where(near, z, top), near, keep, power)


def _polished(z: Tensor, near: Tensor, keep: Tensor, power: int) -> Tensor:
    """Weights from a support that float64 got right up to rounding: settle the support, then solve exactly.

    With the smallest supported key as origin, a_j = (z_j - z_k) / power >= 0 and w = x_k - tau > 0 solve
    sum (w + a_j)^power = 1, and R = 1 - sum a_j^power > 0 is the one place where digits cancel: it is summed
    without error. A key is in the support iff R at it is positive.
    """
    for _ in range(_MAX_PASSES):
        low = z.masked_fill(~keep, math.inf).amin(-1, keepdim=True)
        rest, gaps = _slack(z, keep, low, power)
        out = keep & (z == low) & ~_above(rest) & (keep.sum(-1, keepdim=True) > 1)
        after = z.masked_fill(~near | keep, -math.inf).amax(-1, keepdim=True)
        joining = near & ~keep & (z == after)
        more, _ = _slack(z, keep | joining, after, power)
        joining = joining & _above(more) & ~out.any(-1, keepdim=True)
        if not bool((out | joining).any()):
            break
        keep = (keep & ~out) | joining
    k = keep.sum(-1, keepdim=True).clamp(min=1).to(z)
    if power == 1:
        w = dd.divide(rest, k)
        high, low = dd.add(gaps, w)
        return torch.where(keep, high + low, torch.zeros_like(z))
    total = dd.tree_sum(gaps)
    root = dd.square_root(dd.add(dd.multiply(total, total), dd.multiply((k, torch.zeros_like(k)), rest)))
    w = dd.quotient(rest, dd.add(total, root))
    grown = dd.add(gaps, w)
    high, low = dd.multiply(grown, grown)
    return torch.where(keep, high + low, torch.zeros_like(z))


def _slack(z: Tensor, keep: Tensor, origin: Tensor, power: int) -> tuple[dd.Pair, dd.Pair]:
    """R = 1 - sum over `keep` of ((z - origin) / power)^power without cancellation error, and the gaps as pairs."""
    origin = origin.masked_fill(torch.isinf(origin), 0.0)
    high, low = dd.two_sum(torch.where(keep, z, origin), -origin)
    high, low = high / power, low / power
    one = torch.ones_like(origin)
    if power == 1:
        terms = [one, -high, -low]
    else:
        square, error = dd.two_product(high, high)
        cross, cross_error = dd.two_product(2.0 * high, low)
        terms = [one, -square, -error, -cross, -cross_error, -low * low]
    return dd.exact_sum(torch.cat(terms, -1)), (high, low)


def _above(a: dd.Pair) -> Tensor:
    return (a[0] > 0) | ((a[0] == 0) & (a[1] > 0))


# ---- any other alpha -----------------------------------------------------------------------------


def _general(z: Tensor, alpha: Tensor, visible: Tensor) -> Tensor:
    eps = (alpha - 1.0).expand(*z.shape[:-1], 1)
    top = z.masked_fill(~visible, -math.inf).amax(-1, keepdim=True)
    top = top.masked_fill(torch.isinf(top), 0.0)
    x = torch.where(visible, z - top, torch.full_like(z, -math.inf))
    steep = eps > 1.0
    if bool(steep.all()):
        p = _solve_steep(x, eps)
    elif not bool(steep.any()):
        p = _solve_flat(x, eps)
    else:
        p = torch.where(steep, _solve_steep(x, eps.clamp(min=1.0)), _solve_flat(x, eps.clamp(max=1.0)))
    p = p.masked_fill(~visible, 0.0)
    total = p.sum(-1, keepdim=True)
    return p / torch.where(total > 0, total, torch.ones_like(total))


def _deformed_exp(u: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """(1 + eps u)_+^(1/eps), which is exp(u) at eps = 0, and its derivative in u."""
    y = torch.where(eps > 0, eps * u, torch.zeros_like(u))
    alive = y > -1.0
    y = torch.where(alive, y, torch.zeros_like(y))
    exponent = torch.where(eps > 0, torch.log1p(y) / torch.where(eps > 0, eps, torch.ones_like(eps)), u)
    value = torch.where(alive, torch.exp(exponent), torch.zeros_like(y))
    return value, value / (1.0 + y)


def _solve_flat(x: Tensor, eps: Tensor) -> Tensor:
    """alpha <= 2: find t >= 0 with sum exp_eps(x - t) = 1 by Newton on the logarithm, kept in a bracket.

    At t = 0 the maximum alone gives 1; where every term is at most 1/n the sum is at most 1.
    """
    count = (x > -math.inf).sum(-1, keepdim=True).clamp(min=1).to(x)
    low = torch.zeros_like(eps)
    positive = torch.where(eps > 0, eps, torch.ones_like(eps))
    high = torch.where(eps > 0, -torch.expm1(-eps * torch.log(count)) / positive, torch.log(count))
    t = low
    value = x
    for _ in range(_MAX_STEPS):
        value, slope = _deformed_exp(x - t, eps)
        total, descent = value.sum(-1, keepdim=True), slope.sum(-1, keepdim=True)
        low, high = torch.where(total >= 1.0, t, low), torch.where(total <= 1.0, t, high)
        step = t + torch.log(total) * total / descent
        inside = (step > low) & (step < high)
        following = torch.where(inside, step, low + (high - low) / 2.0)
        # A masked row has a total of 0 and a NaN step; it takes the midpoint of [0, 0].
        settled = (total == 1.0) | (following == low) | (following == high) | ((following - t).abs() <= 1e-16 * t)
        if bool(settled.all()):
            break
        t = torch.where(settled, t, following)
    return value


def _solve_steep(x: Tensor, eps: Tensor) -> Tensor:
    """alpha > 2: the slope at the threshold is infinite, so solve for the smallest weight in the support.

    With k the smallest supported key and v its weight, every other weight is (v^eps + eps (x_j - x_k))^(1/eps),
    a sum of non-negative terms, so no digits cancel. k comes from sorting and a bisection on its rank: rank k is
    in the support iff sum_{j<k} (eps (x_j - x_k))^(1/eps) < 1. The equation in v is convex and increasing.
    """
    ordered = x.sort(-1, descending=True).values
    count = (x > -math.inf).sum(-1, keepdim=True)
    inside, outside = torch.ones_like(count), count + 1
    last = x.shape[-1]
    for _ in range(max(1, math.ceil(math.log2(last + 1)))):
        rank = ((inside + outside) // 2).clamp(max=last)
        pivot = ordered.gather(-1, rank - 1)
        above = torch.relu(eps * (x - pivot)).pow(1.0 / eps).sum(-1, keepdim=True)
        yes = (above < 1.0) & (rank <= count)
        open_ = outside - inside > 1
        inside, outside = torch.where(open_ & yes, rank, inside), torch.where(open_ & ~yes, rank, outside)
    pivot = ordered.gather(-1, inside - 1)
    pivot = pivot.masked_fill(torch.isinf(pivot), 0.0)
    gap = eps * (x - pivot)
    supported = gap >= 0
    gap = torch.where(supported, gap, torch.zeros_like(gap))
    low = torch.zeros_like(eps)
    high = 1.0 / inside.to(x)
    v = high
    weights = gap
    for _ in range(_MAX_STEPS):
        base = v.pow(eps) + gap
        weights = torch.where(supported, base.pow(1.0 / eps), torch.zeros_like(base))
        total = weights.sum(-1, keepdim=True)
        slope = torch.where(supported & (v > 0), (v.pow(eps) / base).pow(1.0 - 1.0 / eps), torch.zeros_like(base))
        low, high = torch.where(total <= 1.0, v, low), torch.where(total >= 1.0, v, high)
        step = v - (total - 1.0) / slope.sum(-1, keepdim=True).clamp(min=1.0)
        following = torch.where((step > low) & (step < high), step, low + (high - low) / 2.0)
        settled = (total == 1.0) | (following == low) | (following == high) | ((following - v).abs() <= 1e-17)
        if bool(settled.all()):
            break
        v = torch.where(settled, v, following)
    return weights


# ---- mechanisms ----------------------------------------------------------------------------------


class Entmax(Mechanism):
    """alpha-entmax of q.k / sqrt(D), alpha one value or one a head.

    Parameters
    ----------
    alpha : float, list or Tensor
        At least 1.
    learnable : bool
        Whether alpha is a parameter; a value that training pushes below 1 acts as 1.

    Notes
    -----
    Under ``torch.compile`` a fixed alpha of 1.5 or 2 is a constant of the graph, since kernels have closed forms for
    those. ``load_state_dict`` changes it; writing into the buffer does not, before a call without the compiler.
    """

    def __init__(self, alpha: Any = 1.5, *, learnable: bool = False) -> None:
        super().__init__()
        self.declare("alpha", alpha, 1.0, learnable=learnable)
        # What a traced call takes alpha for, whose values cannot be looked at then.
        self.fixed_alpha = float(alpha) if isinstance(alpha, int | float) and not learnable else None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self.fixed_alpha is not None and not self.alpha_.is_meta:
            self.fixed_alpha = float(self.alpha_) if self.alpha_.ndim == 0 else None

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        alpha = self.value("alpha").to(scores[0].device).clamp(min=1.0)
        if alpha.ndim == 1:
            alpha = self.value("alpha", scores[0]).clamp(min=1.0)
        return _Entmax.apply(scores[0], alpha, scope.visible)

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        return cls(alpha=torch.linspace(1.2, 1.8, heads).tolist(), learnable=True)


class Sparsemax(Mechanism):
    """alpha = 2: the Euclidean projection of the scores onto the simplex."""

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        two = torch.tensor(2.0, dtype=torch.float64, device=scores[0].device)
        return _Entmax.apply(scores[0], two, scope.visible)
