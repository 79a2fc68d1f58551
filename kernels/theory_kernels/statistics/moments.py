"""Moments of the scores, added up tile by tile in float64."""

from __future__ import annotations

import torch

from .blocks import Block, count_above, prepared
from .request import Request
from .results import ScoreStatistics


class Moments:
    """Sums over the pairs that count, about a pilot mean so that the variance loses no digits.

    ``factor`` is what the tiles are multiplied by beside <q, k>; it is taken out at the end.
    """

    def __init__(self, views: list[tuple[torch.Tensor, torch.Tensor]], request: Request, factor: float):
        q, _ = views[0]
        self.request, self.factor = request, factor
        shape, device = (len(views), *q.shape[:2]), q.device
        self.count = torch.zeros(shape[1:], dtype=torch.int64, device=device)
        self.first = torch.zeros(shape, dtype=torch.float64, device=device)
        self.second = torch.zeros_like(self.first)
        self.low = torch.full_like(self.first, torch.inf)
        self.high = torch.full_like(self.first, -torch.inf)
        self.cross = torch.zeros(shape[1:], dtype=torch.float64, device=device)
        self.mgf = torch.full((*shape, len(request.exponents)), -torch.inf, dtype=torch.float64, device=device)
        self.over = torch.zeros((*shape, len(request.levels)), dtype=torch.int64, device=device)
        self.shift = torch.stack([_pilot(q, k, request) for q, k in views]) * factor

    def add(self, block: Block, chunk: tuple[int, int], tiles: list[torch.Tensor]) -> None:
        """Add a chunk of every view; the tiles are left as they are."""
        at = (block.b, block.heads)
        hidden = block.hidden(chunk, self.request.moment_gap)
        shape = tiles[0].shape
        if hidden is None:
            pairs = torch.full(shape[:2], shape[2] * shape[3], dtype=torch.int64, device=tiles[0].device)
        else:
            pairs = (~hidden).sum((-2, -1)).expand(shape[:2])
            if not bool(pairs.any()):
                return
        self.count[at] += pairs.flatten()
        centered = []
        for view, s in enumerate(tiles):
            d = s - self.shift[view][at].view(*shape[:2], 1, 1).to(s.dtype)
            if hidden is not None:
                d.masked_fill_(hidden, 0.0)
            centered.append(d)
            self.first[view][at] += d.sum((-2, -1)).double().flatten()
            kept = s if hidden is None else s.masked_fill(hidden, torch.inf)
            self.low[view][at] = torch.minimum(self.low[view][at], kept.amin((-2, -1)).double().flatten())
            kept = s if hidden is None else s.masked_fill(hidden, -torch.inf)
            self.high[view][at] = torch.maximum(self.high[view][at], kept.amax((-2, -1)).double().flatten())
            for index, t in enumerate(self.request.exponents):
                part = (kept * (t / self.factor)) if t else kept * 0.0
                if hidden is not None:
                    # -inf times a negative or zero exponent is no longer -inf.
                    part.masked_fill_(hidden, -torch.inf)
                both = torch.logaddexp(
                    self.mgf[view, ..., index][at], part.flatten(-2).logsumexp(-1).double().flatten()
                )
                self.mgf[view, ..., index][at] = both
            for index, level in enumerate(self.request.levels):
                counts = count_above(kept, level * self.factor, torch.empty_like(s)).sum(-1)
                self.over[view, ..., index][at] += counts.flatten()
        if len(tiles) == 2:
            self.cross[at] += (centered[0] * centered[1]).sum((-2, -1)).double().flatten()
        for view, d in enumerate(centered):
            self.second[view][at] += d.square_().sum((-2, -1)).double().flatten()

    def results(self) -> tuple[tuple[ScoreStatistics, ...], torch.Tensor | None]:
        """Statistics of every view, and the covariance of two."""
        n = self.count.double()
        lag = self.first / n
        variance = (self.second / n - lag.square()).clamp_min(0.0) / self.factor**2
        none = self.count == 0
        scores = tuple(
            ScoreStatistics(
                self.count,
                (lag[view] + self.shift[view]) / self.factor,
                variance[view],
                (self.low[view] / self.factor).masked_fill(none, torch.nan),
                (self.high[view] / self.factor).masked_fill(none, torch.nan),
                self.mgf[view] - n[..., None].log(),
                self.over[view],
            )
            for view in range(len(self.first))
        )
        if len(scores) < 2:
            return scores, None
        return scores, (self.cross / n - lag[0] * lag[1]) / self.factor**2


def _pilot(q: torch.Tensor, k: torch.Tensor, request: Request) -> torch.Tensor:
    """Product of the mean query and the mean key, (B, H): near the mean score, and cheap."""
    row0, row1, key0, key1, _ = request.see.bounds.tolist()
    share = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    for b in range(q.shape[0]):
        if row1[b] <= row0[b] or key1[b] <= key0[b]:
            continue
        mean_q = prepared(q[b, :, row0[b] : row1[b]], request.normalize).double().mean(1)
        mean_k = prepared(k[b, :, key0[b] : key1[b]], request.normalize).double().mean(1)
        out[b] = (mean_q * mean_k.repeat_interleave(share, 0)).sum(-1)
    return out
