"""Elastic threshold attention (ETA): a threshold predicted from the query, a soft mask, and hard pruning.

References
----------
Haris, Li and Karimzadehgan, "Elastic Threshold Attention: Learned Contextual Sparsity for Long-Context
Decoding", arXiv 2609.20888. Threshold tau = sigmoid(W q + b); mask m = sigmoid(alpha (s - tau)).

The description has two readings that differ. `ETALogit` multiplies the logits by the mask: a suppressed logit goes
to 0 and its weight to exp(0) / Z, the uniform floor of the text. `ETAWeight` is the printed formula,
m exp(s) / sum m exp(s), which has no floor.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from theory_lab.attention.base import Mechanism, Scope, safe_softmax
from theory_lab.attention.checks import check_number, check_tensor, same_kind, shape_of
from theory_lab.errors import InputError

PRUNINGS = ("drop", "renormalize", "exact")


class _ETA(Mechanism):
    """Threshold predictor and pruning shared by the two readings.

    Parameters
    ----------
    heads, head_dim : int, optional
        H and D of the predictor W (H, D), b (H,). Leave both out for a constant threshold.
    tau : float, list or Tensor, optional
        A constant threshold in (0, 1), one value or one a head (offline calibration), in place of the predictor.
    alpha : float, list or Tensor
        Slope of the mask, > 0; a learnable one is stored as its logarithm.
    prune : str, optional
        None keeps the soft mask. Otherwise keys with s < tau get exactly 0 and the survivors have: "drop" their
        soft weights (the row then sums to 1 minus the suppressed mass), "renormalize" those divided by their sum,
        or "exact" the softmax of their scores, as in the paper's worked example. No survivors: a row of zeros.
    learnable : bool
        Whether a constant tau (as its logit) and alpha are parameters; the predictor always is.
    """

    def __init__(
        self,
        heads: int | None = None,
        head_dim: int | None = None,
        *,
        tau: Any = None,
        alpha: Any = 10.0,
        prune: str | None = None,
        learnable: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        if (heads is None) != (head_dim is None) or (heads is None) == (tau is None):
            raise InputError(
                "tau",
                f"tau={tau!r}, heads={heads!r}, head_dim={head_dim!r}",
                "either heads and head_dim, for the predictor, or a constant tau",
            )
        if prune is not None and prune not in PRUNINGS:
            raise InputError("prune", repr(prune), "None, " + ", ".join(PRUNINGS))
        self.prune = prune
        self.declare("alpha", alpha, 0.0, open_low=True, learnable=learnable, transform="log")
        self.predictor = heads is not None and head_dim is not None
        if heads is not None and head_dim is not None:
            check_number("heads", heads, 1)
            check_number("head_dim", head_dim, 1)
            self.w = nn.Parameter(torch.zeros(heads, head_dim, dtype=dtype))
            self.b = nn.Parameter(torch.zeros(heads, dtype=dtype))
        else:
            self.declare("tau", tau, 0.0, 1.0, open_low=True, learnable=learnable, transform="logit")

    def thresholds(self, scope: Scope, like: Tensor) -> Tensor:
        """tau of every row, broadcastable to (..., T, 1), in (0, 1)."""
        if not self.predictor:
            return self.value("tau", like)
        if scope.q is None:
            raise InputError("q", "None", "the queries (B, H, T, D): the threshold is predicted from them")
        if scope.q.ndim != 4 or (scope.q.shape[1], scope.q.shape[3]) != tuple(self.w.shape):
            raise InputError(
                "q", shape_of(scope.q), f"(B, H, T, D) with the H and D of the predictor, {tuple(self.w.shape)}"
            )
        logit = torch.einsum("bhtd,hd->bht", scope.q, self.w.to(like)) + self.b.to(like)[:, None]
        return torch.sigmoid(logit)[..., None]

    def soft(self, s: Tensor, m: Tensor, log_m: Tensor, visible: Tensor) -> Tensor:
        raise NotImplementedError

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        s = scores[0]
        tau = self.thresholds(scope, s)
        slope = self.value("alpha", s) * (s - tau)
        weights = self.soft(s, torch.sigmoid(slope), nn.functional.logsigmoid(slope), scope.visible)
        if self.prune is None:
            return weights
        kept = scope.visible & (s >= tau)
        if self.prune == "exact":
            return safe_softmax(s, kept)
        weights = weights.masked_fill(~kept, 0.0)
        if self.prune == "drop":
            return weights
        total = weights.sum(-1, keepdim=True)
        return weights / torch.where(total > 0, total, torch.ones_like(total))

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        made = cls(heads, head_dim)
        nn.init.normal_(made.w, generator=generator)
        nn.init.normal_(made.b, generator=generator)
        return made


class ETALogit(_ETA):
    """softmax(m s): the reading with the uniform floor."""

    def soft(self, s: Tensor, m: Tensor, log_m: Tensor, visible: Tensor) -> Tensor:
        return safe_softmax(m * s, visible)


class ETAWeight(_ETA):
    """m exp(s) / sum m exp(s), the printed formula; computed as softmax(s + log m), which cannot underflow."""

    def soft(self, s: Tensor, m: Tensor, log_m: Tensor, visible: Tensor) -> Tensor:
        return safe_softmax(s + log_m, visible)


def block_screen(q: Tensor, k: Tensor, tau: Tensor, block: int, *, scale: float | None = None) -> Tensor:
    """Blocks of keys that may hold a score of at least tau, by |q| max|k| over the block.

    The bound is computed in float64 from the inputs as given and widened by the rounding of a score computed in
    float32 from them (D + 2 units in the last place of |q| |k|), so no key whose computed score reaches tau is
    dropped.

    Parameters
    ----------
    q, k : Tensor
        (..., T, D) and (..., S, D).
    tau : Tensor
        Broadcastable to (..., T, 1).
    block : int
        Keys a block; the last block may be shorter.
    scale : float, optional
        Factor of the scores, 1 / sqrt(D) if not given.

    Returns
    -------
    Tensor
        Boolean (..., T, ceil(S / block)): True where the block has to be read.
    """
    check_tensor("q", q, 2)
    check_tensor("k", k, 2)
    same_kind("k", k, q)
    if k.shape[-1] != q.shape[-1]:
        raise InputError("k", shape_of(k), f"the last dimension of q, {q.shape[-1]}")
    check_number("block", block, 1)
    d = q.shape[-1]
    factor = 1.0 / math.sqrt(d) if scale is None else check_number("scale", scale, 0.0, open_low=True)
    lengths = torch.linalg.vector_norm(k.double(), dim=-1)
    short = (-lengths.shape[-1]) % block
    longest = nn.functional.pad(lengths, (0, short)).unflatten(-1, (-1, block)).amax(-1)
    bound = torch.linalg.vector_norm(q.double(), dim=-1)[..., :, None] * longest[..., None, :] * factor
    rounding = (d + 4) * 2.0**-23 * bound + 2.0**-126
    return bound + rounding >= tau.double()
