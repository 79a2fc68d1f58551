"""Selection for decoding: which cached keys a new query may read.

References
----------
Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453: the first few keys and
a window of recent ones.
Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
arXiv 2306.14048: of a full cache, evict the key with the smallest accumulated weight, sparing the recent ones.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from theory_lab.attention.base import Mechanism, Scope, safe_softmax
from theory_lab.attention.checks import check_number


class StreamingLLM(Mechanism):
    """Softmax over the first `sinks` positions and the last `window` ones, the query's own included.

    Parameters
    ----------
    sinks : int
        Keys kept for good (the paper uses 4).
    window : int
        Recent keys kept, at least 1.
    """

    causal_only = True
    uses_positions = True

    def __init__(self, *, sinks: int = 4, window: int = 1020) -> None:
        super().__init__()
        self.sinks = int(check_number("sinks", sinks, 0))
        self.window = int(check_number("window", window, 1))

    def selected(self, scope: Scope) -> Tensor:
        """Boolean, the keys in the cache of every row."""
        i, j = scope.positions()
        return scope.visible & ((j < self.sinks) | (i - j < self.window))

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        return safe_softmax(scores[0], self.selected(scope))

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        return cls(sinks=1, window=3)


class H2O(Mechanism):
    """Softmax over a cache of `heavy + recent` keys, each head with its own; the eviction order is greedy.

    Row t adds key t to the cache, attends, adds its weights to the keys' accumulated scores, and, if the cache is
    over its size, evicts the key with the smallest score among those outside the `recent` last ones (the older
    key on a tie). The choice of keys is not differentiated through. When there are more keys than queries, those
    before the first query fill the cache unscored, the latest ones kept.

    Parameters
    ----------
    heavy, recent : int
        Keys kept by score, and by recency (at least 1).
    """

    causal_only = True
    uses_positions = True

    def __init__(self, *, heavy: int = 512, recent: int = 512) -> None:
        super().__init__()
        self.heavy = int(check_number("heavy", heavy, 0))
        self.recent = int(check_number("recent", recent, 1))

    @torch.no_grad()
    def selected(self, scores: Tensor, scope: Scope) -> Tensor:
        """Boolean, the keys in the cache of every row; masked keys never enter it."""
        t, s = scores.shape[-2:]
        size = self.heavy + self.recent
        kept = torch.zeros_like(scores, dtype=torch.bool)
        positions = torch.arange(s, device=scores.device)
        # Keys before the first query fill the cache without having been scored: the latest ones stay.
        cache = scope.visible[..., 0, :] & (positions < s - t)
        cache = cache & (cache.flip(-1).cumsum(-1).flip(-1) <= size - 1)
        heat = torch.zeros((*scores.shape[:-2], s), dtype=scores.dtype, device=scores.device)
        for row in range(t):
            now = s - t + row
            seen = scope.visible[..., row, :]
            cache = cache | ((positions == now) & seen)
            kept[..., row, :] = cache & seen
            heat = heat + safe_softmax(scores[..., row, :], cache & seen)
            # The row saw a full cache; evicting now leaves room for the next key. A cache over its size holds an
            # old key: the recent ones are fewer.
            over = cache.sum(-1, keepdim=True) > size - 1
            old = cache & (positions <= now - self.recent + 1)
            coldest = heat.masked_fill(~old, float("inf")).argmin(-1, keepdim=True)
            cache = cache & ~(torch.zeros_like(cache).scatter_(-1, coldest, True) & over)
        return kept

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        return safe_softmax(scores[0], self.selected(scores[0].detach(), scope))

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        return cls(heavy=2, recent=2)
