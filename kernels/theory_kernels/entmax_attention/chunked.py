"""Entmax attention in plain torch, a block of query rows at a time: O(T) memory, any device.

The forward keeps the output and, of each row, its largest score and largest log weight; the backward recomputes the
scores block by block. Half-precision inputs are multiplied in float32; float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..geometry import Geometry, split_packed, visible_mask, without_padding
from .rows import alpha_terms, anchors, log_weights, slopes, solve

# Scores held at once; 2^21 float32 are 8 MiB, and the solver holds a few such blocks.
_SCORES = 1 << 21
_MAX_ROWS = 256


class Gradients(NamedTuple):
    """Gradients of q, k, v, of the factor of every row (B, H, T) and of alpha (H,)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    factor: torch.Tensor
    alpha: torch.Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Blocks:
    """What forward and backward share: operands (B, G, H / G, T, D), and the loop over row blocks."""

    def __init__(self, q, k, v, factor, eps, geometry: Geometry):  # type: ignore[no-untyped-def]
        self.geometry = geometry
        self.groups = k.shape[1]
        self.q = self.grouped(without_padding(q.to(wide(q.dtype)), geometry, False))
        self.k = without_padding(k.to(wide(k.dtype)), geometry, True)[:, :, None]
        self.v = without_padding(v.to(wide(v.dtype)), geometry, True)[:, :, None]
        self.factor = self.grouped(factor.to(self.q.dtype).expand(q.shape[:3]))[..., None]
        self.eps = eps.to(self.q.dtype).view(1, self.groups, -1, 1, 1)

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, ...) seen as (B, G, H / G, ...)."""
        return x.unflatten(1, (self.groups, -1)) if x.shape[1] else x[:, :, None]

    def spans(self) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Yield (first row, stop row, keys to look at, mask)."""
        b, g, r = self.q.shape[:3]
        t, s, device = self.geometry.max_q, self.geometry.max_k, self.v.device
        step = max(1, min(_MAX_ROWS, _SCORES // max(1, b * g * r * s)))
        for first in range(0, t, step):
            stop, keys = min(first + step, t), s
            if self.geometry.causal and self.geometry.layout is None:
                keys = max(0, min(s, stop + self.geometry.offset))
            if keys:
                yield first, stop, keys, visible_mask(self.geometry, first, stop, keys, device)[:, None, None]

    def scores(self, first: int, stop: int, keys: int, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """<q, k> (masked pairs included) and the scores, -inf where masked; (B, G, H / G, rows, keys)."""
        raw = self.q[..., first:stop, :] @ self.k[..., :keys, :].transpose(-1, -2)
        return raw, torch.where(mask, raw * self.factor[..., first:stop, :], -torch.inf)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    factor: torch.Tensor,
    eps: torch.Tensor,
    geometry: Geometry,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, H, T, E) in v's dtype, and of each row the largest score and log weight, (2, B, H, T)."""
    shape = q.shape[:3]
    out = torch.zeros((*shape, v.shape[-1]), dtype=wide(v.dtype), device=v.device)
    kept = out.new_zeros((2, *shape))
    if geometry.packed:
        factor = factor.expand(shape)
        for rows, cut, part in split_packed(geometry):
            piece = forward(q[:, :, rows], k[:, :, cut], v[:, :, cut], factor[:, :, rows], eps, part)
            out[:, :, rows], kept[:, :, :, rows] = piece
        return out.to(v.dtype), kept
    blocks = _Blocks(q, k, v, factor, eps, geometry)
    # Views: rows of the block are written through them.
    views = [blocks.grouped(x) for x in (out, *kept)]
    for first, stop, keys, mask in blocks.spans():
        _, z = blocks.scores(first, stop, keys, mask)
        m = anchors(z)
        at = solve(z - m, blocks.eps)
        p = log_weights(z - m, blocks.eps, at).exp()
        views[0][..., first:stop, :] = p @ blocks.v[..., :keys, :]
        views[1][..., first:stop], views[2][..., first:stop] = m[..., 0], at[..., 0]
    return out.to(v.dtype), kept


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    factor: torch.Tensor,
    eps: torch.Tensor,
    kept: torch.Tensor,
    geometry: Geometry,
) -> Gradients:
    """Gradients for ``grad`` (B, H, T, E); see the derivation in kernels/README.md."""
    if not geometry.packed:
        return _backward(grad, q, k, v, factor, eps, kept, geometry)
    total = Gradients(
        torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(kept[0]), torch.zeros_like(eps)
    )
    factor = factor.expand(q.shape[:3])
    for rows, keys, part in split_packed(geometry):
        cut = [x[:, :, rows] for x in (grad, q, factor)]
        one = _backward(cut[0], cut[1], k[:, :, keys], v[:, :, keys], cut[2], eps, kept[:, :, :, rows], part)
        total.q[:, :, rows], total.k[:, :, keys], total.v[:, :, keys] = one.q, one.k, one.v
        total.factor[:, :, rows] = one.factor
        total.alpha.add_(one.alpha)
    return total


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    factor: torch.Tensor,
    eps: torch.Tensor,
    kept: torch.Tensor,
    geometry: Geometry,
) -> Gradients:
    blocks = _Blocks(q, k, v, factor, eps, geometry)
    do = blocks.grouped(without_padding(grad.to(blocks.v.dtype), geometry, False))
    dq, dk, dv = torch.zeros_like(blocks.q), torch.zeros_like(blocks.k[:, :, 0]), torch.zeros_like(blocks.v[:, :, 0])
    dfactor = torch.zeros_like(blocks.factor[..., 0])
    dalpha = torch.zeros(blocks.q.shape[1:3], dtype=dq.dtype, device=q.device)
    anchor, log_max = (blocks.grouped(x)[..., None] for x in kept)
    for first, stop, keys, mask in blocks.spans():
        raw, z = blocks.scores(first, stop, keys, mask)
        log_p = log_weights(z - anchor[..., first:stop, :], blocks.eps, log_max[..., first:stop, :])
        s, g = slopes(log_p, blocks.eps), do[..., first:stop, :] @ blocks.v[..., :keys, :].transpose(-1, -2)
        total = s.sum(-1, keepdim=True)
        centered = g - (s * g).sum(-1, keepdim=True) / torch.where(total > 0, total, 1.0)
        dz = s * centered
        dfactor[..., first:stop] = (dz * torch.where(s > 0, raw, 0.0)).sum(-1)
        dalpha -= (alpha_terms(log_p, blocks.eps) * centered).sum((0, 3, 4))
        dz = dz * blocks.factor[..., first:stop, :]
        dq[..., first:stop, :] = dz @ blocks.k[..., :keys, :]
        dk[..., :keys, :] += (dz.transpose(-1, -2) @ blocks.q[..., first:stop, :]).sum(2)
        dv[..., :keys, :] += (log_p.exp().transpose(-1, -2) @ do[..., first:stop, :]).sum(2)
    return Gradients(
        dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dfactor.flatten(1, 2),
        dalpha.flatten().to(eps.dtype),
    )  # fmt: skip
