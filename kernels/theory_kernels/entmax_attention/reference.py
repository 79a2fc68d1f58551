"""Entmax attention with every score in memory: slow, plain, and the definition of correct.

Differentiable by autograd: the threshold found by :func:`.rows.solve` enters through one Newton step, whose derivative
is that of the implicit function, so no formula for a gradient is written down here.
"""

from __future__ import annotations

import torch

from ..geometry import Geometry, split_packed, visible_mask, without_padding
from .rows import anchors, log_weights, solve


def entmax_rows(z: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """alpha-entmax over the last dimension of z; a row of -inf gives zeros.

    Parameters
    ----------
    z : torch.Tensor
        (..., n), -inf where a key does not count.
    eps : torch.Tensor
        alpha - 1 in (0, 1], broadcastable to (..., 1), in z's dtype.
    """
    u = z - anchors(z.detach())
    with torch.no_grad():
        found = solve(u, eps)
        log_p = log_weights(u, eps, found)
        alive = log_p != -torch.inf  # NaN stays NaN
        tilted = torch.where(alive, ((1.0 - eps) * log_p).exp(), 0.0).sum(-1, keepdim=True)
        slope = torch.exp(eps * found) * tilted
        slope = torch.where(slope > 0, slope, 1.0)
    safe = torch.where(alive, u, 0.0)
    total = torch.where(alive, log_weights(safe, eps, found).exp(), 0.0).sum(-1, keepdim=True)
    # 1 for a row with keys, and constant for one without.
    log_max = found - (total - total.detach()) / slope
    return torch.where(alive, log_weights(safe, eps, log_max).exp(), 0.0)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    factor: torch.Tensor,
    eps: torch.Tensor,
    geometry: Geometry,
) -> torch.Tensor:
    """Return (B, H, T, E).

    Parameters
    ----------
    q, k, v : torch.Tensor
        (B, H, T, D), (B, G, S, D), (B, G, S, E).
    factor : torch.Tensor
        Broadcastable to (B, H, T), what <q, k> is multiplied with: scale and temperature.
    eps : torch.Tensor
        (H,), alpha - 1.
    """
    if geometry.packed:
        out = v.new_zeros((1, q.shape[1], q.shape[2], v.shape[-1]))
        factor = factor.expand(q.shape[:3])
        pieces = [
            forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], factor[:, :, rows], eps, part)
            for rows, keys, part in split_packed(geometry)
        ]
        return torch.cat(pieces, 2) if pieces else out
    q, k = without_padding(q, geometry, False), without_padding(k, geometry, True)
    v = without_padding(v, geometry, True)
    group = q.shape[1] // k.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    score = q @ k.repeat_interleave(group, 1).transpose(-1, -2)
    mask = visible_mask(geometry, 0, q.shape[2], k.shape[2], q.device)[:, None]
    z = torch.where(mask, score.to(wide) * factor.to(wide)[..., None], -torch.inf)
    p = entmax_rows(z, eps.to(wide)[:, None, None])
    return p.to(v.dtype) @ v.repeat_interleave(group, 1)
