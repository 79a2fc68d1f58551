"""Inputs that the tests of the mechanisms share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from theory_lab.attention import Mechanism, list_mechanisms, resolve

NAMES = list_mechanisms()
HIDDEN = 7


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    q2: Tensor | None
    k2: Tensor | None
    x: Tensor

    def call(self, mechanism: Mechanism, **options: Any) -> Any:
        return mechanism(self.q, self.k, self.v, q2=self.q2, k2=self.k2, x=self.x, **options)

    def map(self, function: Any) -> Inputs:
        made = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            made[field.name] = None if tensor is None else function(field.name, tensor)
        return Inputs(**made)


def inputs(
    views: int,
    *,
    batch: int = 2,
    heads: int = 4,
    groups: int = 2,
    queries: int = 9,
    keys: int = 9,
    dim: int = 6,
    value_dim: int = 5,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    q, k = draw(batch, heads, queries, dim), draw(batch, groups, keys, dim)
    v, x = draw(batch, groups, keys, value_dim), draw(batch, queries, HIDDEN)
    if views == 1:
        return Inputs(q, k, v, None, None, x)
    return Inputs(q, k, v, draw(*q.shape), draw(*k.shape), x)


def build(name: str, *, heads: int = 4, dim: int = 6, value_dim: int = 5, seed: int = 1) -> Mechanism:
    g = torch.Generator().manual_seed(seed)
    return resolve(name).sample(g, heads=heads, head_dim=dim, value_dim=value_dim, hidden_dim=HIDDEN)


def side(mechanism: Mechanism, scores: Tensor, *, dim: int = 6, seed: int = 5) -> dict[str, Any]:
    """Side inputs for weights() of given scores (B, H, T, S)."""
    g = torch.Generator().manual_seed(seed)
    b, h, t, _ = scores.shape
    made: dict[str, Any] = {
        "head_dim": dim,
        "x": torch.randn(b, t, HIDDEN, generator=g, dtype=torch.float64).to(scores.dtype),
        "q": torch.randn(b, h, t, dim, generator=g, dtype=torch.float64).to(scores.dtype),
    }
    if mechanism.views == 2:
        made["scores2"] = scores.flip(-1).clone()
    return made
