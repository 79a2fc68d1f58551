"""Rectified linear attention.

References
----------
Zhang, Titov and Sennrich, "Sparse Attention with Linear Units", arXiv 2104.07012: ReLU(q.k / sqrt(D)) in place of
softmax, and a root-mean-square norm of the output (ReLA-i), with a gate sigma(w * o) in ReLA-g.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from theory_lab.attention.base import Mechanism, Scope, rms_norm
from theory_lab.attention.checks import check_number


def relu_power(x: Tensor, p: float) -> Tensor:
    """max(x, 0)^p for real p >= 1, with gradient exactly 0 where x <= 0 (also at p = 1)."""
    alive = x > 0
    safe = torch.where(alive, x, torch.ones_like(x))
    return torch.where(alive, safe.pow(p), torch.zeros_like(x))


class ReLA(Mechanism):
    """a_j = max(z_j, 0)^p, o = RMSNorm(sum_j a_j v_j), optionally times sigma(w * sum_j a_j v_j).

    Parameters
    ----------
    p : float
        Real, at least 1; the paper has 1.
    eps : float
        Of the output norm.
    gate_dim : int, optional
        V, to add the gate of ReLA-g (w starts at 0: a factor of one half).
    """

    def __init__(
        self, *, p: float = 1.0, eps: float = 1e-8, gate_dim: int | None = None, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.p = check_number("p", p, 1.0)
        self.eps = check_number("eps", eps, 0.0)
        self.gate: nn.Parameter | None = None
        if gate_dim is not None:
            check_number("gate_dim", gate_dim, 1)
            self.gate = nn.Parameter(torch.zeros(gate_dim, dtype=dtype))

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        return relu_power(scores[0].masked_fill(~scope.visible, 0.0), self.p)

    def aggregate(self, weights: Tensor, v: Tensor, scope: Scope | None = None) -> Tensor:
        o = weights @ v
        normed = rms_norm(o, self.eps)
        return normed if self.gate is None else normed * torch.sigmoid(self.gate.to(o) * o)

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        made = cls(gate_dim=value_dim)
        nn.init.normal_(made.gate, generator=generator)  # type: ignore[arg-type]
        return made
