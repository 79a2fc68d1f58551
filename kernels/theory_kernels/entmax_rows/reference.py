"""entmax of rows in plain torch: slow, and the definition of correct.

With eps = alpha - 1, u_j = x_j - max x and lam the logarithm of the largest weight, every weight is

    p_j = exp(lam) (1 + eps u_j exp(-eps lam))_+^(1 / eps),        lam in [-log n, 0],

which keeps its digits for eps near 0 (softmax: exp(lam + u_j)) and for flat rows of a large eps alike.
"""

from __future__ import annotations

import torch

_MOST_STEPS = 200


def by_sorting(x: torch.Tensor, power: int) -> torch.Tensor:
    """Exact solver for alpha = 2 (power 1) and 1.5 (power 2), rows in the last dimension.

    ``sum_j (y_j - tau)_+^power = 1`` with y = x / power (arXiv 1602.02068, algorithm 1; 1905.05702, algorithm 2).
    """
    top = x.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    y = (x - top) / power
    ordered = y.sort(-1, descending=True).values
    # Nothing below the maximum minus 1 has weight; a finite stand-in keeps -inf out of the sums.
    ordered = ordered.clamp(min=-2.0)
    rank = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    mean = ordered.cumsum(-1) / rank
    if power == 1:
        taus = mean - 1.0 / rank
    else:
        spread = (ordered.square().cumsum(-1) / rank - mean.square()).clamp(min=0.0)
        taus = mean - (1.0 / rank - spread).clamp(min=0.0).sqrt()
    size = (taus < ordered).sum(-1, keepdim=True).clamp(min=1)
    p = torch.relu(y - taus.gather(-1, size - 1)).pow(power)
    # A NaN compares false everywhere and would pass for a row without support.
    return torch.where(torch.isnan(x).any(-1, keepdim=True) | (top == torch.inf), torch.nan, p)


def weights_of(u: torch.Tensor, lam: torch.Tensor, eps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """p and p / (1 + eps u exp(-eps lam)) for u = x - max, and lam and eps of shape (..., 1)."""
    soft = eps <= 0.0
    safe = torch.where(soft, 1.0, eps)
    ratio = torch.where(u < 0, torch.where(soft, 0.0, eps) * u * torch.exp(-eps * lam), 0.0)
    alive = ratio > -1.0
    ratio = torch.where(alive, ratio, 0.0)
    logs = torch.where(soft, u, torch.log1p(ratio) / safe)
    p = torch.where(alive, torch.exp(lam + logs), 0.0)
    return p, p / (1.0 + ratio)


def by_newton(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """Any alpha >= 1 of shape (..., 1): Newton on the norm ``(sum p)^eps``, convex in tau, kept in a bracket.

    For alpha > 2 the slope is infinite at the threshold: steps are halvings of the bracket alone, and weights lie
    between those of its last two ends, so that they sum to one. (Within the last digit of lam a weight at the
    threshold moves by as much as ``tiny^(1 / eps)``: 0.17 at alpha = 10 in float32.)
    """
    eps = alpha - 1.0
    top = x.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    u = x - top
    count = (u > -torch.inf).sum(-1, keepdim=True).clamp(min=1).to(x.dtype)
    low, high = -torch.log(count), torch.zeros_like(count)
    lam = high + torch.zeros_like(eps)
    tiny = torch.finfo(x.dtype).eps
    safe = torch.where(eps > 0, eps, 1.0)
    p, total = u, high
    for _ in range(_MOST_STEPS):
        p, steep = weights_of(u, lam, eps)
        total, slope = p.sum(-1, keepdim=True), steep.sum(-1, keepdim=True)
        high, low = torch.where(total >= 1.0, lam, high), torch.where(total <= 1.0, lam, low)
        log_total = torch.log(total)
        moved = -total * -torch.expm1(-eps * log_total) / slope
        step = lam + torch.where(eps > 0, torch.log1p(moved.clamp(min=-1.0)) / safe, -log_total)
        inside = (step > low) & (step < high) & (eps <= 1.0)
        following = torch.where(inside, step, low + (high - low) / 2.0)
        done = (following - lam).abs() <= tiny * lam.abs()
        done |= ((total - 1.0).abs() <= tiny) & (eps <= 1.0)
        # A row of -inf or with NaN has nothing to solve.
        done |= ~(total > 0.0) | (total == torch.inf)
        if bool(done.all()):
            break
        lam = torch.where(done, lam, following)
    # A NaN compares false everywhere and would pass for a masked entry.
    p = torch.where(torch.isnan(x).any(-1, keepdim=True) | (top == torch.inf), torch.nan, p)
    steep = eps > 1.0
    if not bool(steep.any()):
        return p
    less, more = weights_of(u, low, eps)[0], weights_of(u, high, eps)[0]
    below, above = less.sum(-1, keepdim=True), more.sum(-1, keepdim=True)
    part = ((1.0 - below) / torch.where(above > below, above - below, 1.0)).clamp(0.0, 1.0)
    between = less + torch.where(above > below, part, 0.0) * (more - less)
    return torch.where(steep & (total > 0.0) & ~torch.isnan(p), between, p)


def solve(x: torch.Tensor, alpha: torch.Tensor | None, power: int) -> torch.Tensor:
    """Weights of rows (R, n) in float32 or wider; ``alpha`` (1,) or (R,), or a closed-form ``power``."""
    if alpha is None:
        return by_sorting(x, power)
    return by_newton(x, alpha[:, None])


def psi(x: torch.Tensor) -> torch.Tensor:
    """(1 - exp(-x) - x) / x^2, by its series near 0 where digits would cancel."""
    small = x.abs() < 0.5
    far = torch.where(small, 1.0, x)
    near = torch.where(small, x, 0.0)
    series, term = torch.zeros_like(x), torch.full_like(x, -0.5)
    for m in range(3, 20):
        series = series + term
        term = term * (-near) / m
    return torch.where(small, series, (-torch.expm1(-far) - far) / far.square())


def gradients(
    p: torch.Tensor, grad: torch.Tensor, alpha: torch.Tensor | None, power: int, wants_alpha: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x (R, n) and of the alpha of every row (R,), from weights and their gradient in one dtype.

    The Jacobian is diag(s) - s s^T / sum s with s = p^(2 - alpha) on the support (arXiv 1905.05702, proposition 2).
    With log p = log1p(eps t) / eps the derivative to alpha at fixed t is p log(p)^2 psi(eps log p), and the
    constraint takes its share of it away (arXiv 1909.00015, proposition 1, in a form without cancellation).
    """
    eps = torch.full_like(p[:, :1], 1.0 / power) if alpha is None else (alpha - 1.0)[:, None]
    alive = p > 0
    logs = torch.log(torch.where(alive, p, 1.0))
    s = torch.where(alive, torch.exp((1.0 - eps) * logs), 0.0)
    total = s.sum(-1, keepdim=True)
    share = s / torch.where(total > 0, total, 1.0)
    mean = (share * grad).sum(-1, keepdim=True)
    dx = s * (grad - mean)
    if not wants_alpha:
        return dx, dx.new_zeros(0)
    direct = p * logs.square() * psi(eps * logs)
    return dx, ((grad - mean) * direct).sum(-1)
