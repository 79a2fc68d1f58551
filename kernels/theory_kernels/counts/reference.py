"""Counts with every score in memory: the definition of correct."""

from __future__ import annotations

import torch

from ..geometry import Geometry, visible_mask, without_padding


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows divided by their norm, in x's dtype; zero rows stay zero."""
    largest = x.abs().amax(-1, keepdim=True)
    y = x / torch.where(largest > 0, largest, 1.0)
    norm = y.square().sum(-1, keepdim=True).sqrt()
    return y / torch.where(norm > 0, norm, 1.0)


def counts(
    views: list[tuple[torch.Tensor, torch.Tensor]], taus: list[torch.Tensor], geometry: Geometry, normalize: bool
) -> torch.Tensor:
    """Number of keys a row sees whose score exceeds the threshold in every view; int32 (B, H, T)."""
    q, k = views[0]
    views = [(without_padding(a, geometry, False), without_padding(b, geometry, True)) for a, b in views]
    alive = visible_mask(geometry, 0, q.shape[2], k.shape[2], q.device)[:, None]
    for (a, b), tau in zip(views, taus, strict=True):
        if normalize:
            a, b = unit_rows(a), unit_rows(b)
        score = a @ b.repeat_interleave(a.shape[1] // b.shape[1], 1).transpose(-1, -2)
        alive = alive & (score > tau[..., None])
    return alive.sum(-1, dtype=torch.int32).expand(q.shape[:3])
