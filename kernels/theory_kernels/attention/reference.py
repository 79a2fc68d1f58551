"""Threshold attention with every score in memory: slow, plain, and the definition of correct.

Differentiable by autograd to any order; ``gradcheck`` in float64 runs on this file.
"""

from __future__ import annotations

import torch

from ..geometry import Geometry, split_packed, tau_coefficients, visible_counts, visible_mask, without_padding


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    """Divide the rows of x, shape (..., D), by their Euclidean norm; zero rows stay zero with gradient zero."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    # Scaling by the largest entry first keeps the squares of half-precision inputs finite.
    safe = torch.where(largest > 0, largest, 1.0)
    y = x / safe
    square = (y * y).sum(-1, keepdim=True)
    norm = torch.where(square > 0, square, 1.0).sqrt()
    return y / norm


def rectify(x: torch.Tensor, power: float) -> torch.Tensor:
    """max(x, 0) ** power, with derivative 0 at and below 0; NaN stays NaN."""
    y = torch.relu(x)
    if power == 1.0:
        return y
    if power == 2.0:
        return y * y
    dead = y <= 0
    return torch.where(dead, 0.0, torch.where(dead, 1.0, y) ** power)


def weights(
    q: torch.Tensor,
    k: torch.Tensor,
    beta: torch.Tensor,
    geometry: Geometry,
    kappa: float,
    power: float,
    normalize: bool,
) -> torch.Tensor:
    """TRA weights ``max(s_ij - tau_i, 0)^p`` of one view (arXiv 2601.12145, section 3).

    Parameters
    ----------
    q, k : torch.Tensor
        Shapes (B, H, T, D) and (B, G, S, D), not packed.
    beta : torch.Tensor
        Shape (H,).

    Returns
    -------
    torch.Tensor
        Shape (B, H, T, S), zero where a row may not look.
    """
    head_dim, group = q.shape[-1], q.shape[1] // k.shape[1]
    if normalize:
        q, k = unit_rows(q), unit_rows(k)
    score = q @ k.repeat_interleave(group, 1).transpose(-1, -2)
    n = visible_counts(geometry, q.device)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    c = tau_coefficients(geometry.max_k, kappa, head_dim, torch.float64, q.device).to(wide)[n]
    tau = beta.to(c.dtype)[None, :, None] * c[:, None, :]
    mask = visible_mask(geometry, 0, q.shape[2], k.shape[2], q.device)[:, None]
    # The mask comes before the threshold: with a negative one, a masked score of 0 would survive.
    return rectify(torch.where(mask, score - tau[..., None], 0.0), power)


def forward(
    views: list[tuple[torch.Tensor, torch.Tensor]],
    v: torch.Tensor,
    beta: torch.Tensor,
    lam: torch.Tensor | None,
    geometry: Geometry,
    kappa: float,
    power: float,
    normalize: bool,
    rms_eps: float | None,
) -> torch.Tensor:
    """Return (B, H, T, E): the weights times v, optionally divided by their root mean square."""
    if geometry.packed:
        out = v.new_zeros((1, views[0][0].shape[1], views[0][0].shape[2], v.shape[-1]))
        pieces = []
        for rows, keys, part in split_packed(geometry):
            cut = [(q[:, :, rows], k[:, :, keys]) for q, k in views]
            pieces.append(forward(cut, v[:, :, keys], beta, lam, part, kappa, power, normalize, rms_eps))
        return torch.cat(pieces, 2) if pieces else out
    views = [(without_padding(q, geometry, False), without_padding(k, geometry, True)) for q, k in views]
    v = without_padding(v, geometry, True)
    a = weights(*views[0], beta, geometry, kappa, power, normalize)
    if lam is not None:
        second = weights(*views[1], beta, geometry, kappa, power, normalize)
        a = a - lam.to(a.dtype)[None, :, None, None] * second
    group = a.shape[1] // v.shape[1]
    raw = a.to(v.dtype) @ v.repeat_interleave(group, 1)
    if rms_eps is None:
        return raw
    wide = raw if raw.dtype == torch.float64 else raw.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + rms_eps)).to(raw.dtype)
