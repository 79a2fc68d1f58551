"""Landmark attention.

References
----------
Mohtashami and Jaggi, "Landmark Attention: Random-Access Infinite Context Length for Transformers",
arXiv 2305.16300, section 3.1 (grouped softmax). Every block of `block` tokens is followed by a landmark; the weight
of a token of an earlier block is its softmax weight within its block times the weight of the block's landmark.
"""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor

from theory_lab.attention.base import Mechanism, Scope, safe_softmax
from theory_lab.attention.checks import check_number


class Landmark(Mechanism):
    """Grouped softmax over blocks with landmarks, at positions block, 2 block + 1, ...

    One softmax runs over the tokens of the query's own block and the landmarks of earlier blocks; the weight of a
    landmark is handed to the tokens of its block in proportion to their own softmax. A landmark keeps no weight,
    unless its block has no visible token, and the landmark of the query's own block is not read.

    Parameters
    ----------
    block : int
        Tokens between two landmarks, at least 1 (the paper uses 50).
    top : int, optional
        Read only the `top` earlier blocks with the highest landmark scores, as at inference; all if not given.
    """

    causal_only = True
    uses_positions = True

    def __init__(self, *, block: int = 50, top: int | None = None) -> None:
        super().__init__()
        self.block = int(check_number("block", block, 1))
        self.top = None if top is None else int(check_number("top", top, 0))

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        z, visible = scores[0], scope.visible
        i, j = scope.positions()
        size = self.block + 1
        keys = z.shape[-1]
        blocks = -(-keys // size)
        mark = (j % size == self.block) & visible
        own = torch.div(i, size, rounding_mode="floor") == torch.div(j, size, rounding_mode="floor")
        stage = torch.where(own, visible & (j % size != self.block), mark)
        # The landmark of the own block stands last in it, so only its own query could see it.
        if self.top is not None:
            past = stage & ~own
            rank = z.masked_fill(~past, -math.inf).argsort(dim=-1, descending=True, stable=True).argsort(-1)
            stage = stage & (own | (rank < self.top))
        first = safe_softmax(z, stage)
        # Within blocks: pad to whole blocks, softmax each one's tokens, and spread its landmark's weight.
        pad = blocks * size - keys
        token = torch.nn.functional.pad(visible & ~own & (j % size != self.block), (0, pad))
        grouped = torch.nn.functional.pad(z, (0, pad)).unflatten(-1, (blocks, size))
        within = safe_softmax(grouped, token.unflatten(-1, (blocks, size)))
        carried = torch.nn.functional.pad(first.masked_fill(own, 0.0), (0, pad)).unflatten(-1, (blocks, size))
        mass = carried.sum(-1, keepdim=True)
        empty = within.sum(-1, keepdim=True) == 0
        spread = torch.where(empty, carried, within * mass).flatten(-2)[..., :keys]
        return first.masked_fill(~own, 0.0) + spread

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        return cls(block=2)
