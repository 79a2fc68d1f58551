"""Elastic decoding with every score in memory: slow, plain, and the definition of correct."""

from __future__ import annotations

import torch

from ..attention.reference import rectify, unit_rows
from .cache import gather
from .problem import DecodeStatistics, Problem


def scores(problem: Problem, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (B, H, T, S) of a view, and which pairs may interact (B, 1, T, S)."""
    q, k, _ = problem.views[index]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if problem.normalize:
        q = unit_rows(q.to(wide)).to(q.dtype)
    key = torch.arange(problem.paging.capacity, device=q.device)
    k = gather(k, problem.paging, key.expand(q.shape[0], -1))
    seen = (key <= problem.last_keys()[..., None])[:, None]
    there = seen.any(2)[..., None]
    k = torch.where(there, k, 0.0).to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return q.to(wide) @ k.transpose(-1, -2) * problem.scale, seen


def forward(problem: Problem) -> tuple[torch.Tensor, DecodeStatistics]:
    """Output (B, H, T, E) and what was met."""
    score, seen = scores(problem, 0)
    tau = problem.tau.to(score.dtype)[..., None]
    key = torch.arange(problem.paging.capacity, device=score.device)
    v = gather(problem.v, problem.paging, key.expand(score.shape[0], -1))
    group = score.shape[1] // v.shape[1]
    there = seen.any(2)[..., None]
    v = torch.where(there, v, 0.0).repeat_interleave(group, 1)
    peak = total = None
    if problem.softmax:
        # Not `>=`: what is no number is kept, and makes its row NaN.
        alive = seen & ~(score < tau)
        score = torch.where(alive, torch.where(tau.isnan(), torch.nan, score), -torch.inf)
        peak = score.amax(-1) if score.shape[-1] else torch.full_like(problem.tau, -torch.inf)
        weight = torch.exp(score - torch.where(peak == -torch.inf, 0.0, peak)[..., None])
        mass = weight.sum(-1, keepdim=True)
        mass = torch.where(mass == 0, 1.0, mass)
        weight = weight / mass
        total = peak + torch.log(mass)[..., 0]
    else:
        weight = rectify(torch.where(seen, score - tau, 0.0), problem.power)
        alive = weight > 0
        if problem.lam is not None:
            second, _ = scores(problem, 1)
            other = rectify(torch.where(seen, second - tau, 0.0), problem.power)
            alive = alive | (other > 0)
            weight = weight - problem.lam.to(weight.dtype)[None, :, None, None] * other
    out = weight.to(v.dtype) @ v
    if problem.rms_eps is not None:
        full = out if out.dtype == torch.float64 else out.float()
        out = (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + problem.rms_eps)).to(v.dtype)
    blocks = _visible_blocks(problem)
    return out, DecodeStatistics(alive.sum(-1, dtype=torch.int32), blocks, peak, total)


def _visible_blocks(problem: Problem) -> torch.Tensor:
    """Blocks with a key that some row sees, (B, G): the reference reads them all."""
    # Padded by a 0, so that there is a last column without rows too.
    keys = torch.nn.functional.pad(problem.last_keys() + 1, (1, 0))[:, -1].clamp(0, problem.paging.capacity)
    return (-(-keys // problem.block)).to(torch.int32)[:, None].expand(-1, problem.v.shape[1]).contiguous()
