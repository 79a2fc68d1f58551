"""Blocks of rows and chunks of keys for the plain torch form: what is held at once, and what needs a mask."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .request import Request, unit_rows
from .visibility import Visibility, tile_mask


@dataclass(frozen=True)
class Sizes:
    """Rows of a block (all heads of a group together), keys of a chunk, scores of a chunk, scores of a block."""

    rows: int
    keys: int
    chunk: int
    block: int


# A chunk of 2^19 float32 is 2 MiB: small enough for the caches, large enough that starting threads costs little.
CPU = Sizes(rows=512, keys=1024, chunk=1 << 19, block=1 << 23)
GPU = Sizes(rows=1024, keys=16384, chunk=1 << 24, block=1 << 27)

# Added to what is hidden. Stands for -inf in logits: exp gives 0 and 0 times it is 0. No real logit comes near.
FLOOR = -1e30


class Workspace:
    """Flat buffers that live as long as the call, so that a chunk costs no allocation."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.flat: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], start: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A contiguous tensor of that shape at entry ``start`` of the buffer ``name``, with whatever it held."""
        size = 1
        for n in shape:
            size *= n
        flat = self.flat.get(name)
        if flat is None or flat.numel() < start + size:
            grown = torch.empty(start + size, dtype=dtype or self.dtype, device=self.device)
            if flat is not None:
                grown[: flat.numel()] = flat
            flat = self.flat[name] = grown
        return flat[start : start + size].view(shape)


def prepared(x: torch.Tensor, normalize: bool) -> torch.Tensor:
    """Contiguous float32 (float64 for float64) rows, divided by their norms if asked for."""
    wide = x if x.dtype == torch.float64 else x.float()
    # Contiguous: matrix products of transposed operands add up in another order.
    wide = wide.contiguous()
    return unit_rows(wide) if normalize else wide


@dataclass(frozen=True)
class Block:
    """Some heads of one sequence and some of its rows, with every key that one of these rows sees."""

    see: Visibility
    b: int
    groups: tuple[int, int]
    share: int
    rows: tuple[int, int]
    chunks: list[tuple[int, int]]
    offset: int
    key0: int
    q: list[torch.Tensor]
    k: list[torch.Tensor]

    @property
    def heads(self) -> slice:
        return slice(self.groups[0] * self.share, self.groups[1] * self.share)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(groups, heads a group, rows): what precedes the keys in every tile."""
        return self.groups[1] - self.groups[0], self.share, self.rows[1] - self.rows[0]

    @property
    def size(self) -> int:
        """Scores of the block."""
        return self.start((self.chunks[-1][1], 0))

    def start(self, chunk: tuple[int, int]) -> int:
        """Scores of the block before a chunk."""
        g, r, n = self.shape
        return (chunk[0] - self.chunks[0][0]) * g * r * n

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """The block's part of (B, H, T), as (groups, heads a group, rows)."""
        return x[self.b, self.heads, slice(*self.rows)].unflatten(0, self.shape[:2])

    def scores(self, view: int, chunk: tuple[int, int], factor: float, work: Workspace, name: str) -> torch.Tensor:
        """``factor <q, k>`` of a chunk, (groups, heads a group, rows, keys), in the buffer ``name``."""
        g, r, n = self.shape
        out = work.take(name, (g, r * n, chunk[1] - chunk[0]))
        keys = self.k[view][:, chunk[0] - self.key0 : chunk[1] - self.key0].transpose(-1, -2)
        # beta=0 ignores what the buffer held; alpha scales the sums, so q is not rounded once more.
        torch.baddbmm(out, self.q[view], keys, beta=0.0, alpha=factor, out=out)
        return out.unflatten(1, (r, n))

    def bias(self, chunk: tuple[int, int], dtype: torch.dtype) -> torch.Tensor | None:
        """0 for visible pairs, the floor for hidden ones, broadcastable to the scores; None where all are visible."""
        hidden = self.hidden(chunk)
        # torch fills and selects by a bool an order of magnitude slower than it adds.
        return None if hidden is None else hidden.to(dtype).mul_(FLOOR)

    def hidden(self, chunk: tuple[int, int], gap: int | None = None) -> torch.Tensor | None:
        """Pairs of the chunk that do not count, broadcastable to its scores; None where all do."""
        first, last = self.rows[0] + self.offset, self.rows[1] - 1 + self.offset
        near, far = first - (chunk[1] - 1), last - chunk[0]
        full = self.see.mask is None
        full &= self.see.after is None or near >= -self.see.after
        full &= self.see.before is None or far <= self.see.before
        if gap:
            full &= near >= gap or (not self.see.causal and -far >= gap)
        if full:
            return None
        seen = tile_mask(self.see, self.b, self.rows, chunk, (self.heads.start, self.heads.stop), gap)
        return ~(seen[None] if seen.shape[0] == 1 else seen.unflatten(0, self.shape[:2]))


