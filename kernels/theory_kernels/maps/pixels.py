"""Pixels of a window: which rows (or columns) each one covers.

Pixel r of R over n entries from ``begin`` covers ``begin + floor(r n / R)`` up to, not including,
``begin + floor((r + 1) n / R)``: every entry belongs to exactly one pixel, sizes differ by at most one, and R <= n.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Pixels(NamedTuple):
    """Members of each pixel, padded to one width.

    ``edges`` (R + 1,) int64; ``members`` (R, width) int64, the last member repeated in shorter pixels; ``real``
    (R, width) bool, False at the repeats.
    """

    edges: torch.Tensor
    members: torch.Tensor
    real: torch.Tensor

    @property
    def sizes(self) -> torch.Tensor:
        """Entries of each pixel, int64 (R,)."""
        return self.edges.diff()


def edges_of(begin: int, end: int, resolution: int, device: torch.device) -> torch.Tensor:
    """Boundaries of the pixels, int64 (R + 1,) with R = min(resolution, end - begin)."""
    count = min(resolution, end - begin)
    return begin + torch.arange(count + 1, device=device) * (end - begin) // count


def pixels_of(begin: int, end: int, resolution: int, samples: int | None, device: torch.device) -> Pixels:
    """Members of each pixel; with ``samples`` at most that many of each, evenly spread from the middle outwards."""
    edges = edges_of(begin, end, resolution, device)
    sizes = edges.diff()[:, None]
    width = int(sizes.max())
    if samples is not None and samples < width:
        # Distinct, because every pixel has at least width - 1 >= samples entries.
        step = torch.arange(samples, device=device)[None, :]
        index = edges[:-1, None] + (2 * step + 1) * sizes // (2 * samples)
        return Pixels(edges, index, torch.ones_like(index, dtype=torch.bool))
    step = torch.arange(width, device=device)[None, :]
    return Pixels(edges, edges[:-1, None] + torch.minimum(step, sizes - 1), step < sizes)
