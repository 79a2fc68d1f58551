"""Fixed sparse patterns.

References
----------
Child et al., "Generating Long Sequences with Sparse Transformers", arXiv 1904.10509, section 4.3. Strided: the
last `stride` positions, and every `stride`-th one before. Fixed: the own block of `stride`, and the last
`summary` positions of every block.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from theory_lab.attention.base import Mechanism, Scope, safe_softmax
from theory_lab.attention.checks import check_number
from theory_lab.errors import InputError

PATTERNS = ("strided", "fixed")
PARTS = ("union", "local", "summary", "alternate")


class SparseTransformer(Mechanism):
    """Softmax over a strided or fixed pattern of past positions.

    Parameters
    ----------
    stride : int
        l, at least 1; the paper sets it near sqrt(S).
    pattern : str
        "strided" or "fixed".
    summary : int
        c <= l, of the fixed pattern.
    part : str
        "union" of the two sets (the paper's merged head), one of them ("local", "summary"), or "alternate": even
        heads local, odd heads summary.
    """

    causal_only = True
    uses_positions = True

    def __init__(self, *, stride: int = 32, pattern: str = "strided", summary: int = 1, part: str = "union") -> None:
        super().__init__()
        if pattern not in PATTERNS:
            raise InputError("pattern", repr(pattern), ", ".join(PATTERNS))
        if part not in PARTS:
            raise InputError("part", repr(part), ", ".join(PARTS))
        self.stride = int(check_number("stride", stride, 1))
        self.summary = int(check_number("summary", summary, 1, self.stride, open_high=False))
        self.pattern, self.part = pattern, part

    def selected(self, scope: Scope) -> Tensor:
        """Boolean, the keys of the pattern that every row sees."""
        i, j = scope.positions()
        if self.pattern == "strided":
            local, summary = i - j < self.stride, (i - j) % self.stride == 0
        else:
            local = torch.div(i, self.stride, rounding_mode="floor") == torch.div(j, self.stride, rounding_mode="floor")
            summary = (j % self.stride >= self.stride - self.summary).expand(local.shape)
        if self.part == "union":
            chosen = local | summary
        elif self.part == "local":
            chosen = local
        elif self.part == "summary":
            chosen = summary
        else:
            if scope.visible.ndim < 3:
                raise InputError("scores", f"shape {tuple(scope.visible.shape)}", "(..., H, T, S) to alternate heads")
            odd = torch.arange(scope.visible.shape[-3], device=i.device) % 2 == 1
            chosen = torch.where(odd[:, None, None], summary, local)
        return scope.visible & chosen

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        return safe_softmax(scores[0], self.selected(scope))

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        return cls(stride=3, part="alternate")
