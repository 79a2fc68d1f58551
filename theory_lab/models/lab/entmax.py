"""alpha-entmax in a fixed number of steps: for graphs that cannot ask the device how far a solver is.

References
----------
Peters, Niculae and Martins, "Sparse Sequence-to-Sequence Models", arXiv 1905.05702 (alpha-entmax and its Jacobian).
Correia, Niculae and Martins, "Adaptively Sparse Transformers", arXiv 1909.00015 (the gradient to alpha).
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALVINGS = 12
_NEWTON = 8


def static_entmax(scores: Tensor, alpha: float | Tensor, visible: Tensor) -> Tensor:
    """alpha-entmax over the last dimension, 1 < alpha <= 2, with a fixed number of operations.

    With x = (alpha - 1) (z - max z) the threshold tau in [-1, 0) solves f(tau) = sum (x - tau)_+^p = 1, p =
    1 / (alpha - 1) >= 1. f is convex and falls, so Newton's steps from the left of the root stay left of it; halvings
    of a bracket come first, since far from the root Newton gains a factor of (1 - 1 / p) a step only. A last step is
    differentiated: its derivative at the root is that of the root (implicit function theorem), to the scores and to
    alpha.

    Parameters
    ----------
    scores : Tensor
        (..., S) floating, finite where visible.
    alpha : float or Tensor
        In (1, 2]; a tensor broadcastable to (..., 1).
    visible : Tensor
        Boolean, the shape of `scores`.

    Returns
    -------
    Tensor
        Weights; rows sum to 1 within rounding, and a row without visible keys is 0.
    """
    gap = alpha - 1.0
    power = 1.0 / gap
    hidden = ~visible
    top = scores.detach().masked_fill(hidden, -torch.inf).amax(-1, keepdim=True)
    top = top.masked_fill(torch.isinf(top), 0.0)
    # A masked key lies below every threshold.
    x = ((scores - top) * gap).masked_fill(hidden, -2.0)
    with torch.no_grad():
        tau = _threshold(x, power, visible)
    y, total = _powers(x - tau, power)
    rate = _slope(x - tau, y, power).sum(-1, keepdim=True).detach()
    # A row that sees nothing has no slope, and stays where it is: below every threshold.
    tau = tau + torch.where(rate > 0, (total - 1.0) / torch.where(rate > 0, rate, 1.0), 0.0)
    weights, total = _powers(x - tau, power)
    return weights / torch.where(total > 0, total, torch.ones_like(total))


def _powers(gap: Tensor, power: float | Tensor) -> tuple[Tensor, Tensor]:
    """max(gap, 0)^power, and its sum over the row."""
    alive = gap > 0
    safe = torch.where(alive, gap, torch.ones_like(gap))
    if isinstance(power, float) and power in (1.0, 2.0):
        raised = safe if power == 1.0 else safe * safe
    else:
        raised = safe.pow(power)
    raised = torch.where(alive, raised, torch.zeros_like(gap))
    return raised, raised.sum(-1, keepdim=True)


def _slope(gap: Tensor, raised: Tensor, power: float | Tensor) -> Tensor:
    """power * max(gap, 0)^(power - 1)."""
    alive = gap > 0
    return torch.where(alive, power * raised / torch.where(alive, gap, torch.ones_like(gap)), torch.zeros_like(gap))


def _threshold(x: Tensor, power: float | Tensor, visible: Tensor) -> Tensor:
    count = visible.sum(-1, keepdim=True).clamp_min(1).to(x.dtype)
    low = torch.full_like(count, -1.0)  # where the largest weight alone is 1
    high = -(count ** (-1.0 / power))  # where all weights would be the largest
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        _, total = _powers(x - middle, power)
        above = total >= 1.0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    tau = low
    for _ in range(_NEWTON):
        raised, total = _powers(x - tau, power)
        slope = _slope(x - tau, raised, power).sum(-1, keepdim=True)
        step = (total - 1.0) / slope.clamp_min(torch.finfo(x.dtype).tiny)
        tau = torch.maximum(torch.minimum(tau + step, high), low)
    return tau
