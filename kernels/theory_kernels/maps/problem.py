"""What a map shows, in plain numbers: the operands of one head, what each row sees, and the weight of a score.

Shape legend: B batch, H query heads, G key heads, T query length, S key length, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

WEIGHTS = ("softmax", "entmax", "tra", "tda", "eta")


@dataclass(frozen=True)
class Sight:
    """Which keys the rows of one sequence see: row i stands at key position ``p = i + offset``.

    A key j is seen if ``start <= j < stop``, with ``causal`` also ``j <= p``, and with ``window`` also
    ``j > p - window`` (without ``causal``, ``|p - j| <= window``). Rows outside ``first <= i < last`` are padding and
    see nothing. ``mask`` (T, S) hides further pairs.
    """

    start: int
    stop: int
    offset: int
    causal: bool
    window: int | None
    first: int
    last: int
    mask: torch.Tensor | None

    def limits(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First key seen and one past the last, of each row in ``rows`` (int64), without ``mask``."""
        p = rows + self.offset
        low = torch.full_like(rows, self.start)
        high = torch.full_like(rows, self.stop)
        if self.causal:
            high = torch.minimum(high, p + 1)
        if self.window is not None and self.causal:
            low = torch.maximum(low, p - self.window + 1)
        elif self.window is not None:
            low, high = torch.maximum(low, p - self.window), torch.minimum(high, p + self.window + 1)
        high = torch.where((rows >= self.first) & (rows < self.last), high, low)
        return low, torch.maximum(low, high)

    def count(self, rows: torch.Tensor) -> torch.Tensor:
        """Number of keys each row sees, int64."""
        low, high = self.limits(rows)
        if self.mask is None:
            return high - low
        return self.visible(rows, torch.arange(self.mask.shape[1], device=rows.device)).sum(-1)

    def visible(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Pairs that may interact, bool (rows, keys)."""
        low, high = self.limits(rows)
        seen = (keys >= low[:, None]) & (keys < high[:, None])
        return seen if self.mask is None else seen & self.mask[rows[:, None], keys]


@dataclass(frozen=True)
class Law:
    """The map from a raw score <q, k> and its row's normalizer to a weight.

    ``normalizer`` means: softmax and eta, the logarithm of the row's partition function; entmax, the threshold tau in
    ``[(alpha - 1) z - tau]_+^(1 / (alpha - 1))``; tra and tda, ``tau_i`` in ``max(s - tau_i, 0)^p``.
    """

    weights: str
    scale: float
    softcap: float | None
    alpha: float
    kappa: float
    power: float
    sharpness: float
    reading: str

    @property
    def monotone(self) -> bool:
        """Whether a larger score never has a smaller weight, so that only the largest score of a pixel matters."""
        return self.weights in ("softmax", "entmax", "tra")

    def logits(self, score: torch.Tensor, tau: torch.Tensor | None) -> torch.Tensor:
        """What exponentiates: scaled, capped, and suppressed by eta's mask; ``tau`` (rows, 1), eta alone has one."""
        z = score * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        if tau is None:
            return z
        slope = self.sharpness * (z - tau)
        if self.reading == "logit":
            return torch.sigmoid(slope) * z
        return z + torch.nn.functional.logsigmoid(slope)

    def apply(self, score: torch.Tensor, normalizer: torch.Tensor, tau: torch.Tensor | None) -> torch.Tensor:
        """Weights of raw scores (rows, ...); ``normalizer`` and ``tau`` broadcast against them."""
        if self.weights in ("tra", "tda"):
            return _rectified(score - normalizer, self.power)
        z = self.logits(score, tau)
        if self.weights == "entmax" and self.alpha > 1.0:
            return _rectified((self.alpha - 1.0) * z - normalizer, 1.0 / (self.alpha - 1.0))
        return z.sub_(normalizer).exp_()


def _rectified(x: torch.Tensor, power: float) -> torch.Tensor:
    """max(x, 0)^power, in x's memory."""
    x.relu_()
    if power == 1.0:
        return x
    return x.square_() if power == 2.0 else x.pow_(power)


@dataclass(frozen=True)
class Head:
    """One head of one sequence: operands (T, D) and (S, D) of each view, with everything its weights need."""

    views: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    sight: Sight
    law: Law
    beta: float
    lam: float
    sink: float | None
    eta_tau: torch.Tensor | None

    def threshold(self, rows: torch.Tensor) -> torch.Tensor:
        """``tau_i = beta sqrt(2 max(0, log(n_i / kappa)) / d)`` of tra and tda (arXiv 2601.12145, Theorem 4.3)."""
        n = self.sight.count(rows).double().clamp_min(1.0)
        tau = self.beta * (2.0 * (n / self.law.kappa).log().clamp_min(0.0) / self.views[0][0].shape[1]).sqrt()
        return tau.to(self.views[0][0].dtype)

    def eta_threshold(self, rows: torch.Tensor) -> torch.Tensor | None:
        """eta's threshold of the rows, (rows, 1)."""
        return None if self.eta_tau is None else self.eta_tau[rows][:, None]


def with_sink(partition: torch.Tensor, sink: float | None) -> torch.Tensor:
    """The logarithm of the partition function with a learned sink logit in it."""
    if sink is None or sink == -math.inf:
        return partition
    return torch.logaddexp(partition, torch.full_like(partition, sink))
