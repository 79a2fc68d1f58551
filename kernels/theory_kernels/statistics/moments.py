"""Moments of the scores, added up tile by tile in float64."""

from __future__ import annotations

import torch

from .blocks import Block, count_above, prepared
from .request import Request, stored
from .results import ScoreStatistics


class Moments:
    """Sums over the pairs of a block that count, (views, groups, heads a group, ...), about the pilot means."""

    def __init__(self, block: Block, request: Request, totals: MomentTotals):
        self.request, self.factor = request, totals.factor
        self.shift = totals.shift[:, block.b, block.heads].unflatten(1, block.shape[:2])
        self.count = torch.zeros(block.shape[:2], dtype=torch.int64, device=self.shift.device)
        self.first = torch.zeros_like(self.shift)
        self.second = torch.zeros_like(self.shift)
        self.low = torch.full_like(self.shift, torch.inf)
        self.high = torch.full_like(self.shift, -torch.inf)
        self.cross = torch.zeros_like(self.shift[0])
        self.mgf = self.shift.new_full((*self.shift.shape, len(request.exponents)), -torch.inf)
        self.over = self.count.new_zeros((*self.shift.shape, len(request.levels)))

    def add(self, block: Block, chunk: tuple[int, int], tiles: list[torch.Tensor]) -> None:
        """Add a chunk of every view; the tiles are left as they are."""
        hidden = block.hidden(chunk, self.request.moment_gap)
        shape = tiles[0].shape
        if hidden is None:
            self.count += shape[2] * shape[3]
        else:
            pairs = (~hidden).sum((-2, -1)).expand(shape[:2])
            if not bool(pairs.any()):
                return
            self.count += pairs
        centered = []
        for view, s in enumerate(tiles):
            d = s - self.shift[view][..., None, None].to(s.dtype)
            if hidden is not None:
                d.masked_fill_(hidden, 0.0)
            centered.append(d)
            self.first[view] += d.sum((-2, -1))
            kept = s if hidden is None else s.masked_fill(hidden, torch.inf)
            self.low[view] = torch.minimum(self.low[view], kept.amin((-2, -1)))
            kept = s if hidden is None else s.masked_fill(hidden, -torch.inf)
            self.high[view] = torch.maximum(self.high[view], kept.amax((-2, -1)))
            for index, t in enumerate(self.request.exponents):
                part = s * (t / self.factor)
                if hidden is not None:
                    part.masked_fill_(hidden, -torch.inf)
                own = part.flatten(-2).logsumexp(-1).double()
                self.mgf[view, ..., index] = torch.logaddexp(self.mgf[view, ..., index], own)
            for index, level in enumerate(self.request.levels):
                self.over[view, ..., index] += count_above(kept, level * self.factor, torch.empty_like(s)).sum(-1)
        if len(tiles) == 2:
            self.cross += (centered[0] * centered[1]).sum((-2, -1))
        for view, d in enumerate(centered):
            self.second[view] += d.square_().sum((-2, -1))


class MomentTotals:
    """Sums of all blocks, (views, B, H, ...), about a pilot mean so that the variance loses no digits.

    ``factor`` is what the scores of the tiles are multiplied by beside <q, k>; it is taken out at the end.
    """

    def __init__(
        self, views: list[tuple[torch.Tensor, torch.Tensor]], request: Request, factor: float, normalize: bool
    ):
        self.factor = factor
        self.shift = torch.stack([_pilot(q, k, request, normalize) for q, k in views]) * factor
        self.count = torch.zeros(self.shift.shape[1:], dtype=torch.int64, device=self.shift.device)
        self.first = torch.zeros_like(self.shift)
        self.second = torch.zeros_like(self.shift)
        self.low = torch.full_like(self.shift, torch.inf)
        self.high = torch.full_like(self.shift, -torch.inf)
        self.cross = torch.zeros_like(self.shift[0])
        self.mgf = self.shift.new_full((*self.shift.shape, len(request.exponents)), -torch.inf)
        self.over = self.count.new_zeros((*self.shift.shape, len(request.levels)))

    def join(self, block: Block, part: Moments) -> None:
        at = (block.b, block.heads)
        self.count[at] += part.count.flatten()
        self.cross[at] += part.cross.flatten()
        every = (slice(None), *at)
        self.first[every] += part.first.flatten(1, 2)
        self.second[every] += part.second.flatten(1, 2)
        self.low[every] = torch.minimum(self.low[every], part.low.flatten(1, 2))
        self.high[every] = torch.maximum(self.high[every], part.high.flatten(1, 2))
        self.mgf[every] = torch.logaddexp(self.mgf[every], part.mgf.flatten(1, 2))
        self.over[every] += part.over.flatten(1, 2)

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


def _pilot(q: torch.Tensor, k: torch.Tensor, request: Request, normalize: bool) -> torch.Tensor:
    """Product of the mean query and the mean key, (B, H): near the mean score, and cheap."""
    row0, row1, key0, key1, _ = request.see.bounds
    means = []
    for x, first, stop in ((q, row0, row1), (k, key0, key1)):
        rows = prepared(stored(x, first, stop), normalize)
        means.append(rows.sum(2, dtype=torch.float64) / (stop - first).clamp_min(1)[:, None, None])
    return (means[0] * means[1].repeat_interleave(q.shape[1] // k.shape[1], 1)).sum(-1)
