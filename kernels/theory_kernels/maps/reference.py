"""Maps with every weight in memory: the definition of correct."""

from __future__ import annotations

import math

import torch

from .pixels import Pixels
from .problem import Head, with_sink
from .thresholds import entmax_threshold


def normalizers(head: Head, rows: torch.Tensor) -> torch.Tensor:
    """The normalizer of each row (see :class:`Law`), 0 for a row that sees nothing."""
    if head.law.weights in ("tra", "tda"):
        return head.threshold(rows)
    q, k = head.views[0]
    seen = head.sight.visible(rows, torch.arange(k.shape[0], device=k.device))
    z = head.law.logits(q[rows] @ k.T, head.eta_threshold(rows))
    z = z.masked_fill(~seen, -math.inf)
    if head.law.weights == "entmax" and head.law.alpha > 1.0:
        found = entmax_threshold(z * (head.law.alpha - 1.0), head.law.alpha)
    else:
        found = with_sink(z.logsumexp(-1), head.sink)
    return found.masked_fill(~seen.any(-1), 0.0)


def weights(head: Head, rows: torch.Tensor, normalizer: torch.Tensor) -> torch.Tensor:
    """All weights of the rows, (rows, S); 0 where nothing is seen."""
    tau, total = head.eta_threshold(rows), None
    for (q, k), factor in zip(head.views, (1.0, -head.lam), strict=False):
        seen = head.sight.visible(rows, torch.arange(k.shape[0], device=k.device))
        w = head.law.apply(q[rows] @ k.T, normalizer[:, None], tau).masked_fill(~seen, 0.0)
        total = w if total is None else total + factor * w
    assert total is not None
    return total


def image(head: Head, rows: Pixels, columns: Pixels, reduce: str, normalizer: torch.Tensor) -> torch.Tensor:
    """(R, C): each pixel's weights reduced; ``normalizer`` (R, members)."""
    members = rows.members.flatten()
    w = weights(head, members, normalizer.flatten()).unflatten(0, rows.members.shape)
    out = w.new_zeros(rows.members.shape[0], columns.members.shape[0])
    for r in range(out.shape[0]):
        for c in range(out.shape[1]):
            entries = w[r][rows.real[r]][:, int(columns.edges[c]) : int(columns.edges[c + 1])]
            if reduce == "max":
                high, low = entries.max(), entries.min()
                out[r, c] = high if high >= -low else low
            else:
                # Of sampled rows the sum is that of all the pixel's rows as if they were like the sampled ones.
                out[r, c] = entries.sum() * (int(rows.sizes[r]) / entries.shape[0])
    return out
