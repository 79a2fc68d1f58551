"""Elastic attention with every score in memory: slow, plain, and the definition of correct."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from ..geometry import Geometry, split_packed, visible_mask, without_padding


def softmax(y: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of what is kept; 0 (and gradient 0) in a row without."""
    filled = torch.where(kept, y, -torch.inf)
    top = filled.detach().amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    e = torch.where(kept, torch.exp(torch.where(kept, y - top, 0.0)), 0.0)
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total > 0, total, 1.0)


def weights(
    s: torch.Tensor, tau: torch.Tensor, sharpness: torch.Tensor, seen: torch.Tensor, reading: str, prune: str | None
) -> torch.Tensor:
    """Weights of scores (..., T, S); tau (..., T, 1), sharpness broadcastable, ``seen`` bool like the scores."""
    x = sharpness * (s - tau)
    # A score of -inf is masked: 0 times it would be NaN.
    y = torch.where(s == -torch.inf, s, torch.sigmoid(x) * s) if reading == "logit" else s + logsigmoid(x)
    # Not `>=`: what is no number is kept, and makes its row NaN.
    kept = seen & ~(s < tau)
    if prune is None:
        return softmax(y, seen)
    if prune == "exact":
        return softmax(torch.where(tau.isnan(), torch.nan, s), kept)
    if prune == "renormalize":
        return softmax(y, kept)
    return torch.where(kept, softmax(y, seen), 0.0)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tau: torch.Tensor,
    sharpness: torch.Tensor,
    geometry: Geometry,
    scale: float,
    reading: str,
    prune: str | None,
) -> torch.Tensor:
    """Return (B, H, T, E); tau (B, H, T), sharpness (H,)."""
    if geometry.packed:
        pieces = [
            forward(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], tau[:, :, rows], sharpness, part, scale, reading, prune
            )
            for rows, keys, part in split_packed(geometry)
        ]
        return torch.cat(pieces, 2) if pieces else v.new_zeros((1, q.shape[1], q.shape[2], v.shape[-1]))
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        without_padding(q, geometry, False),
        without_padding(k, geometry, True),
        without_padding(v, geometry, True),
    )
    s = scale * (q @ k.repeat_interleave(group, 1).transpose(-1, -2))
    seen = visible_mask(geometry, 0, q.shape[2], k.shape[2], q.device)[:, None].expand_as(s)
    if s.shape[-1] == 0:
        # Sums over nothing: zeros with a graph.
        return s.sum(-1, keepdim=True).to(v.dtype).expand(*q.shape[:3], v.shape[-1])
    a = weights(s, tau[..., None], sharpness[:, None, None], seen, reading, prune)
    return a.to(v.dtype) @ v.repeat_interleave(group, 1)
