"""Statistics with the whole map in memory, in float64: the definition of correct."""

from __future__ import annotations

import torch

from .request import Request, stored, unit_rows
from .results import AttentionStatistics, ScoreStatistics, ViewStatistics
from .visibility import column_rows, tile_mask

_HALVINGS = 100


def _scores(q: torch.Tensor, k: torch.Tensor, request: Request) -> torch.Tensor:
    row0, row1, key0, key1, _ = request.see.bounds
    q, k = stored(q.double(), row0, row1), stored(k.double(), key0, key1)
    if request.normalize:
        q, k = unit_rows(q), unit_rows(k)
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)


def _softmax(z: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    z = z.masked_fill(~seen, -torch.inf)
    top = z.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks[:, None, None])
    top = top.masked_fill(torch.isinf(top), 0.0)
    e = (z - top).exp()
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - top).exp()
    return e / torch.where(total > 0, total, 1.0)


def _entmax(z: torch.Tensor, seen: torch.Tensor, alpha: float) -> torch.Tensor:
    """``[(alpha - 1) z_j - tau]_+^(1 / (alpha - 1))``, tau by bisection."""
    x = ((alpha - 1.0) * z).masked_fill(~seen, -torch.inf)
    top = x.amax(-1, keepdim=True)
    # The origin at the maximum: the threshold then lies in [-1, 0], where float64 has its digits to spare.
    x = x - top.masked_fill(torch.isinf(top), 0.0)
    low, high = torch.full_like(top, -1.0), torch.zeros_like(top)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = (x - middle).clamp_min(0.0).pow(1.0 / (alpha - 1.0)).sum(-1, keepdim=True) >= 1.0
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return (x - low).clamp_min(0.0).pow(1.0 / (alpha - 1.0))


def _logits(s: torch.Tensor, request: Request) -> torch.Tensor:
    z = request.scale * s
    if request.softcap is not None:
        z = request.softcap * (z / request.softcap).tanh()
    if request.eta_threshold is not None:
        slope = request.eta_sharpness * (z - request.eta_threshold[..., None])
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


def statistics(views: list[tuple[torch.Tensor, torch.Tensor]], request: Request) -> AttentionStatistics:
    """Everything asked for, from the full map; see :func:`theory_kernels.attention_statistics`."""
    see = request.see
    (b, h, t, d), s = views[0][0].shape, views[0][1].shape[2]
    rows, keys, heads = (0, t), (0, s), (0, h)
    seen = torch.stack([tile_mask(see, i, rows, keys, heads).expand(h, t, s) for i in range(b)])
    visible = request.visible(h)
    scores = [_scores(q, k, request) for q, k in views]
    parts: list[torch.Tensor] = []
    alive: list[torch.Tensor] = []
    if request.thresholded:
        tau = request.tau(visible, d)[..., None]
        for score in scores:
            alive.append(seen & (score > tau))
            parts.append(torch.where(alive[-1], (score - tau).clamp_min(0.0).pow(request.power), 0.0))
        w = parts[0] if len(parts) == 1 else (parts[0] - request.lam[:, None, None] * parts[1]).abs()
    elif request.weights == "entmax":
        w = _entmax(_logits(scores[0], request), seen, request.alpha)
    else:
        w = _softmax(_logits(scores[0], request), seen, request.sinks)
    always = request.weights in ("softmax", "eta")
    whole = _weights(w, seen, visible if always else None, request)
    pairs = torch.stack([tile_mask(see, i, rows, keys, heads, request.moment_gap).expand(h, t, s) for i in range(b)])
    moments: tuple[ScoreStatistics, ...] = ()
    covariance = None
    if request.wants("scores"):
        moments = tuple(_moments(score, pairs, request) for score in scores)
        if len(scores) == 2:
            first, second = (score - m.mean[..., None, None] for score, m in zip(scores, moments, strict=True))
            covariance = torch.where(pairs, first * second, 0.0).sum((-2, -1)) / moments[0].count
    needs_rows = request.wants("rows")
    return AttentionStatistics(
        visible=visible,
        mass=whole.mass,
        entropy=_entropy(w, w.sum(-1)) if needs_rows else None,
        support=whole.support,
        maximum=whole.maximum,
        column_mass=whole.column_mass,
        column_rows=column_rows(see) if request.wants("columns") else None,
        near_zero=whole.near_zero,
        survivors=torch.stack([a.sum(-1) for a in alive]) if alive and needs_rows else None,
        consensus=(alive[0] & alive[1]).sum(-1) if len(alive) == 2 and needs_rows else None,
        views=tuple(_weights(part, seen, None, request) for part in parts) if len(parts) == 2 else (),
        scores=moments,
        covariance=covariance,
    )


def _weights(w: torch.Tensor, seen: torch.Tensor, support: torch.Tensor | None, request: Request) -> ViewStatistics:
    rows = request.wants("rows")
    return ViewStatistics(
        mass=w.sum(-1) if rows else None,
        support=(((w > 0).sum(-1)) if support is None else support) if rows else None,
        maximum=w.amax(-1) if rows else None,
        column_mass=w.sum(-2) if request.wants("columns") else None,
        near_zero=_near_zero(w, seen, request.near_zero) if request.wants("near_zero") else None,
    )
