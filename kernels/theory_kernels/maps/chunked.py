"""Maps in plain torch, some rows and keys at a time: O(T) memory, any device.

Keys are gathered pixel by pixel, as (member, pixel, D): the scores of a block of rows are then (rows, member, pixel),
and reducing over the members runs along contiguous pixels. Where a larger score never has a smaller weight, only the
largest score of a row within a pixel is turned into a weight.
"""

from __future__ import annotations

import math

import torch

from .pixels import Pixels
from .problem import Head, with_sink
from .thresholds import entmax_threshold

# Scores held at once: what the caches of a CPU hold, or what fills a GPU.
_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}


def _budget(device: torch.device, keys: int) -> int:
    # At least 32 rows of scores, or gathering the keys would cost as much as the products.
    return max(_SCORES.get(device.type, 1 << 20), 32 * keys)


def normalizers(head: Head, rows: torch.Tensor) -> torch.Tensor:
    """The normalizer of each row (see :class:`Law`), 0 for a row that sees nothing."""
    if head.law.weights in ("tra", "tda"):
        return head.threshold(rows)
    q, k = head.views[0]
    out = q.new_zeros(rows.shape[0])
    step = max(1, min(rows.shape[0], _budget(q.device, k.shape[0]) // max(1, k.shape[0])))
    for first in range(0, rows.shape[0], step):
        part = rows[first : first + step]
        low, high = head.sight.limits(part)
        begin, end = int(low.min()), int(high.max())
        if end <= begin:
            continue
        z = head.law.logits(q[part] @ k[begin:end].T, None if head.eta_tau is None else head.eta_tau[part][:, None])
        seen = _hide(z, head, part, begin, end, int(low.max()), int(high.min()))
        if head.law.weights == "entmax" and head.law.alpha > 1.0:
            found = entmax_threshold(z.mul_(head.law.alpha - 1.0), head.law.alpha)
        else:
            found = with_sink(z.logsumexp(-1), head.sink)
        out[first : first + step] = found.masked_fill(~seen, 0.0)
    return out


def _hide(z: torch.Tensor, head: Head, rows: torch.Tensor, begin: int, end: int, low: int, high: int) -> torch.Tensor:
    """Put -inf where z (rows, keys begin..end) shows what is not seen; keys low..high are seen by every row.

    Returns which rows see anything.
    """
    first, last = head.sight.limits(rows)
    if head.sight.mask is not None:
        seen = head.sight.visible(rows, torch.arange(begin, end, device=z.device))
        z.masked_fill_(~seen, -math.inf)
        return seen.any(-1)
    spans = ((begin, min(low, end)), (max(high, begin, low), end)) if low < high else ((begin, end),)
    for a, b in spans:
        if a < b:
            keys = torch.arange(a, b, device=z.device)
            hidden = (keys < first[:, None]) | (keys >= last[:, None])
            z[:, a - begin : b - begin].masked_fill_(hidden, -math.inf)
    return last > first


def image(head: Head, rows: Pixels, columns: Pixels, reduce: str, normalizer: torch.Tensor) -> torch.Tensor:
    """(R, C): each pixel's weights reduced; ``normalizer`` (R, members)."""
    device = normalizer.device
    # Sums of a pixel's many entries are kept in float64: a float32 one would lose digits to its own size.
    out = torch.zeros(
        rows.members.shape[0], columns.members.shape[0],
        dtype=torch.float64 if reduce == "sum" else normalizer.dtype, device=device,
    )  # fmt: skip
    keys = [k[columns.members.T] for _, k in head.views]
    width = columns.members.shape[1]
    budget = _budget(device, columns.members.numel())
    members = rows.members.shape[1]
    # Whole pixels where they fit, and otherwise a part of one.
    part = max(1, min(members, budget // max(1, columns.members.numel())))
    block = max(1, min(out.shape[0], budget // max(1, part * columns.members.numel())))
    for r in range(0, out.shape[0], block):
        index = rows.members[r : r + block]
        low, high = head.sight.limits(index)
        left = int(torch.searchsorted(columns.edges, low.min(), right=True)) - 1
        right = int(torch.searchsorted(columns.edges, high.max()))
        left, right = max(left, 0), min(right, out.shape[1])
        if left >= right:
            continue
        ready = [k[:, left:right].reshape(-1, k.shape[-1]) for k in keys]
        for a in range(0, members, part):
            _add(
                head, out[r : r + block, left:right], index[:, a : a + part], rows.real[r : r + block, a : a + part],
                normalizer[r : r + block, a : a + part], ready, columns, left, right, width, reduce,
            )  # fmt: skip
    if reduce == "sum":
        out *= (rows.sizes / rows.real.sum(1))[:, None]
    return out.to(normalizer.dtype)


def _add(
    head: Head,
    out: torch.Tensor,
    index: torch.Tensor,
    real: torch.Tensor,
    normalizer: torch.Tensor,
    keys: list[torch.Tensor],
    columns: Pixels,
    left: int,
    right: int,
    width: int,
    reduce: str,
) -> None:
    """Reduce the weights of the rows ``index`` (R, members) and of the pixel columns left..right into ``out``."""
    flat, norm = index.flatten(), normalizer.flatten()[:, None]
    scores = [(q[flat] @ k.T).unflatten(1, (width, right - left)) for (q, _), k in zip(head.views, keys, strict=True)]
    hidden = _hidden(head, flat, columns, left, right)
    if reduce == "max" and head.law.monotone:
        score = scores[0]
        for a, b, unseen in hidden:
            score[:, :, a:b].masked_fill_(unseen, -math.inf)
        best = score.amax(1)
        w = head.law.apply(best, norm, None).masked_fill_(best == -math.inf, 0.0)
        torch.maximum(out, w.unflatten(0, index.shape).amax(1), out=out)
        return
    tau = head.eta_threshold(flat)
    w = head.law.apply(scores[0], norm[:, None], None if tau is None else tau[:, None])
    if len(scores) == 2:
        w = w - head.lam * head.law.apply(scores[1], norm[:, None], None)
    for a, b, unseen in hidden:
        w[:, :, a:b].masked_fill_(unseen, 0.0)
    if reduce == "sum":
        # The last member of a shorter pixel repeats an entry.
        w[:, -1].masked_fill_(~columns.real[left:right, -1], 0.0)
        out += (w.sum(1).unflatten(0, index.shape) * real[:, :, None]).sum(1)
        return
    w = w.unflatten(0, index.shape)
    high, low = w.amax((1, 2)), w.amin((1, 2))
    high, low = torch.maximum(out, high), torch.minimum(out, low)
    out.copy_(torch.where(high >= -low, high, low))


def _hidden(
    head: Head, rows: torch.Tensor, columns: Pixels, left: int, right: int
) -> list[tuple[int, int, torch.Tensor]]:
    """Spans of the pixel columns left..right where some pair is not seen, with the mask (rows, width, span)."""
    low, high = head.sight.limits(rows)
    spans = [(left, right)]
    if head.sight.mask is None:
        # Pixel columns between these are seen whole by every row.
        whole = int(torch.searchsorted(columns.edges, low.max()))
        until = int(torch.searchsorted(columns.edges, high.min(), right=True)) - 1
        if whole < until:
            spans = [(left, max(left, min(whole, right))), (max(left, min(until, right)), right)]
    found = []
    for a, b in spans:
        if a >= b:
            continue
        keys = columns.members[a:b].T
        if head.sight.mask is not None:
            unseen = ~head.sight.visible(rows, keys.reshape(-1)).unflatten(1, keys.shape)
        else:
            unseen = (keys < low[:, None, None]) | (keys >= high[:, None, None])
        found.append((a - left, b - left, unseen))
    return found
