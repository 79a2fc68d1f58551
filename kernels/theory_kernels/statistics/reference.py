"""Statistics with the whole map in memory, in float64: the definition of correct."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .request import Request, stored, unit_rows
from .results import AttentionStatistics, ScoreStatistics, ViewStatistics
from .visibility import column_rows, tile_mask

# Halvings of an interval of length 1, to below the last digit of float64.
_HALVINGS = 60


class Maps(NamedTuple):
    """Everything of a call that the statistics are made of, each (B, H, T, S).

    ``weights`` are absolute values; ``parts`` the two views of TDA before they are subtracted; ``excess`` the signed
    distance of each view's scores from the threshold (TRA, TDA, entmax).
    """

    seen: torch.Tensor
    scores: list[torch.Tensor]
    weights: torch.Tensor
    parts: list[torch.Tensor]
    excess: list[torch.Tensor]


def _scores(q: torch.Tensor, k: torch.Tensor, request: Request, dtype: torch.dtype) -> torch.Tensor:
    row0, row1, key0, key1, _ = request.see.bounds
    q, k = stored(q.to(dtype), row0, row1), stored(k.to(dtype), key0, key1)
    if request.normalize:
        q, k = unit_rows(q), unit_rows(k)
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)


def _softmax(z: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    z = z.masked_fill(~seen, -torch.inf)
    top = z.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(z.dtype)
        top = torch.maximum(top, sinks[:, None, None])
    top = top.masked_fill(torch.isinf(top), 0.0)
    e = (z - top).exp()
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - top).exp()
    return e / torch.where(total > 0, total, 1.0)


def _entmax_excess(z: torch.Tensor, seen: torch.Tensor, alpha: float) -> torch.Tensor:
    """``(alpha - 1) z_j - tau`` with ``sum_j [...]_+^(1 / (alpha - 1)) = 1``, tau by bisection."""
    x = ((alpha - 1.0) * z).masked_fill(~seen, -torch.inf)
    top = x.amax(-1, keepdim=True)
    # The origin at the maximum: the threshold then lies in [-1, 0], where float64 has its digits to spare.
    x = x - top.masked_fill(torch.isinf(top), 0.0)
    low, high = torch.full_like(top, -1.0), torch.zeros_like(top)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = (x - middle).clamp_min(0.0).pow(1.0 / (alpha - 1.0)).sum(-1, keepdim=True) >= 1.0
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return x - low


def _logits(s: torch.Tensor, request: Request) -> torch.Tensor:
    z = request.scale * s
    if request.softcap is not None:
        z = request.softcap * (z / request.softcap).tanh()
    if request.eta_threshold is not None:
        slope = request.eta_sharpness * (z - request.eta_threshold[..., None].to(z.dtype))
        logit = request.eta_reading == "logit"
        z = z * slope.sigmoid() if logit else z + torch.nn.functional.logsigmoid(slope)
    return z


def _entropy(w: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    p = w / torch.where(mass > 0, mass, 1.0)[..., None]
    return torch.special.entr(p).sum(-1)


def _near_zero(w: torch.Tensor, seen: torch.Tensor, bounds: tuple[float, ...]) -> torch.Tensor:
    counts = [(seen & (w < bound)).sum((-2, -1)) for bound in bounds]
    return torch.stack(counts, -1) if counts else torch.zeros((*w.shape[:2], 0), dtype=torch.int64, device=w.device)


def _moments(s: torch.Tensor, pairs: torch.Tensor, request: Request) -> ScoreStatistics:
    count = pairs.sum((-2, -1))
    n = count.double()
    mean = torch.where(pairs, s, 0.0).sum((-2, -1)) / n
    variance = torch.where(pairs, s - mean[..., None, None], 0.0).square().sum((-2, -1)) / n
    low = s.masked_fill(~pairs, torch.inf).amin((-2, -1))
    high = s.masked_fill(~pairs, -torch.inf).amax((-2, -1))
    shape = (*count.shape, 0)
    mgf = [(t * s).masked_fill(~pairs, -torch.inf).flatten(-2).logsumexp(-1) - n.log() for t in request.exponents]
    over = [(pairs & (s > level)).sum((-2, -1)) for level in request.levels]
    return ScoreStatistics(
        count,
        mean,
        variance,
        torch.where(count > 0, low, torch.nan),
        torch.where(count > 0, high, torch.nan),
        torch.stack(mgf, -1) if mgf else mean.new_zeros(shape),
        torch.stack(over, -1) if over else count.new_zeros(shape),
    )


def maps(views: list[tuple[torch.Tensor, torch.Tensor]], request: Request, dtype: torch.dtype) -> Maps:
    """The whole maps, computed in ``dtype``: float64 to define correct, float32 to see what rounding does."""
    (b, h, t, d), s = views[0][0].shape, views[0][1].shape[2]
    seen = torch.stack([tile_mask(request.see, i, (0, t), (0, s), (0, h)).expand(h, t, s) for i in range(b)])
    scores = [_scores(q, k, request, dtype) for q, k in views]
    if request.thresholded:
        tau = request.tau(request.visible(h), d)[..., None].to(dtype)
        excess = [score - tau for score in scores]
        parts = [torch.where(seen, x.clamp_min(0.0).pow(request.power), 0.0) for x in excess]
        w = parts[0]
        if len(parts) == 2:
            w = (w - request.lam[:, None, None].to(dtype) * parts[1]).abs()
        return Maps(seen, scores, w, parts, excess)
    z = _logits(scores[0], request)
    if request.weights == "entmax":
        x = _entmax_excess(z, seen, request.alpha)
        return Maps(seen, scores, x.clamp_min(0.0).pow(1.0 / (request.alpha - 1.0)), [], [x])
    return Maps(seen, scores, _softmax(z, seen, request.sinks), [], [])


def statistics(
    views: list[tuple[torch.Tensor, torch.Tensor]], request: Request, dtype: torch.dtype = torch.float64
) -> AttentionStatistics:
    """Everything asked for, from the full map; see :func:`theory_kernels.attention_statistics`."""
    return summarize(maps(views, request, dtype), request)


def summarize(found: Maps, request: Request) -> AttentionStatistics:
    """Statistics of a map that is there."""
    see = request.see
    b, h, t, s = found.seen.shape
    visible = request.visible(h)
    seen, w = found.seen, found.weights.double()
    alive = [seen & (x > 0) for x in found.excess]
    support = alive[0].sum(-1) if len(alive) == 1 else (w > 0).sum(-1) if alive else visible
    whole = _weights(w, seen, support, request)
    moments: tuple[ScoreStatistics, ...] = ()
    covariance = None
    if request.wants("scores"):
        gap = request.moment_gap
        pairs = torch.stack([tile_mask(see, i, (0, t), (0, s), (0, h), gap).expand(h, t, s) for i in range(b)])
        scores = [score.double() for score in found.scores]
        moments = tuple(_moments(score, pairs, request) for score in scores)
        if len(scores) == 2:
            first, second = (score - m.mean[..., None, None] for score, m in zip(scores, moments, strict=True))
            covariance = torch.where(pairs, first * second, 0.0).sum((-2, -1)) / moments[0].count
    rows = request.wants("rows")
    two = request.views == 2
    parts = zip(found.parts, alive, strict=True) if two else ()
    return AttentionStatistics(
        visible=visible,
        mass=whole.mass,
        entropy=_entropy(w, w.sum(-1)) if rows else None,
        support=whole.support,
        maximum=whole.maximum,
        column_mass=whole.column_mass,
        column_rows=column_rows(see) if request.wants("columns") else None,
        near_zero=whole.near_zero,
        survivors=torch.stack([a.sum(-1) for a in alive]) if request.thresholded and rows else None,
        consensus=(alive[0] & alive[1]).sum(-1) if two and rows else None,
        views=tuple(_weights(part.double(), seen, own.sum(-1), request) for part, own in parts),
        scores=moments,
        covariance=covariance,
    )


def _weights(w: torch.Tensor, seen: torch.Tensor, support: torch.Tensor, request: Request) -> ViewStatistics:
    rows = request.wants("rows")
    return ViewStatistics(
        mass=w.sum(-1) if rows else None,
        support=support if rows else None,
        maximum=w.amax(-1) if rows else None,
        column_mass=w.sum(-2) if request.wants("columns") else None,
        near_zero=_near_zero(w, seen, request.near_zero) if request.wants("near_zero") else None,
    )
