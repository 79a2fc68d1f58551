"""Length-scaled softplus attention.

References
----------
Gao, Spratling and Gionfrida, "Softplus Attention with Re-weighting Boosts Length Extrapolation in Large Language
Models", arXiv 2501.13428: cosine scores, Softplus(log d * log N * s), then l1 normalization of the row; N is the
number of keys the row sees. Its second stage (re-weighting, LSSAR) multiplies by N, subtracts an offset,
rectifies, raises to a power and normalizes again.
"""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor

from theory_lab.attention.base import Mechanism, Scope, safe_softmax
from theory_lab.attention.checks import check_number


def log_softplus(x: Tensor) -> Tensor:
    """log(log(1 + e^x)), without underflow: below -40 it equals x to the last bit of a float64."""
    low = x < -40.0
    safe = torch.where(low, torch.zeros_like(x), x)
    return torch.where(low, x, torch.log(torch.logaddexp(safe, torch.zeros_like(safe))))


class LSSA(Mechanism):
    """Softplus(log D * log n * cos) over its row sum; with `power`, the re-weighting stage (LSSAR) after it.

    The row is normalized in the log domain, so a row of very negative scores does not underflow to 0/0.

    Parameters
    ----------
    power : float, optional
        p >= 1 of the re-weighting ReLU(n * a - offset)^p; the paper uses 3 and 15. None leaves stage two out.
    warm_rows : int
        Rows that see at most this many keys have offset 0 instead of 1 (the paper: the first three rows).
    """

    cosine = True

    def __init__(self, *, power: float | None = None, warm_rows: int = 3) -> None:
        super().__init__()
        self.power = None if power is None else check_number("power", power, 1.0)
        self.warm_rows = int(check_number("warm_rows", warm_rows, 0))

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        scale = math.log(scope.need_head_dim()) * torch.log(scope.n)
        weights = safe_softmax(log_softplus(scale * scores[0]), scope.visible)
        if self.power is None:
            return weights
        offset = (scope.n > self.warm_rows).to(weights)
        sharp = torch.relu(weights * scope.n - offset).masked_fill(~scope.visible, 0.0)
        # Scaling by the row's maximum first keeps x^15 in range; it cancels in the normalization.
        top = sharp.amax(-1, keepdim=True)
        sharp = (sharp / torch.where(top > 0, top, torch.ones_like(top))).pow(self.power)
        total = sharp.sum(-1, keepdim=True)
        return sharp / torch.where(total > 0, total, torch.ones_like(total))

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        return cls()
