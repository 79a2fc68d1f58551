"""Sums of one block of rows, and their totals.

Blocks may be computed side by side; their parts are joined in the order of the blocks, so the number of threads
changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .blocks import Block, Workspace, count_above
from .moments import Moments
from .request import Request
from .results import ViewStatistics


class Part:
    """Sums over the weights of a block: rows (groups, heads a group, rows), columns over the keys of the block."""

    def __init__(self, request: Request, block: Block, work: Workspace):
        self.request, self.work = request, work
        device, first = work.device, block.chunks[0][0]
        self.first = first
        self.mass = torch.zeros(block.shape, dtype=torch.float64, device=device)
        self.entropy = torch.zeros_like(self.mass)
        self.maximum = torch.zeros_like(self.mass)
        self.support = torch.zeros(block.shape, dtype=torch.int64, device=device)
        width = block.chunks[-1][1] - first if request.wants("columns") else 0
        self.columns = self.mass.new_zeros((*block.shape[:2], width))
        self.large = self.mass.new_zeros((*block.shape[:2], len(request.near_zero)))

    def add(self, chunk: tuple[int, int], w: torch.Tensor, whole: bool = True) -> None:
        """Add non-negative weights of a chunk. A view of a difference (not ``whole``) counts its own support.

        ``entropy`` holds -sum w log w until the end.
        """
        spare = self.work.take("spare", tuple(w.shape))
        if self.request.wants("rows"):
            self.mass += w.sum(-1)
            self.maximum = torch.maximum(self.maximum, w.amax(-1))
            if whole:
                self.support += count_above(w, 0.0, spare)
                self.entropy -= torch.clamp_min(w, torch.finfo(w.dtype).tiny, out=spare).log_().mul_(w).sum(-1)
        if self.request.wants("columns"):
            self.add_columns(chunk, w.sum(-2))
        if self.request.wants("near_zero"):
            for index, bound in enumerate(self.request.near_zero):
                self.add_large(index, torch.ge(w, bound, out=spare))

    def add_columns(self, chunk: tuple[int, int], sums: torch.Tensor) -> None:
        self.columns[..., chunk[0] - self.first : chunk[1] - self.first] += sums

    def add_large(self, index: int, ones: torch.Tensor) -> None:
        """Count the ones of (groups, heads a group, rows, keys); a row's sum in float32 is exact."""
        self.large[..., index] += ones.sum(-1).sum(-1, dtype=torch.float64)


@dataclass
class BlockResult:
    """What a block of rows gives: the weights, the views before they are subtracted, consensus, score moments."""

    whole: Part
    views: list[Part] = field(default_factory=list)
    consensus: torch.Tensor | None = None
    moments: Moments | None = None


class Totals:
    """Sums of one map: rows (B, H, T), columns (B, H, S), and the visible entries that are not near zero."""

    def __init__(self, request: Request, shape: torch.Size, device: torch.device):
        self.request = request
        self.mass = torch.zeros(shape, dtype=torch.float64, device=device)
        self.entropy = torch.zeros_like(self.mass)
        self.maximum = torch.zeros_like(self.mass)
        self.support = torch.zeros(shape, dtype=torch.int64, device=device)
        self.columns = self.mass.new_zeros((*shape[:2], request.see.keys if request.wants("columns") else 0))
        self.large = self.mass.new_zeros((*shape[:2], len(request.near_zero)))

    def join(self, block: Block, part: Part) -> None:
        rows = (block.b, block.heads, slice(*block.rows))
        self.mass[rows] = part.mass.flatten(0, 1)
        self.entropy[rows] = part.entropy.flatten(0, 1)
        self.maximum[rows] = part.maximum.flatten(0, 1)
        self.support[rows] = part.support.flatten(0, 1)
        keys = slice(part.first, part.first + part.columns.shape[-1])
        self.columns[block.b, block.heads, keys] += part.columns.flatten(0, 1)
        self.large[block.b, block.heads] += part.large.flatten(0, 1)

    def normalized_entropy(self) -> torch.Tensor:
        """H of w / mass from -sum w log w: log(mass) - sum w log w / mass."""
        safe = torch.where(self.mass > 0, self.mass, 1.0)
        return (safe.log() + self.entropy / safe).clamp_min(0.0)

    def view(self, visible: torch.Tensor) -> ViewStatistics:
        rows, columns, near = (self.request.wants(x) for x in ("rows", "columns", "near_zero"))
        return ViewStatistics(
            mass=self.mass if rows else None,
            support=self.support if rows else None,
            maximum=self.maximum if rows else None,
            column_mass=self.columns if columns else None,
            near_zero=visible.sum(-1, keepdim=True) - self.large.long() if near else None,
        )
