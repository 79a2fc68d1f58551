"""Thresholds of alpha-entmax rows (Peters, Niculae and Martins, arXiv 1905.05702), without weights or gradients."""

from __future__ import annotations

import math

import torch

_STEPS = 80


def entmax_threshold(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """tau of each row with ``sum_j (x_j - tau)_+^(1 / (alpha - 1)) = 1``, for ``x = (alpha - 1) z``.

    Parameters
    ----------
    x : torch.Tensor
        (rows, S), -inf where masked.
    alpha : float
        Above 1.

    Returns
    -------
    torch.Tensor
        (rows,), in x's dtype; -inf for a row without a key.

    Notes
    -----
    The largest key alone reaches 1 at tau = max - 1, so only keys above that can matter: they are gathered first, and
    Newton's method, kept in a bracket, runs on them in float64.
    """
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], -math.inf)
    power = 1.0 / (alpha - 1.0)
    top = x.amax(-1, keepdim=True)
    shift = top.masked_fill(top == -math.inf, 0.0)
    near = int((x > shift - 1.0).sum(-1).amax())
    # Selecting a quarter of the row or more costs more than it saves.
    kept = x.topk(max(1, near), -1, sorted=False).values if near < x.shape[-1] // 4 else x
    y = kept.double() - shift.double()
    low = torch.full_like(y[:, :1], -1.0)
    high = torch.zeros_like(low)
    t = low
    for _ in range(_STEPS):
        gap = torch.relu(y - t)
        value = gap.pow(power).sum(-1, keepdim=True)
        low, high = torch.where(value >= 1.0, t, low), torch.where(value <= 1.0, t, high)
        slope = power * torch.where(gap > 0, gap.pow(power - 1.0), 0.0).sum(-1, keepdim=True)
        # On the logarithm: for alpha near 1 the power is high and the sum itself far from linear.
        step = t + value * value.log() / slope
        following = torch.where((step > low) & (step < high), step, low + (high - low) / 2.0)
        # A step of a rounding ends it, wherever it leads: the bracket may be wide on the other side.
        settled = (value == 1.0) | ((step - t).abs() <= 2.0**-52) | (high - low <= 2.0**-52)
        t = torch.where(settled, t, following)
        if bool(settled.all()):
            break
    tau = (t + shift.double()).to(x.dtype)[:, 0]
    return tau.masked_fill(top[:, 0] == -math.inf, -math.inf)
