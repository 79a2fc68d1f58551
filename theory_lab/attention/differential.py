"""Differential attention: the difference of two maps, and its extension to a trained softmax.

References
----------
Ye et al., "Differential Transformer", arXiv 2410.05258, eqs. 1 to 3: softmax(z1) - lambda softmax(z2), a norm a
head, and a factor (1 - lambda_init).
Differential ReLA: the same difference of rectified maps, a baseline of arXiv 2601.12145.
Kong, Jang and Kwak, "Understanding Differential Transformer Unchains Pretrained Self-Attentions",
arXiv 2505.16333 (DEX): O' = O - lambda O W_D on the output of a softmax, eq. 4 for the annealed lambda.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from theory_lab.attention.base import Mechanism, Scope, rms_norm, safe_softmax
from theory_lab.attention.checks import check_number
from theory_lab.attention.rela import relu_power
from theory_lab.errors import InputError


def lambda_init(layer: int) -> float:
    """0.8 - 0.6 exp(-0.3 (layer - 1)), layers counted from 1 (Differential Transformer, section 2.1)."""
    check_number("layer", layer, 1)
    return 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))


def reparametrized_lambda(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, start: float) -> Tensor:
    """exp(q1.k1) - exp(q2.k2) + start, of four learnable vectors (..., D) (Differential Transformer, eq. 2)."""
    return torch.exp((q1 * k1).sum(-1)) - torch.exp((q2 * k2).sum(-1)) + start


def dex_lambda(step: int, total: int, start: float, learned: Tensor) -> Tensor:
    """(1 - a) a start + a learned with a = min(1, step / total) (DEX, eq. 4): 0 at step 0, then all learned."""
    check_number("step", step, 0)
    check_number("total", total, 1)
    a = min(1.0, step / total)
    return (1.0 - a) * a * start + a * learned


class _Difference(Mechanism):
    """Two views, weights a1 - lambda a2 with 0 <= lambda < 1, and a root-mean-square norm of the output."""

    views = 2

    def __init__(self, lam: Any = 0.5, *, eps: float = 1e-8, learnable: bool = True, scale: float = 1.0) -> None:
        super().__init__()
        self.declare("lam", lam, 0.0, 1.0, learnable=learnable, transform="logit")
        self.eps = check_number("eps", eps, 0.0)
        self.scale = scale

    def aggregate(self, weights: Tensor, v: Tensor, scope: Scope | None = None) -> Tensor:
        return rms_norm(weights @ v, self.eps) * self.scale

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        return cls(lam=torch.linspace(0.3, 0.7, heads).tolist())


class DiffSoftmax(_Difference):
    """softmax(z1) - lambda softmax(z2); its rows sum to 1 - lambda.

    Parameters
    ----------
    lam : float, list or Tensor
        lambda in [0, 1), one value or one a head. A learnable one is stored as its logit; pass the tensor of
        :func:`reparametrized_lambda` for the paper's own parametrization.
    start : float
        lambda_init; the output is multiplied by 1 - lambda_init.
    eps : float
        Of the output norm (the authors': 1e-5).
    """

    def __init__(self, lam: Any = 0.8, *, start: float = 0.8, eps: float = 1e-5, learnable: bool = True) -> None:
        start = check_number("start", start, 0.0, 1.0)
        super().__init__(lam, eps=eps, learnable=learnable, scale=1.0 - start)

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        first, second = (safe_softmax(z, scope.visible) for z in scores)
        return first - self.value("lam", first) * second


class DiffReLA(_Difference):
    """max(z1, 0)^p - lambda max(z2, 0)^p, with the output norm of ReLA.

    Parameters
    ----------
    lam : float, list or Tensor
        lambda in [0, 1), one value or one a head.
    p : float
        Real, at least 1.
    eps : float
        Of the output norm.
    """

    def __init__(self, lam: Any = 0.5, *, p: float = 1.0, eps: float = 1e-8, learnable: bool = True) -> None:
        super().__init__(lam, eps=eps, learnable=learnable)
        self.p = check_number("p", p, 1.0)

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        first, second = (relu_power(z.masked_fill(~scope.visible, 0.0), self.p) for z in scores)
        return first - self.value("lam", first) * second


class DEX(Mechanism):
    """Softmax attention with a differential output: o' = o - lambda o W_D on the adapted heads.

    The weights returned are the softmax's: the subtraction acts on channels, the same for every key, so it
    cannot give one key a sign of its own.

    Parameters
    ----------
    value_dim : int
        V; W_D is V x V, shared by the heads of a layer, and starts at 0 (an identity).
    lam : float or Tensor
        lambda, for example the tensor that :func:`dex_lambda` returns.
    adapted : list of bool, optional
        Heads the adaptation applies to (the paper picks those of high entropy); all if not given.
    """

    def __init__(
        self,
        value_dim: int,
        lam: Any = 0.5,
        *,
        adapted: list[bool] | None = None,
        learnable: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        check_number("value_dim", value_dim, 1)
        self.declare("lam", lam, 0.0, 1.0, learnable=learnable, transform="logit")
        self.projection = nn.Parameter(torch.zeros(value_dim, value_dim, dtype=dtype))
        self.adapted = None if adapted is None else [bool(a) for a in adapted]

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        return safe_softmax(scores[0], scope.visible)

    def aggregate(self, weights: Tensor, v: Tensor, scope: Scope | None = None) -> Tensor:
        return self.adapt(weights @ v)

    def adapt(self, o: Tensor) -> Tensor:
        """o' of an output o (..., H, T, V)."""
        if o.shape[-1] != self.projection.shape[0]:
            raise InputError("v", f"{o.shape[-1]} channels", f"{self.projection.shape[0]}, the value_dim of DEX")
        change = self.value("lam", o) * (o @ self.projection.to(o))
        if self.adapted is not None:
            if o.ndim < 3 or o.shape[-3] != len(self.adapted):
                raise InputError("adapted", f"{len(self.adapted)} heads", f"one flag for each head of {o.shape}")
            keep = torch.tensor(self.adapted, dtype=o.dtype, device=o.device)
            change = change * keep[:, None, None]
        return o - change

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        made = cls(value_dim, lam=torch.linspace(0.3, 0.7, heads).tolist())
        nn.init.normal_(made.projection, generator=generator)
        return made