def blocks(views: list[tuple[torch.Tensor, torch.Tensor]], request: Request) -> Iterator[Block]:
    """Every block, in a fixed order."""
    q0, k0 = views[0]
    h, g = q0.shape[1], k0.shape[1]
    if h == 0:
        return
    share = h // g
    see = request.see
    sizes = CPU if q0.device.type == "cpu" else GPU
    for b, (row0, row1, key0, key1, offset) in enumerate(see.bounds.t().tolist()):
        # Keys once a sequence: O(S) memory. Only stored keys are read, whatever lies in padding.
        keys = [prepared(k[b, :, key0:key1], request.normalize) for _, k in views]
        row = row0
        while row < row1:
            low, high = _keys(see, row, row, key0, key1, offset)
            # Blocks that are tall beside the sequence would compute half a square in vain on its diagonal.
            step = max(8, min(sizes.rows // share, max(32, (row1 - row0) // 8 // 8 * 8)))
            step = min(step, max(8, sizes.block // (share * max(high - low, 1)) // 8 * 8), row1 - row)
            low, high = _keys(see, row, row + step - 1, key0, key1, offset)
            width = min(sizes.keys, max(8, sizes.chunk // (share * step) // 8 * 8))
            together = max(1, min(g, sizes.chunk // (share * step * max(1, min(width, high - low)))))
            together = max(1, min(together, sizes.block // (share * step * max(high - low, 1))))
            chunks = _chunks(see, (row, row + step), (low, high), offset, request.moment_gap, width)
            for first in range(0, g, together) if chunks else ():
                groups = (first, min(first + together, g))
                heads = slice(groups[0] * share, groups[1] * share)
                q = [
                    prepared(x[b, heads, row : row + step], request.normalize).reshape(
                        groups[1] - groups[0], share * step, x.shape[-1]
                    )
                    for x, _ in views
                ]
                held = [k[groups[0] : groups[1]] for k in keys]
                yield Block(see, b, groups, share, (row, row + step), chunks, offset, key0, q, held)
            row += step


def _chunks(
    see: Visibility, rows: tuple[int, int], keys: tuple[int, int], offset: int, gap: int, width: int
) -> list[tuple[int, int]]:
    """Chunks of a block's keys; those that some row does not see are kept apart, for only they need a mask."""
    first, last = rows[0] + offset, rows[1] - 1 + offset
    low, high = keys
    inner_low = low if see.before is None else min(max(low, last - see.before), high)
    inner_high = high if see.after is None else max(min(high, first + see.after + 1 - (gap if see.causal else 0)), low)
    cuts = [low, inner_low, inner_high, high] if inner_low < inner_high else [low, high]
    return [(at, min(at + width, stop)) for start, stop in itertools.pairwise(cuts) for at in range(start, stop, width)]


def _keys(see: Visibility, first: int, last: int, key0: int, key1: int, offset: int) -> tuple[int, int]:
    low = key0 if see.before is None else max(key0, first + offset - see.before)
    high = key1 if see.after is None else min(key1, last + offset + see.after + 1)
    return low, max(low, high)


def count_above(x: torch.Tensor, level: torch.Tensor | float, out: torch.Tensor) -> torch.Tensor:
    """Entries above ``level`` along the last dimension, int64.

    Compared into floats: torch compares into bools, and adds bools, several times slower. A sum of up to 2^24 ones
    is exact in float32.
    """
    return torch.gt(x, level, out=out).sum(-1).to(torch.int64)
