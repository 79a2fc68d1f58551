"""Elastic decoding in plain torch that reads only the blocks that may hold a survivor; any device."""

from __future__ import annotations

import torch

from ..attention.reference import rectify, unit_rows
from .bounds import upper
from .cache import gather
from .problem import DecodeStatistics, Problem

# Keys taken at a time.
_KEYS = 1 << 15


def forward(problem: Problem) -> tuple[torch.Tensor, DecodeStatistics]:
    """Output (B, H, T, E) and what was met."""
    q, v = problem.views[0].q, problem.v
    (batch, heads, rows, _), groups = q.shape, v.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    fold = (groups, heads // groups * rows)
    queries = []
    for view in problem.views:
        x = unit_rows(view.q.to(wide)).to(q.dtype) if problem.normalize else view.q
        queries.append(x.reshape(batch, *fold, x.shape[-1]))
    tau = problem.tau.to(wide).reshape(batch, *fold)
    last = problem.last_keys()[:, None].expand(-1, heads, -1).reshape(batch, *fold)
    lam = None if problem.lam is None else problem.lam.to(wide)[:, None].expand(-1, rows).reshape(fold)
    kept = _screen(problem, queries, tau, last)
    out = torch.zeros((batch, *fold, v.shape[-1]), dtype=wide, device=q.device)
    survivors = torch.zeros((batch, *fold), dtype=torch.int32, device=q.device)
    peak, total = (torch.full((batch, *fold), -torch.inf, dtype=wide, device=q.device) for _ in range(2))
    for b in range(batch):
        for g in range(groups):
            key = _keys(problem, kept[b, g], int(last[b, g].max()) if rows else -1)
            one = [x[b, g].to(wide) for x in queries]
            part = lam[g] if lam is not None else None
            out[b, g], survivors[b, g], peak[b, g], total[b, g] = _attend(
                problem, b, g, one, key, tau[b, g], last[b, g], part
            )
    out = out.reshape(batch, heads, rows, v.shape[-1])
    if problem.rms_eps is not None:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + problem.rms_eps)
    shape = (batch, heads, rows)
    soft = (peak.reshape(shape), total.reshape(shape)) if problem.softmax else (None, None)
    return out.to(v.dtype), DecodeStatistics(survivors.reshape(shape), kept.sum(-1, dtype=torch.int32), *soft)


def _screen(problem: Problem, queries: list[torch.Tensor], tau: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Blocks (B, G, blocks) that may hold a survivor of some row."""
    count = -(-problem.paging.capacity // problem.block)
    first = torch.arange(count, device=tau.device) * problem.block
    seen = first <= last[..., None]
    low = torch.zeros_like(seen)
    for view, q in zip(problem.views, queries, strict=True):
        if view.bounds is None:
            return seen.any(2)
        # Not `>=`: a comparison with NaN keeps the block.
        low |= ~(upper(view.bounds, q, slice(None)) * problem.scale + 1e-37 < tau[..., None])
    return (seen & low).any(2)


def _keys(problem: Problem, kept: torch.Tensor, last: int) -> torch.Tensor:
    """Positions of the keys of the kept blocks."""
    first = kept.nonzero()[:, 0] * problem.block
    key = (first[:, None] + torch.arange(problem.block, device=kept.device)).flatten()
    return key[key <= last]


def _attend(
    problem: Problem,
    b: int,
    g: int,
    q: list[torch.Tensor],
    key: torch.Tensor,
    tau: torch.Tensor,
    last: torch.Tensor,
    lam: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows (R, E) of one key head over the given keys; survivors, largest score, log-sum-exp."""
    wide, dtype = q[0].dtype, problem.v.dtype
    acc = torch.zeros((q[0].shape[0], problem.v.shape[-1]), dtype=wide, device=tau.device)
    survivors = torch.zeros_like(tau, dtype=torch.int32)
    peak, mass = torch.full_like(tau, -torch.inf), torch.zeros_like(tau)
    paging = problem.paging
    if paging.table is not None:
        paging = paging._replace(table=paging.table[b : b + 1], batch=1)

    def rows(cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache = cache[:, g : g + 1] if paging.table is not None else cache[b : b + 1, g : g + 1]
        return gather(cache, paging, at[None])[0, 0].to(wide)

    for at in key.split(_KEYS) if key.numel() else ():
        seen = at <= last[:, None]
        s = q[0] @ rows(problem.views[0].k, at).T * problem.scale
        if problem.softmax:
            alive = seen & ~(s < tau[:, None])
            s = torch.where(alive, torch.where(tau.isnan()[:, None], torch.nan, s), -torch.inf)
            top = torch.maximum(peak, s.amax(-1))
            base = torch.where(top == -torch.inf, 0.0, top)
            w = torch.exp(s - base[:, None])
            shrink = torch.exp(peak - base)
            mass = mass * shrink + w.sum(-1)
            acc, peak = acc * shrink[:, None], top
        else:
            w = rectify(torch.where(seen, s - tau[:, None], 0.0), problem.power)
            alive = w > 0
            if lam is not None:
                s = q[1] @ rows(problem.views[1].k, at).T * problem.scale
                other = rectify(torch.where(seen, s - tau[:, None], 0.0), problem.power)
                alive = alive | (other > 0)
                w = w - lam[:, None] * other
        survivors += alive.sum(-1, dtype=torch.int32)
        # Rounded to the values' dtype, as the kernel does; float16 would flush small excess powers to 0.
        narrow = dtype if problem.softmax or dtype != torch.float16 else wide
        acc = acc + w.to(narrow).to(wide) @ rows(problem.v, at)
    if problem.softmax:
        safe = torch.where(mass == 0, 1.0, mass)
        return acc / safe[:, None], survivors, peak, peak + safe.log()
    return acc, survivors, peak, peak
