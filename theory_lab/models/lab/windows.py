"""Attention of long texts without gradients: rows in blocks, and of heads with a bias only the keys that count.

NAPE lowers the score of a key at distance r by slope r. Beyond some distance its weight is exactly 0 (entmax: its
score lies too far below the row's largest; ReLA: it is negative) or, of all such keys together, below the rounding of
the row's sum (softmax). That distance follows from the norms of queries and keys, so a head with a bias costs T times
its window and not T squared. Heads without a bias take the mechanism's fast form.

Shapes: B batch, H query heads, G key heads, T queries, S keys, D head dimension, C width, V values.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from theory_lab.attention.alpha_entmax import Entmax, Sparsemax
from theory_lab.attention.asentmax import ASEntmax, ASEntmaxTheta
from theory_lab.attention.base import Mechanism, Scope
from theory_lab.attention.differential import DEX, DiffReLA, DiffSoftmax
from theory_lab.attention.eta import ETAWeight
from theory_lab.attention.rela import ReLA
from theory_lab.attention.softmax import AdaptiveTemperature, GatedSoftmax, Softmax, SSMax
from theory_lab.models.lab.mechanisms import alpha_of, some_heads, weigh

Pairs = tuple[tuple[Tensor, Tensor], ...]

#: Weights in memory at a time, on a CPU and on a GPU; a mechanism's arithmetic holds a few times as many numbers.
_ENTRIES_CPU, _ENTRIES_GPU = 1 << 21, 1 << 26
#: Windows are multiples of so many keys, so that heads that are nearly alike are computed together.
_STEP = 32
#: Relative and absolute allowance for the rounding of norms and scores in float32.
_SLACK = 2.0**-8


def is_local(mechanism: Mechanism) -> bool:
    """Whether a row depends on its own scores alone, so that rows can be computed in blocks."""
    return not (mechanism.uses_positions or mechanism.causal_only)


def windows(mechanism: Mechanism, pairs: Pairs, slopes: Tensor, x: Tensor | None = None) -> list[int] | None:
    """Keys, counted from its own, beyond which no row of a head has a weight that counts; at most S.

    Parameters
    ----------
    mechanism : Mechanism
        With the parameters of these heads.
    pairs : tuple of (Tensor, Tensor)
        Queries (B, H, T, D) and keys (B, G, S, D) of each view; queries are the last of the keys, all of them valid.
    slopes : Tensor
        (H,), above 0.
    x : Tensor, optional
        (B, T, C) hidden states.

    Returns
    -------
    list of int or None
        One a head; None for a mechanism of which this is not known. Waits for the device, once.

    Notes
    -----
    With a_i = |q_i| max_j |k_j| / sqrt(D), no score before the bias is above a_i, and the row's largest is at least
    that of its own key, z_ii. A key at distance r therefore lies a gap of at least slope r - (a_i - z_ii) below the
    largest, and its weight

    - of entmax, with logits multiplied by c, is 0 where the gap is at least 1 / ((alpha - 1) c);
    - of softmax is at most exp(-c gap), so that those of n keys together are below an eighth of a unit of rounding
      where c gap = y = log n + log(16 / eps). The entropy that sets the adaptive temperature sums terms of up to c gap
      exp(-c gap), for which c gap = y + 2 log y is enough;
    - of ReLA is 0 where slope r is at least a_i.
    """
    (q, k), *_ = pairs
    wide = torch.promote_types(q.dtype, torch.float32)
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    seen = torch.arange(keys - queries + 1, keys + 1, device=q.device, dtype=wide)[:, None]
    nothing = torch.empty((*q.shape[:3], 0), dtype=torch.bool, device=q.device)
    side = None if x is None else x.to(wide)
    scope = Scope(nothing, seen.expand(*q.shape[:3], 1), True, q.shape[-1], side, q.to(wide))
    farthest = None
    for left, right in pairs:
        left, right = left.to(wide), right.to(wide)
        longest = torch.linalg.vector_norm(right, dim=-1).amax(-1).repeat_interleave(group, 1)[..., None, None]
        scale = left.shape[-1] ** -0.5
        most = torch.linalg.vector_norm(left, dim=-1, keepdim=True) * longest * scale
        own = (left * right[:, :, keys - queries :].repeat_interleave(group, 1)).sum(-1, keepdim=True) * scale
        drop = _drop(mechanism, most, own, scope)
        if drop is None:
            return None
        distance = (drop + _SLACK * (drop.abs() + most)) / slopes.to(wide)[:, None, None] + 1.0
        # What is no number, as in a model that has diverged, sees everything.
        needed = torch.minimum(distance.nan_to_num(nan=math.inf), seen - 1.0).amax((0, 2, 3))
        farthest = needed if farthest is None else torch.maximum(farthest, needed)
    assert farthest is not None
    return [min(keys, _STEP * math.ceil((number + 1) / _STEP)) for number in farthest.tolist()]


def _drop(mechanism: Mechanism, most: Tensor, own: Tensor, scope: Scope) -> Tensor | None:
    """How much a bias must lower a score for its weight not to count, (B, H, T, 1)."""
    kind = type(mechanism)
    if isinstance(mechanism, (ReLA, DiffReLA)):
        return most
    if kind in (Entmax, Sparsemax, ASEntmax, ASEntmaxTheta):
        gap = 1.0 / (alpha_of(mechanism, most) - 1.0) * torch.ones_like(most)
    elif kind in (Softmax, GatedSoftmax, SSMax, AdaptiveTemperature, DiffSoftmax, DEX, ETAWeight):
        # ETA's weight reading is a softmax of s + log sigmoid(a (s - tau)), which falls at least as fast as s.
        gap = torch.log(scope.n) + math.log(16.0 / torch.finfo(most.dtype).eps)
        if kind is AdaptiveTemperature:
            gap = gap + 2.0 * gap.log()
    else:
        return None
    factor = torch.ones_like(most)
    if isinstance(mechanism, Softmax):
        factor = factor / mechanism.value("temperature", most)
    elif isinstance(mechanism, SSMax):
        factor = mechanism.value("s", most) * torch.log(scope.n)
    elif isinstance(mechanism, ASEntmaxTheta):
        factor = factor / mechanism.value("theta", most)
    elif isinstance(mechanism, ASEntmax):
        factor = mechanism.logit_scale(scope, most)
    # Logits that are turned around make far keys the large ones.
    return most - own + torch.where(factor > 0, gap / factor.clamp_min(torch.finfo(gap.dtype).tiny), math.inf)


def by_windows(
    mechanism: Mechanism,
    pairs: Pairs,
    v: Tensor,
    slopes: Tensor,
    first: int,
    x: Tensor | None = None,
) -> Tensor | None:
    """The output of the heads with a bias, each over its own window.

    Parameters
    ----------
    mechanism : Mechanism
        Of all heads.
    pairs : tuple of (Tensor, Tensor)
        Queries (B, H, T, D) and keys (B, G, S, D) of each view, of all heads.
    v : Tensor
        (B, G, S, V).
    slopes : Tensor
        (H - first,) of the heads with a bias.
    first : int
        The first of them.
    x : Tensor, optional
        (B, T, C) hidden states.

    Returns
    -------
    Tensor or None
        (B, H - first, T, V) in the dtype of v; None where no window is known.
    """
    last = pairs[0][0].shape[1]
    biased = some_heads(mechanism, slice(first, last))
    if biased is None:
        return None
    reach = windows(biased, _pairs(pairs, slice(first, last)), slopes, x)
    if reach is None:
        return None
    edges = [i for i in range(len(reach)) if i == 0 or reach[i] != reach[i - 1]] + [len(reach)]
    made = []
    for start, stop in pairwise(edges):
        heads = slice(first + start, first + stop)
        part = some_heads(mechanism, heads)
        assert part is not None
        near, value = _pairs(pairs, heads), key_heads(v, heads, last)
        made.append(in_blocks(part, near, value, x=x, slopes=slopes[start:stop], window=reach[start]))
    return torch.cat(made, 1)


def _pairs(pairs: Pairs, heads: slice) -> Pairs:
    return tuple((q[:, heads], key_heads(k, heads, q.shape[1])) for q, k in pairs)


def key_heads(k: Tensor, heads: slice, total: int) -> Tensor:
    """The keys or values (B, G, S, D) that some of `total` query heads meet: as many heads as there, or a divisor."""
    group = total // k.shape[1]
    first, last = heads.start // group, (heads.stop - 1) // group
    part = k[:, first : last + 1]
    if first == last or (heads.start % group == 0 and heads.stop % group == 0):
        return part
    return part.repeat_interleave(group, 1)[:, heads.start - first * group : heads.stop - first * group]


@torch.no_grad()
def in_blocks(
    mechanism: Mechanism,
    pairs: Pairs,
    v: Tensor,
    *,
    x: Tensor | None = None,
    slopes: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """The output by the mechanism's definition, a bounded number of weights at a time.

    Parameters
    ----------
    mechanism : Mechanism
        One whose rows depend on their own scores alone.
    pairs : tuple of (Tensor, Tensor)
        Queries (B, H, T, D) and keys (B, G, S, D) of each view; queries are the last of the keys.
    v : Tensor
        (B, G, S, V).
    x : Tensor, optional
        (B, T, C) hidden states.
    slopes : Tensor, optional
        (H,), of a bias by distance.
    window : int, optional
        Keys that a row is compared with, its own among them; a temperature or a threshold counts all before it.

    Returns
    -------
    Tensor
        (B, H, T, V) in the dtype of v.
    """
    (q, k), *_ = pairs
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    window = keys if window is None else window
    rows, together = _sizes(batch * heads, queries, keys, window, q.is_cuda)
    output = v.new_empty(batch, heads, queries, v.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        for start in range(0, queries, rows * together):
            stop = min(start + rows * together, queries)
            cut = _Cut(start, stop, min(rows, stop - start), keys - queries, window)
            visible, n, distance = cut.sight(batch, heads, q.device)
            side = None if x is None else cut.queries(x[:, None])[:, 0].to(wide)
            scope = Scope(visible, n.to(wide), True, q.shape[-1], side, cut.queries(q).to(wide))
            bias = None if slopes is None else -slopes.to(wide)[:, None, None] * distance.clamp_min(0)
            cuts = tuple((cut.queries(left).to(wide), cut.keys(right).to(wide)) for left, right in pairs)
            weights = weigh(mechanism, cuts, scope, bias)
            value = cut.keys(v).to(wide).repeat_interleave(heads // v.shape[1], 1)
            made = mechanism.aggregate(weights, value, scope).to(v.dtype)
            output[:, :, start:stop] = cut.joined(made, batch)
    return output


def _sizes(maps: int, queries: int, keys: int, window: int, cuda: bool) -> tuple[int, int]:
    """Rows a block, and blocks at a time."""
    entries = max(1, (_ENTRIES_GPU if cuda else _ENTRIES_CPU) // maps)
    if 2 * window >= keys:  # nothing is gained by blocks of one shape
        return max(1, min(queries, entries // keys)), 1
    # As many rows as keys in the window: half of what is computed is seen.
    rows = max(1, min(queries, max(window, _STEP), entries // (2 * window)))
    return rows, max(1, entries // (rows * (rows + window - 1)))


class _Cut:
    """Rows `start` to `stop` of the queries in blocks of `rows`, and the keys that each block meets.

    One block is a slice. Several lie on the axis of the batch, (B blocks, H, rows, D): of one shape, so that the last
    is filled up with rows that nobody reads, and the first begins before the first key.
    """

    def __init__(self, start: int, stop: int, rows: int, offset: int, window: int) -> None:
        self.start, self.stop, self.rows = start, stop, rows
        self.blocks = -(-(stop - start) // rows)
        self.low = offset + start - window + 1
        if self.blocks == 1:
            self.low = max(0, self.low)
        self.position = offset + start
        self.width = self.position - self.low + rows
        self.window = window

    def queries(self, x: Tensor) -> Tensor:
        """Of (B, H, T, D)."""
        part = x[:, :, self.start : self.stop]
        if self.blocks == 1:
            return part
        part = pad(part, (0, 0, 0, self.blocks * self.rows - part.shape[2]))
        return part.unflatten(2, (self.blocks, self.rows)).transpose(1, 2).flatten(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """Of (B, G, S, D)."""
        high = self.low + self.width + (self.blocks - 1) * self.rows
        part = x[:, :, max(0, self.low) : high]
        if self.blocks == 1:
            return part
        part = pad(part, (0, 0, max(0, -self.low), max(0, high - x.shape[2])))
        return part.unfold(2, self.width, self.rows).permute(0, 2, 1, 4, 3).flatten(0, 1)

    def joined(self, x: Tensor, batch: int) -> Tensor:
        """The rows of (B blocks, H, rows, V) again as (B, H, T, V)."""
        if self.blocks == 1:
            return x
        return x.unflatten(0, (batch, self.blocks)).transpose(1, 2).flatten(2, 3)[:, :, : self.stop - self.start]

    def sight(self, batch: int, heads: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Visibility (B blocks, H, rows, width), n (B blocks, H, rows, 1), distance of query and key (rows, width)."""
        block = self.rows * torch.arange(self.blocks, device=device)[:, None]
        row = torch.arange(self.rows, device=device)
        key = torch.arange(self.width, device=device)
        distance = self.position - self.low + row[:, None] - key
        seen = (distance >= 0) & (distance < self.window)
        seen = seen & (self.low + block + key >= 0)[:, None, :]
        count = (self.position + block + row + 1)[..., None]
        visible, n = (
            part.repeat(batch, 1, 1)[:, None].expand(batch * self.blocks, heads, self.rows, -1)
            for part in (seen, count)
        )
        return visible, n, distance
