"""Threshold rectified attention (TRA) and threshold differential attention (TDA).

References
----------
"Threshold Differential Attention for Sink-Free, Ultra-Sparse, and Non-Dispersive Language Modeling",
arXiv 2601.12145: the threshold tau_i, the weights of TRA and TDA, Theorems 4.3 and 4.6.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from theory_lab.attention.base import Mechanism, Scope, rms_norm
from theory_lab.attention.checks import check_number
from theory_lab.attention.rela import relu_power


def threshold(n: Tensor, beta: Tensor | float, kappa: float, head_dim: int) -> Tensor:
    """tau = beta sqrt(2 max(0, log(n / kappa)) / D), n = i + 1 the number of visible keys.

    The clamp matters: for n <= kappa the printed formula is the root of a negative number. With tau = 0 there
    the bound E[S_i] <= kappa of Theorem 4.3 holds because n <= kappa.
    """
    # sqrt has an infinite gradient at 0; n has none here, so only beta's must stay finite, and it does.
    return beta * torch.sqrt(2.0 * torch.log(n / kappa).clamp(min=0.0) / head_dim)


class TRA(Mechanism):
    """a_j = max(cos_j - tau, 0)^p, o = RMSNorm(sum_j a_j v_j); a row without survivors gives exactly 0.

    Parameters
    ----------
    beta : float, list or Tensor
        Scale of the threshold, > 0 at the start, one value or one a head, learnable.
    kappa : float
        > 0; the expected number of spurious survivors a row that the theory allows.
    p : float
        Real, at least 1; the paper uses 2.
    eps : float
        Of the output RMSNorm. The paper's summaries give none, and it decides much: with a tiny one the output
        jumps to unit RMS at the first survivor, however small its weight.
    learnable : bool
        Whether beta is a parameter.
    """

    cosine = True

    def __init__(
        self, *, beta: Any = 1.0, kappa: float = 1.0, p: float = 2.0, eps: float = 1e-2, learnable: bool = True
    ) -> None:
        super().__init__()
        self.declare("beta", beta, 0.0, open_low=True, learnable=learnable)
        self.kappa = check_number("kappa", kappa, 0.0, open_low=True)
        self.p = check_number("p", p, 1.0)
        self.eps = check_number("eps", eps, 0.0)

    def thresholds(self, scope: Scope, like: Tensor) -> Tensor:
        """tau of every row, broadcastable to (..., T, 1)."""
        return threshold(scope.n, self.value("beta", like), self.kappa, scope.need_head_dim())

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        over = scores[0] - self.thresholds(scope, scores[0])
        return relu_power(over.masked_fill(~scope.visible, 0.0), self.p)

    def aggregate(self, weights: Tensor, v: Tensor, scope: Scope | None = None) -> Tensor:
        return rms_norm(weights @ v, self.eps)

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        return cls(beta=torch.linspace(0.3, 0.6, heads).tolist())


class TDA(TRA):
    """a_j = max(cos1_j - tau, 0)^p - lambda max(cos2_j - tau, 0)^p, with the threshold and norm of TRA.

    Parameters
    ----------
    lam : float, list or Tensor
        lambda in [0, 1), one value or one a head. A learnable one is stored as its logit and cannot leave
        (0, 1); the authors' code clamps instead. A tensor is used as it is.
    beta, kappa, p, eps, learnable
        As in :class:`TRA`; both views share the threshold.
    """

    views = 2

    def __init__(
        self,
        *,
        beta: Any = 1.0,
        lam: Any = 0.5,
        kappa: float = 1.0,
        p: float = 2.0,
        eps: float = 1e-2,
        learnable: bool = True,
    ) -> None:
        super().__init__(beta=beta, kappa=kappa, p=p, eps=eps, learnable=learnable)
        self.declare("lam", lam, 0.0, 1.0, learnable=learnable, transform="logit")

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        excite, inhibit = self.both_views(scores, scope)
        return excite - self.value("lam", excite) * inhibit

    def both_views(self, scores: tuple[Tensor, ...], scope: Scope) -> tuple[Tensor, Tensor]:
        """The rectified maps of the two views before they are subtracted."""
        first, second = (super(TDA, self).row_weights((s,), scope) for s in scores)
        return first, second

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        return cls(beta=torch.linspace(0.3, 0.6, heads).tolist(), lam=torch.linspace(0.3, 0.7, heads).tolist())
