"""Which keys a row sees: padding on both sides, causality, a sliding window, an optional boolean mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..geometry import remembered


class Visibility(NamedTuple):
    """Positions of rows and keys.

    Attributes
    ----------
    bounds : torch.Tensor
        int64 (5, B): first row, one past the last row, first key, one past the last key, query offset.
    rows, keys : int
        T and S.
    causal : bool
    window : int or None
        Causal: row at position i sees i - window < j <= i. Otherwise |i - j| <= window.
    mask : torch.Tensor or None
        bool (B or 1, H or 1, T, S), True for visible.
    key : tuple or None
        What the positions follow from where they are the same for every sequence and without a mask. What is made of
        them is then remembered.
    """

    bounds: torch.Tensor
    rows: int
    keys: int
    causal: bool
    window: int | None
    mask: torch.Tensor | None
    key: tuple | None = None

    @property
    def before(self) -> int | None:
        """Keys at most this far behind a row are seen; None for all."""
        return None if self.window is None else self.window - 1 if self.causal else self.window

    @property
    def after(self) -> int | None:
        """Keys at most this far ahead of a row are seen; None for all."""
        return 0 if self.causal else self.window


def remember(see: Visibility, name: str, make: Callable[[], torch.Tensor], *more: object) -> torch.Tensor:
    """A read-only table that follows from the positions (and ``more``) alone; layers of a model share it."""
    if see.key is None:
        return make()
    return remembered((name, *see.key, *more), see.bounds.device, make)


def key_range(position: torch.Tensor, start: torch.Tensor, stop: torch.Tensor, see: Visibility) -> torch.Tensor:
    """First and one past the last key that a row at ``position`` sees, stacked; equal where there is none."""
    low, high = start, stop
    if see.before is not None:
        low = torch.maximum(low, position - see.before)
    if see.after is not None:
        high = torch.minimum(high, position + see.after + 1)
    low, high = torch.broadcast_tensors(low, high)
    return torch.stack([low, torch.maximum(low, high)])


def visible_counts(see: Visibility, heads: int) -> torch.Tensor:
    """Keys that each row sees, int64 (B, H, T)."""
    if see.mask is None:
        return remember(see, "keys by row", lambda: _keys_by_row(see))[:, None].repeat(1, heads, 1)
    batch = see.bounds.shape[1]
    out = torch.zeros((batch, heads, see.rows), dtype=torch.int64, device=see.bounds.device)
    step = max(1, (1 << 24) // max(1, see.keys * heads))
    for b in range(batch):
        for first in range(0, see.rows, step):
            stop = min(first + step, see.rows)
            seen = tile_mask(see, b, (first, stop), (0, see.keys), (0, heads))
            out[b, :, first:stop] = seen.sum(-1)
    return out


def _keys_by_row(see: Visibility) -> torch.Tensor:
    """int64 (B, T), without a mask."""
    row0, row1, key0, key1, offset = see.bounds[..., None]
    row = torch.arange(see.rows, device=see.bounds.device)
    low, high = key_range(row + offset, key0, key1, see)
    return torch.where((row >= row0) & (row < row1), high - low, 0)


def hidden_rows(see: Visibility) -> torch.Tensor:
    """Rows that see no key, bool (B, 1, T); without a mask, read-only."""
    return remember(see, "hidden", lambda: (_keys_by_row(see) == 0)[:, None])


def visible_totals(see: Visibility) -> torch.Tensor:
    """Visible pairs of each sequence, int64 (B, 1, 1); without a mask, read-only."""
    return remember(see, "pairs", lambda: _keys_by_row(see).sum(-1)[:, None, None])


def pair_counts(see: Visibility, gap: int) -> torch.Tensor:
    """Visible pairs at least ``gap`` apart, int64 (B,); without a mask, read-only."""
    return remember(see, "pairs apart", lambda: _pairs_apart(see, gap), gap)


def _pairs_apart(see: Visibility, gap: int) -> torch.Tensor:
    row0, row1, key0, key1, offset = see.bounds[..., None]
    row = torch.arange(see.rows, device=see.bounds.device)
    low, high = key_range(row + offset, key0, key1, see)
    near = torch.minimum(high, row + offset + gap) - torch.maximum(low, row + offset - gap + 1)
    count = high - low - near.clamp_min(0)
    return torch.where((row >= row0) & (row < row1), count, 0).sum(-1)


def column_rows(see: Visibility) -> torch.Tensor:
    """Rows that see each key, int64 (B, S)."""
    if see.key is not None:
        return remember(see, "rows by key", lambda: _rows_by_key(see)).clone()
    return _rows_by_key(see)


def _rows_by_key(see: Visibility) -> torch.Tensor:
    row0, row1, key0, key1, offset = see.bounds[..., None]
    key = torch.arange(see.keys, device=see.bounds.device)
    low, high = row0, row1
    if see.after is not None:
        low = torch.maximum(low, key - offset - see.after)
    if see.before is not None:
        high = torch.minimum(high, key - offset + see.before + 1)
    batch = see.bounds.shape[1]
    if see.mask is None:
        seen = torch.where((key >= key0) & (key < key1), (high - low).clamp_min(0), 0)
        return seen.expand(batch, see.keys).contiguous()
    out = torch.zeros((batch, see.keys), dtype=torch.int64, device=key.device)
    step = max(1, (1 << 24) // max(1, see.keys * see.mask.shape[1]))
    for b in range(batch):
        for first in range(0, see.rows, step):
            stop = min(first + step, see.rows)
            seen = tile_mask(see, b, (first, stop), (0, see.keys), (0, see.mask.shape[1]))
            out[b] += seen.any(0).sum(0)
    return out


def tile_mask(
    see: Visibility,
    b: int,
    rows: tuple[int, int],
    keys: tuple[int, int],
    heads: tuple[int, int],
    gap: int | None = None,
) -> torch.Tensor:
    """Visible pairs of a tile, bool (heads or 1, rows, keys); with ``gap`` only pairs at least that far apart."""
    row0, row1, key0, key1, offset = see.bounds[:, b]
    row = torch.arange(*rows, device=see.bounds.device)[:, None]
    key = torch.arange(*keys, device=see.bounds.device)[None, :]
    ahead = key - row - offset
    seen = (row >= row0) & (row < row1) & (key >= key0) & (key < key1)
    if see.after is not None:
        seen &= ahead <= see.after
    if see.before is not None:
        seen &= ahead >= -see.before
    if gap is not None:
        seen &= (-ahead if see.causal else ahead.abs()) >= gap
    if see.mask is None:
        return seen[None]
    m = see.mask[b if see.mask.shape[0] > 1 else 0]
    m = m[heads[0] : heads[1]] if m.shape[0] > 1 else m
    return seen & m[:, rows[0] : rows[1], keys[0] : keys[1]]
