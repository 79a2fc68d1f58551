r"""alpha-entmax of the rows of a score matrix in plain torch: threshold, weights and derivatives.

With epsilon = alpha - 1, u_j = z_j - max z and P the largest weight, the weights are

    p_j = [epsilon u_j + s]_+^(1/epsilon) = exp(L + log1p(epsilon u_j / s) / epsilon),   L = log P,  s = P^epsilon,

which stays accurate down to epsilon = 0, where it is softmax and L = -log sum exp u. L solves sum p = 1 and lies in
[-log n, 0], because the largest of n weights is at least 1/n and at most 1.

References
----------
B. Peters, V. Niculae, A. Martins, "Sparse Sequence-to-Sequence Models", ACL 2019 (entmax, its Jacobian).
G. Correia, V. Niculae, A. Martins, "Adaptively Sparse Transformers", EMNLP 2019 (the derivative for alpha).
"""

from __future__ import annotations

import math

import torch


def anchors(z: torch.Tensor) -> torch.Tensor:
    """Largest score of each row, (..., 1); 0 for a row without one (all -inf, or no keys)."""
    if z.shape[-1] == 0:
        return z.new_zeros((*z.shape[:-1], 1))
    m = z.amax(-1, keepdim=True)
    return torch.where(m == -torch.inf, 0.0, m)


def log_weights(u: torch.Tensor, eps: torch.Tensor, log_max: torch.Tensor) -> torch.Tensor:
    """log p_j for u = z - max z and L = ``log_max``; -inf outside the support, NaN where u is."""
    ratio = eps * u * torch.exp(-eps * log_max)
    alive = ~(ratio <= -1.0)
    inside = log_max + torch.log1p(torch.where(alive, ratio, 0.0)) / eps
    return torch.where(alive, inside, -torch.inf)


def solve(u: torch.Tensor, eps: torch.Tensor, steps: int = 200) -> torch.Tensor:
    """L with sum_j p_j = 1 to the last bits of the dtype, by Newton's method on log sum p inside a bracket.

    Parameters
    ----------
    u : torch.Tensor
        (..., n): scores minus the largest of their row; -inf for keys that do not count.
    eps : torch.Tensor
        alpha - 1 in (0, 1], broadcastable to (..., 1).
    steps : int
        Bound of the iteration; it ends as soon as no row moves.

    Returns
    -------
    torch.Tensor
        (..., 1); 0 for a row without keys.
    """
    high = torch.zeros_like(u[..., :1]) if u.shape[-1] else u.new_zeros((*u.shape[:-1], 1))
    if u.shape[-1] == 0:
        return high
    alive = (u > -torch.inf).any(-1, keepdim=True)
    low = torch.full_like(high, -math.log(u.shape[-1]) - 1.0)
    at = high.clone()
    limit = 2 * torch.finfo(u.dtype).eps
    for _ in range(steps):
        log_p = log_weights(u, eps, at)
        total = log_p.exp().sum(-1, keepdim=True)
        slope = torch.exp(eps * at) * ((1.0 - eps) * log_p).exp().where(log_p != -torch.inf, 0.0).sum(-1, keepdim=True)
        high, low = torch.where(total >= 1, at, high), torch.where(total < 1, at, low)
        step = total.log() * total / slope
        new = at - step
        new = torch.where((new > low) & (new < high) | (step == 0), new, (low + high) / 2)
        new = torch.where(step.abs() <= limit * at.abs().clamp_min(1.0), at - step, new)
        moved = alive & ((new - at).abs() > limit * at.abs().clamp_min(1.0))
        at = torch.where(alive, new, 0.0)
        if not bool(moved.any()):
            break
    return at


def slopes(log_p: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """s_j = p_j^(2 - alpha) on the support, 0 outside, NaN for NaN: dp/dz = diag(s) - s s^T / sum s."""
    return torch.where(log_p == -torch.inf, 0.0, torch.exp((1.0 - eps) * log_p))


def alpha_terms(log_p: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    r"""p_j psi_j with psi = (exp(y) - 1 - y) / epsilon^2, y = -epsilon log p_j; 0 outside the support.

    The derivative for alpha is dp_j/dalpha = -p_j psi_j + s_j sum_k p_k psi_k / sum_k s_k. It equals the formula of
    Correia et al., whose terms grow like 1/epsilon^2 and cancel; this one tends to p (log p)^2 / 2 at epsilon = 0.
    """
    alive = log_p != -torch.inf
    log_p = torch.where(alive, log_p, 0.0)
    p, y = log_p.exp(), -eps * log_p
    series = (
        log_p.square()
        * p
        * (0.5 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y * (1 / 720 + y * (1 / 5040 + y / 40320))))))
    )
    # Where what the series leaves out is as small as what the difference loses.
    near = 0.05 if p.dtype == torch.float64 else 0.5
    far = (torch.exp((1.0 - eps) * log_p) - p - p * y) / eps.square()
    return torch.where(alive, torch.where(y < near, series, far), 0.0)
