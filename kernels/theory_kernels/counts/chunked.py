"""Counts in plain torch, a block of rows at a time: O(T) memory, any device."""

from __future__ import annotations

import torch

from ..geometry import Geometry, visible_mask, without_padding

# Scores held at once; 2^22 float32 are 16 MiB.
_SCORES = 1 << 22


def _operand(x: torch.Tensor, normalize: bool) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    if not normalize or not x.shape[-1]:
        return wide
    largest = wide.abs().amax(-1, keepdim=True)
    scaled = wide / torch.where(largest > 0, largest, 1.0)
    norm = scaled.square().sum(-1, keepdim=True).sqrt()
    # Rounded back to the input dtype: the scores are those of the operands a kernel multiplies.
    return (scaled / torch.where(norm > 0, norm, 1.0)).to(x.dtype).to(wide.dtype)


def counts(
    views: list[tuple[torch.Tensor, torch.Tensor]], taus: list[torch.Tensor], geometry: Geometry, normalize: bool
) -> torch.Tensor:
    """Number of keys a row sees whose score exceeds the threshold in every view; int32 (B, H, T)."""
    views = [(without_padding(q, geometry, False), without_padding(k, geometry, True)) for q, k in views]
    b, h, t = views[0][0].shape[:3]
    g, s = views[0][1].shape[1:3]
    out = torch.zeros((b, h, t), dtype=torch.int32, device=views[0][0].device)
    ready = [(_operand(q, normalize).unflatten(1, (g, h // g)), _operand(k, normalize)[:, :, None]) for q, k in views]
    step = max(1, min(256, _SCORES // max(1, b * h * s)))
    for first in range(0, t, step):
        stop = min(first + step, t)
        mask = visible_mask(geometry, first, stop, s, out.device)
        alive = mask[:, None, None]
        for (q, k), tau in zip(ready, taus, strict=True):
            score = q[..., first:stop, :] @ k.transpose(-1, -2)
            alive = alive & (score > tau.unflatten(1, (g, h // g))[..., first:stop, None])
        out[:, :, first:stop] = alive.sum(-1, dtype=torch.int32).flatten(1, 2)
    return out
