"""Where the keys of a sequence lie: one after another, or in pages.

Shape legend of the package: B sequences, H query heads, G key heads, T query rows (1 to 16), S keys that a sequence
can have, D key head dim, E value head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..geometry import MAX_HEAD_DIM
from ..validation import check_float

INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


class Paging(NamedTuple):
    """Layout of a cache.

    Attributes
    ----------
    table : torch.Tensor or None
        int32 (B, pages a sequence); None for a contiguous cache.
    page_size : int
        Keys a page (S for a contiguous cache).
    batch, capacity : int
        Sequences, and keys that each can have.
    device : torch.device
        Where all of it is.
    """

    table: torch.Tensor | None
    page_size: int
    batch: int
    capacity: int
    device: torch.device

    @classmethod
    def of(cls, k_cache: torch.Tensor, page_table: torch.Tensor | None) -> Paging:
        """Check a cache of keys and its table; TypeError or ValueError on a mismatch."""
        check_float("k_cache", k_cache)
        if k_cache.dim() != 4 or not 1 <= k_cache.shape[-1] <= MAX_HEAD_DIM or not k_cache.shape[1]:
            raise ValueError(
                f"k_cache must have shape (batch or pages, heads, keys, head dim of 1 to {MAX_HEAD_DIM}), got "
                f"{tuple(k_cache.shape)}"
            )
        if page_table is None:
            return cls(None, k_cache.shape[2], k_cache.shape[0], k_cache.shape[2], k_cache.device)
        fits = isinstance(page_table, torch.Tensor) and page_table.dtype in INTEGERS and page_table.dim() == 2
        if not fits or page_table.layout != torch.strided:
            got = tuple(page_table.shape) if isinstance(page_table, torch.Tensor) else type(page_table).__name__
            raise ValueError(f"page_table must be an integer tensor (batch, pages a sequence), got {got}")
        if page_table.device != k_cache.device:
            raise ValueError(f"page_table must be on {k_cache.device} like the cache, got {page_table.device}")
        if page_table.device.type == "cpu" and page_table.numel() and not torch.compiler.is_compiling():
            low, high = int(page_table.min()), int(page_table.max())
            if low < 0 or high >= k_cache.shape[0]:
                raise ValueError(f"page_table must name pages 0..{k_cache.shape[0] - 1}, got {low} to {high}")
        batch, pages = page_table.shape
        table = page_table.to(torch.int32).contiguous()
        return cls(table, k_cache.shape[2], batch, pages * k_cache.shape[2], k_cache.device)


def gather(cache: torch.Tensor, paging: Paging, key: torch.Tensor) -> torch.Tensor:
    """Rows ``key`` (B, n) of every head, (B, G, n, D); positions past the end give the last row."""
    key = key.clamp(0, max(paging.capacity - 1, 0)).long()
    b = torch.arange(key.shape[0], device=key.device)[:, None]
    if paging.table is None:
        return cache[b, :, key].transpose(1, 2)
    page = paging.table[b, key // paging.page_size].long()
    return cache[page, :, key % paging.page_size].transpose(1, 2)
