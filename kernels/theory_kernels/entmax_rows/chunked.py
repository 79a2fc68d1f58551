"""entmax of rows in torch, a few rows at a time, by Newton steps: what runs on the CPU."""

from __future__ import annotations

import torch

from . import reference

# Elements of a block of rows: its handful of temporaries stay in a core's cache or near it.
_BLOCK = 1 << 20


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def closed(x: torch.Tensor, power: int) -> torch.Tensor:
    """alpha = 1 + 1 / power for power 1 or 2: find b with ``sum_j (b + d_j)_+^power = 1``, d_j = (x_j - max) / power.

    The norm of (b + d)_+ is convex in b, so Newton on it from b = 1 only ever comes down to the solution. The last
    step stays apart from b: b + d_j is exact where digits cancel, and so loses nothing before the step is taken.
    """
    top = x.amax(-1, keepdim=True)
    d = (x - torch.where(top == -torch.inf, 0.0, top)) / power
    b = torch.ones_like(top)
    step = torch.zeros_like(top)
    tiny = torch.finfo(x.dtype).eps
    for _ in range(100):
        base = torch.relu(b + d)
        first = base.sum(-1, keepdim=True)
        if power == 1:
            step = (first - 1.0) / (base > 0).sum(-1, keepdim=True)
        else:
            second = base.square().sum(-1, keepdim=True)
            step = (second - second.sqrt()) / first
        step = torch.where(torch.isfinite(step), step, 0.0)
        if bool((step <= 4.0 * tiny * b).all()):
            break
        b = b - step
    p = torch.relu((b + d) - step).pow(power)
    return torch.where(torch.isnan(first) | (first == torch.inf), torch.nan, p)


def forward(x: torch.Tensor, alpha: torch.Tensor | None, power: int) -> torch.Tensor:
    """Weights of rows (R, n) in x's dtype; see :func:`.reference.solve`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    height = max(1, _BLOCK // max(1, x.shape[1]))
    for first in range(0, x.shape[0], height):
        rows = slice(first, first + height)
        z = x[rows].to(_wide(x.dtype))
        if alpha is None:
            out[rows] = closed(z, power)
        else:
            out[rows] = reference.by_newton(z, (alpha if alpha.shape[0] == 1 else alpha[rows])[:, None])
    return out


def backward(
    p: torch.Tensor, grad: torch.Tensor, alpha: torch.Tensor | None, power: int, wants_alpha: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x in p's dtype and of every row's alpha (R,); see :func:`.reference.gradients`."""
    wide = _wide(p.dtype)
    dx = torch.empty_like(p)
    dalpha = torch.zeros(p.shape[0] if wants_alpha else 0, dtype=wide, device=p.device)
    height = max(1, _BLOCK // max(1, p.shape[1]))
    for first in range(0, p.shape[0], height):
        rows = slice(first, first + height)
        each = alpha if alpha is None or alpha.shape[0] == 1 else alpha[rows]
        found, change = reference.gradients(p[rows].to(wide), grad[rows].to(wide), each, power, wants_alpha)
        dx[rows] = found
        if wants_alpha:
            dalpha[rows] = change
    return dx, dalpha
