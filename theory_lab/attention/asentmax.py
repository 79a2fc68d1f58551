"""Adaptive-scalable entmax: alpha-entmax with a learned temperature.

References
----------
"Long-Context Generalization with Sparse Attention", arXiv 2506.16640, and its authors' code
(deep-spin/asentmax), which multiplies the logits by delta + beta (log n)^gamma with beta and gamma learned a
head, or predicted from the hidden state by softplus and tanh. The code takes log(i + 2) for the 0-based
position i, that is log(n + 1), so that the first row has neither log 0 nor 0^negative.

A larger theta flattens z / theta and gives more support: the summary's direction is the reverse of the formula.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from theory_lab.attention.alpha_entmax import Entmax
from theory_lab.attention.base import Scope
from theory_lab.attention.checks import check_number


class ASEntmaxTheta(Entmax):
    """alpha-entmax of z / theta, theta > 0 learned, one value or one a head.

    Parameters
    ----------
    theta : float, list or Tensor
        The temperature; a learnable one is stored as its logarithm.
    alpha : float, list or Tensor
        At least 1, fixed.
    learnable : bool
        Whether theta is a parameter.
    learn_alpha : bool
        Whether alpha is one too, one value or one a head. It starts between 1 and 2 and stays there: what is stored is
        logit(alpha - 1).
    """

    def __init__(
        self, theta: Any = 1.0, *, alpha: Any = 1.5, learnable: bool = True, learn_alpha: bool = False
    ) -> None:
        super().__init__(alpha, learnable=False)
        if learn_alpha:
            del self.alpha_
            self.fixed_alpha = None
            self.declare("alpha", alpha, 1.0, 2.0, learnable=True, transform="logit")
        self.declare("theta", theta, 0.0, open_low=True, learnable=learnable, transform="log")

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        return super().row_weights((scores[0] / self.value("theta", scores[0]),), scope)

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        return cls(theta=torch.linspace(0.6, 1.4, heads).tolist())


class ASEntmax(Entmax):
    """alpha-entmax of z * (delta + softplus(w_beta.x) (log(n + offset))^tanh(w_gamma.x)), a head and query.

    Parameters
    ----------
    heads, hidden_dim : int
        H and C of the projections w_beta and w_gamma, (H, C) each; they start at 0, where the scale is
        delta + log 2 for every n.
    alpha : float, list or Tensor
        At least 1, fixed.
    delta : float
        Not learned.
    offset : int
        1 as in the authors' code, or 0 for log n as printed; then a row that sees one key uses delta alone.
    """

    def __init__(
        self,
        heads: int,
        hidden_dim: int,
        *,
        alpha: Any = 1.5,
        delta: float = 1.0,
        offset: int = 1,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(alpha, learnable=False)
        check_number("heads", heads, 1)
        check_number("hidden_dim", hidden_dim, 1)
        self.delta = check_number("delta", delta, 0.0)
        self.offset = int(check_number("offset", offset, 0))
        self.w_beta = nn.Parameter(torch.zeros(heads, hidden_dim, dtype=dtype))
        self.w_gamma = nn.Parameter(torch.zeros(heads, hidden_dim, dtype=dtype))

    def logit_scale(self, scope: Scope, like: Tensor) -> Tensor:
        """The factor of every row, (B, H, T, 1)."""
        x = scope.need_x(self.w_beta.shape[1])
        rate = torch.einsum("btc,hc->bht", x, self.w_beta.to(like))[..., None]
        power = torch.tanh(torch.einsum("btc,hc->bht", x, self.w_gamma.to(like)))[..., None]
        length = torch.log(scope.n + self.offset)
        grown = torch.exp(power * torch.log(torch.where(length > 0, length, torch.ones_like(length))))
        grown = torch.where(length > 0, grown, torch.zeros_like(grown))
        return self.delta + torch.logaddexp(rate, torch.zeros_like(rate)) * grown

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        return super().row_weights((scores[0] * self.logit_scale(scope, scores[0]),), scope)

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        made = cls(heads, hidden_dim)
        nn.init.normal_(made.w_beta, generator=generator)
        nn.init.normal_(made.w_gamma, generator=generator)
        return made
