"""Elastic attention a block of rows at a time, in torch: O(T) memory, and the gradients written out.

With y the effective score (``m s``, or ``s + log m``), p = exp(y - lse), dP = dO V^T and delta = <dO, O>:

    dy = p (dP - delta),   ds = dy * dy/ds,   dQ = scale ds K,   dK = scale ds^T Q,   dV = P^T dO,
    dtau = sum_j dy * dy/dtau,   dsharpness = sum_ij dy * dy/dsharpness.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from ..geometry import Geometry, split_packed, visible_mask, without_padding

# Scores of a block of rows, over all heads.
_SCORES = 1 << 22


class Gradients(NamedTuple):
    """Gradients of one call, shaped like its operands."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tau: torch.Tensor
    sharpness: torch.Tensor


def effective(
    s: torch.Tensor, tau: torch.Tensor, sharpness: torch.Tensor, reading: str, exact: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y and its derivatives to s, tau and the sharpness."""
    if exact:
        zero = torch.zeros_like(s)
        return torch.where(tau.isnan(), torch.nan, s), torch.ones_like(s), zero, zero
    x = sharpness * (s - tau)
    m, rest = torch.sigmoid(x), torch.sigmoid(-x)
    if reading == "logit":
        bend = s * m * rest
        # A score of -inf is masked: 0 times it would be NaN.
        return torch.where(s == -torch.inf, s, m * s), m + sharpness * bend, -sharpness * bend, (s - tau) * bend
    return s + logsigmoid(x), 1.0 + sharpness * rest, -sharpness * rest, (s - tau) * rest


class _Block(NamedTuple):
    rows: slice
    q: torch.Tensor
    y: torch.Tensor
    slopes: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    summed: torch.Tensor
    kept: torch.Tensor


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _blocks(
    q: torch.Tensor, k: torch.Tensor, tau: torch.Tensor, sharpness: torch.Tensor, geometry: Geometry, scale: float,
    reading: str, prune: str,
) -> Iterator[_Block]:  # fmt: skip
    b, h, t, _ = q.shape
    s = k.shape[2]
    height = max(1, _SCORES // max(1, b * h * s))
    for first in range(0, t, height):
        stop = min(first + height, t)
        rows = slice(first, stop)
        part = _wide(q[:, :, rows])
        score = scale * (part @ k.transpose(-1, -2))
        level, slope = tau[:, :, rows, None], sharpness[:, None, None]
        seen = visible_mask(geometry, first, stop, s, q.device)[:, None].expand_as(score)
        y, *slopes = effective(score, level, slope, reading, prune == "exact")
        kept = seen & ~(score < level) if prune else seen
        yield _Block(
            rows, part, y, (slopes[0], slopes[1], slopes[2]), kept if prune in ("exact", "renormalize") else seen, kept
        )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: torch.Tensor, sharpness: torch.Tensor, geometry: Geometry,
    scale: float, reading: str, prune: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output (B, H, T, E) in v's dtype and logarithms of the softmax's sums (B, H, T), +inf where it has none."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty((*q.shape[:3], v.shape[-1]), dtype=v.dtype, device=v.device)
    lse = torch.full(q.shape[:3], torch.inf, dtype=wide, device=v.device)
    if geometry.packed:
        out.zero_()
        for rows, span, part in split_packed(geometry):
            cut = (q[:, :, rows], k[:, :, span], v[:, :, span], tau[:, :, rows])
            out[:, :, rows], lse[:, :, rows] = forward(*cut, sharpness, part, scale, reading, prune)
        return out, lse
    if k.shape[2] == 0:
        return out.zero_(), lse
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        without_padding(q, geometry, False),
        without_padding(k, geometry, True),
        without_padding(v, geometry, True),
    )
    keys, values = (_wide(x).repeat_interleave(group, 1) for x in (k, v))
    for block in _blocks(q, keys, tau, sharpness, geometry, scale, reading, prune):
        y = torch.where(block.summed, block.y, -torch.inf)
        sums = torch.logsumexp(y, -1)
        sums = torch.where(sums == -torch.inf, torch.inf, sums)
        p = torch.where(block.kept, torch.exp(y - sums[..., None]), 0.0)
        lse[:, :, block.rows] = sums
        out[:, :, block.rows] = (p @ values).to(out.dtype)
    return out, lse


def backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: torch.Tensor, sharpness: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, geometry: Geometry, scale: float, reading: str, prune: str,
) -> Gradients:  # fmt: skip
    """Gradients for ``grad``, the gradient of the output."""
    found = Gradients(*(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, tau, sharpness)))
    if geometry.packed:
        for rows, span, part in split_packed(geometry):
            cut = (grad[:, :, rows], q[:, :, rows], k[:, :, span], v[:, :, span], tau[:, :, rows])
            saved = (out[:, :, rows], lse[:, :, rows])
            one = backward(*cut, sharpness, *saved, part, scale, reading, prune)
            found.q[:, :, rows], found.k[:, :, span], found.v[:, :, span] = one.q, one.k, one.v
            found.tau[:, :, rows] = one.tau
            found.sharpness.add_(one.sharpness)
        return found
    if k.shape[2] == 0:
        return found
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        without_padding(q, geometry, False),
        without_padding(k, geometry, True),
        without_padding(v, geometry, True),
    )
    keys, values = (_wide(x).repeat_interleave(group, 1) for x in (k, v))
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for block in _blocks(q, keys, tau, sharpness, geometry, scale, reading, prune):
        rows = block.rows
        do, o = _wide(grad[:, :, rows]), _wide(out[:, :, rows])
        p = torch.where(block.summed, torch.exp(block.y - lse[:, :, rows, None]), 0.0)
        dp = torch.where(block.kept, do @ values.transpose(-1, -2), 0.0)
        dy = p * (dp - (do * o).sum(-1, keepdim=True))
        by_s, by_tau, by_slope = block.slopes
        ds = scale * dy * by_s
        found.q[:, :, rows] = (ds @ keys).to(q.dtype)
        found.tau[:, :, rows] = (dy * by_tau).sum(-1)
        found.sharpness.add_((dy * by_slope).sum((0, 2, 3)))
        dk += ds.transpose(-1, -2) @ block.q
        dv += torch.where(block.kept, p, 0.0).transpose(-1, -2) @ do
    found.k.copy_(dk.unflatten(1, (k.shape[1], group)).sum(2))
    found.v.copy_(dv.unflatten(1, (k.shape[1], group)).sum(2))
    return found
