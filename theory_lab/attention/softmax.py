"""Softmax and the variants that only rescale its logits or its output.

References
----------
Vaswani et al., "Attention Is All You Need", arXiv 1706.03762, eq. 1.
Qiu et al., "Gated Attention for Large Language Models", arXiv 2505.06708 (gate after attention, position G1).
Nakanishi, "Scalable-Softmax Is Superior for Attention", arXiv 2501.19399, eq. 2.
Velickovic et al., "softmax is not enough (for sharp out-of-distribution)", arXiv 2410.01104, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from theory_lab.attention.base import Mechanism, Scope, safe_softmax
from theory_lab.attention.checks import check_number
from theory_lab.errors import InputError


class Softmax(Mechanism):
    """p_j = exp(z_j / theta) / sum_k exp(z_k / theta), z = q.k / sqrt(D).

    Parameters
    ----------
    temperature : float, list or Tensor
        theta > 0, one value or one a head. Not learnable unless asked.
    learnable : bool
        Whether theta is a parameter (kept positive by storing its logarithm).
    """

    def __init__(self, temperature: Any = 1.0, *, learnable: bool = False) -> None:
        super().__init__()
        self.declare("temperature", temperature, 0.0, open_low=True, learnable=learnable, transform="log")

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        return safe_softmax(scores[0] / self.value("temperature", scores[0]), scope.visible)


class GatedSoftmax(Mechanism):
    """Softmax attention whose output is multiplied by a sigmoid gate of the hidden state.

    Headwise, o = sigma(w_h . x_t) * sum_j p_j v_j: one factor a row, so the weights returned are the effective
    ones, gate included, and their sum is the gate. Elementwise, every value channel has its own gate; the
    weights returned are then the softmax's and the gate acts in ``aggregate``.

    Parameters
    ----------
    heads, hidden_dim : int
        H and C.
    value_dim : int, optional
        V, for the elementwise gate.
    """

    def __init__(
        self, heads: int, hidden_dim: int, *, value_dim: int | None = None, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        width = 1 if value_dim is None else value_dim
        for field, size in (("heads", heads), ("hidden_dim", hidden_dim), ("value_dim", width)):
            check_number(field, size, 1)
        self.elementwise = value_dim is not None
        self.gate = nn.Parameter(torch.zeros(heads, width, hidden_dim, dtype=dtype))

    def _gate(self, scope: Scope, like: Tensor) -> Tensor:
        x = scope.need_x(self.gate.shape[-1])
        return torch.sigmoid(torch.einsum("btc,hvc->bhtv", x, self.gate.to(like)))

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        weights = safe_softmax(scores[0], scope.visible)
        return weights if self.elementwise else weights * self._gate(scope, weights)

    def aggregate(self, weights: Tensor, v: Tensor, scope: Scope | None = None) -> Tensor:
        if not self.elementwise:
            return weights @ v
        if scope is None:
            raise InputError("scope", "None", "the scope of the call: the elementwise gate reads hidden states")
        return (weights @ v) * self._gate(scope, weights)

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        made = cls(heads, hidden_dim)
        nn.init.normal_(made.gate, generator=generator)
        return made


class SSMax(Mechanism):
    """Scalable softmax: logits multiplied by s * log n, n the number of visible keys.

    Parameters
    ----------
    s : float, list or Tensor
        The learnable scale, one value or one a head; the paper's fitted values lie near 0.43. At s = 1/log(n)
        it is softmax.
    learnable : bool
        Whether s is a parameter.
    """

    def __init__(self, s: Any = 0.43, *, learnable: bool = True) -> None:
        super().__init__()
        self.declare("s", s, -float("inf"), learnable=learnable)

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        z = scores[0]
        return safe_softmax(z * (self.value("s", z) * torch.log(scope.n)), scope.visible)


class AdaptiveTemperature(Mechanism):
    """Softmax sharpened where its entropy H is high: logits times max(P(H), 1) if H > 0.5, else 1.

    P is a degree-4 polynomial fitted by the authors, coefficients from the highest power down. (One public
    re-implementation evaluates them from the lowest power up, which gives another baseline; pass them reversed
    to reproduce it.) The entropy is exact here: the authors add 1e-9 inside the logarithm.

    Parameters
    ----------
    coefficients : sequence of float
        From the highest power down.
    floor : float
        Entropy in nats below which nothing changes.
    """

    COEFFICIENTS: ClassVar[tuple[float, ...]] = (-0.037, 0.481, -2.3, 4.917, -1.791)

    def __init__(self, coefficients: Sequence[float] = COEFFICIENTS, *, floor: float = 0.5) -> None:
        super().__init__()
        if not coefficients:
            raise InputError("coefficients", "empty", "at least one number, from the highest power down")
        self.floor = check_number("floor", floor, 0.0)
        self.coefficients = tuple(check_number("coefficients", c, -float("inf")) for c in coefficients)

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        z = scores[0]
        p = safe_softmax(z, scope.visible)
        # xlogy has an infinite gradient at p = 0; the term itself is 0 there.
        safe = torch.where(p > 0, p, torch.ones_like(p))
        entropy = -(safe * torch.log(safe)).sum(-1, keepdim=True)
        return safe_softmax(z * self.sharpness(entropy), scope.visible)

    def sharpness(self, entropy: Tensor) -> Tensor:
        """What logits of rows of that entropy, in nats, are multiplied by."""
        polynomial = torch.zeros_like(entropy)
        for c in self.coefficients:
            polynomial = polynomial * entropy + c
        return torch.where(entropy > self.floor, polynomial.clamp(min=1.0), torch.ones_like(entropy))

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        return cls()
