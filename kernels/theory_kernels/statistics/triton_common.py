"""Jitted helpers of the statistics kernels. Imports triton: load this module lazily.

Positions come as ``BOUNDS`` (5, B) int32: first row, one past the last, first key, one past the last, query offset.
A row at position i sees the keys from i - BEFORE to i + AFTER, where HAS_BEFORE and HAS_AFTER say so.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from ..geometry import remembered
from ..primitives import INTERPRETED, dot, load_rows
from ..screen import padded
from .request import Request
from .visibility import remember

# Passed as they are: a kernel per length would be compiled otherwise.
SIZES = ["B", "H", "G", "T", "S", "BEFORE", "AFTER", "BLOCKS", "plane", "NI", "NW", "GAP"]
# Stands for -inf in logits; exp2 of it is 0 and 0 times it is 0.
FLOOR = -1e30


@triton.jit
def bounds_of(BOUNDS, b, B):
    """First row, one past the last row, first key, one past the last key, offset."""
    return (
        tl.load(BOUNDS + b), tl.load(BOUNDS + B + b), tl.load(BOUNDS + 2 * B + b), tl.load(BOUNDS + 3 * B + b),
        tl.load(BOUNDS + 4 * B + b),
    )  # fmt: skip


@triton.jit
def key_tiles(
    first, last, key0, key1, off, BEFORE, AFTER, BN: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr
):  # fmt: skip
    """Key tiles that some row of first..last sees: start, and where whole tiles begin and end, stop."""
    low, high, all_low, all_high = key0, key1, key0, key1
    if HAS_BEFORE:
        low = tl.maximum(low, first + off - BEFORE)
        all_low = tl.maximum(all_low, last + off - BEFORE)
    if HAS_AFTER:
        high = tl.minimum(high, last + off + AFTER + 1)
        all_high = tl.minimum(all_high, first + off + AFTER + 1)
    return _tiles(low, high, all_low, all_high, BN)


@triton.jit
def row_tiles(
    first, last, row0, row1, off, BEFORE, AFTER, BM: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr
):  # fmt: skip
    """Row tiles that see some key of first..last: start, and where whole tiles begin and end, stop."""
    low, high, all_low, all_high = row0, row1, row0, row1
    if HAS_AFTER:
        low = tl.maximum(low, first - off - AFTER)
        all_low = tl.maximum(all_low, last - off - AFTER)
    if HAS_BEFORE:
        high = tl.minimum(high, last - off + BEFORE + 1)
        all_high = tl.minimum(all_high, first - off + BEFORE + 1)
    return _tiles(low, high, all_low, all_high, BM)


@triton.jit
def _tiles(low, high, all_low, all_high, SIZE: tl.constexpr):
    low = tl.maximum(low, 0)
    high = tl.maximum(high, low)
    start, stop = low // SIZE, tl.cdiv(high, SIZE)
    stop = tl.where(high > low, stop, start)
    inner = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(all_low, 0), SIZE), start), stop)
    outer = tl.minimum(tl.maximum(tl.maximum(all_high, 0) // SIZE, inner), stop)
    return start, inner, outer, stop


@triton.jit
def visible(
    rows, keys, row0, row1, key0, key1, off, BEFORE, AFTER, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr
):  # fmt: skip
    """Which pairs count; rows and keys are broadcast against each other."""
    ahead = keys - rows - off
    seen = (rows >= row0) & (rows < row1) & (keys >= key0) & (keys < key1)
    if HAS_AFTER:
        seen = seen & (ahead <= AFTER)
    if HAS_BEFORE:
        seen = seen & (ahead >= -BEFORE)
    return seen


@triton.jit
def products(
    x, Y, start, stop, cols, stride, D: tl.constexpr, DP: tl.constexpr, COUNT: tl.constexpr, MASKED: tl.constexpr,
    PREC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """x times COUNT rows of Y from ``start`` on."""
    y = load_rows(Y, start, stop, cols, stride, D, DP, COUNT, MASKED)
    return dot(x, tl.trans(y), tl.zeros([x.shape[0], COUNT], tl.float32), PREC, UPCAST)


@triton.jit
def logits(s, eta, FACTOR, CAP, SHARP, SOFTCAP: tl.constexpr, ETA: tl.constexpr):
    """Logits of the products: in bits (FACTOR or CAP holds log2 e; with ETA it is multiplied in here)."""
    z = s * FACTOR
    if SOFTCAP:
        t = tl.exp2(-2.8853900817779268 * tl.abs(z))
        z = tl.where(z < 0.0, -CAP, CAP) * ((1.0 - t) / (1.0 + t))
    if ETA > 0:
        y = SHARP * (z - eta)
        t = tl.exp2(-1.4426950408889634 * tl.abs(y))
        if ETA == 1:
            z = z * (tl.where(y < 0.0, t, 1.0) / (1.0 + t))
        else:
            z = z + tl.minimum(y, 0.0) - 0.6931471805599453 * tl.log2(1.0 + t)
        z = z * 1.4426950408889634
    return z


@triton.jit
def add_pair(high, low, x):
    """(high, low) + x with the rounding error of the sum kept in ``low`` (two-sum)."""
    total = high + x
    back = total - high
    return total, low + ((high - (total - back)) + (x - back))


class Positions:
    """Launch arguments that say where rows and keys lie."""

    def __init__(self, request: Request, device: torch.device):
        see = request.see
        self.bounds = remember(see, "bounds int32", lambda: see.bounds.to(torch.int32).contiguous())
        self.before, self.after = see.before or 0, see.after or 0
        self.flags = {"HAS_BEFORE": see.before is not None, "HAS_AFTER": see.after is not None}


def flags_of(q: torch.Tensor) -> dict[str, Any]:
    """Constants that depend on the operands."""
    d = q.shape[-1]
    # Triton 3.6 reads past shared memory in a 16-bit product of narrow tiles: they are padded to 64.
    width = padded(d) if INTERPRETED or q.dtype == torch.float32 else max(64, padded(d))
    return {
        "D": d, "DP": width, "PREC": "tf32x3" if q.dtype == torch.float32 else "tf32", "UPCAST": INTERPRETED,
    }  # fmt: skip


def shared_bytes(tile: int, stages: int, width: int, itemsize: int, views: int) -> int:
    """Shared memory of a program that reads ``tile`` rows of every view at a time, at most.

    A buffer a stage, and the operand of the tensor cores; float32 rows are split into two of tf32 for those. One tile
    more is for what stays and for reductions: Triton 3.6 takes 4 tiles a view of float32 with two stages, and 5 of one.
    """
    return tile * width * itemsize * (views * (stages + (2 if itemsize == 4 else 1)) + 1)


@functools.cache
def _shared_limit() -> int:
    device = triton.runtime.driver.active.get_current_device()
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def square_tiles(q: torch.Tensor, views: int, limit: int | None = None) -> dict[str, int]:
    """Shape of the tiles of ``views`` products at a time, and warps and stages, that fit the shared memory."""
    if INTERPRETED and limit is None:
        return {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1}
    limit = _shared_limit() if limit is None else limit
    width, itemsize = flags_of(q)["DP"], q.element_size()
    large = width > 128
    # 512 bytes a row: registers hold no more of 64 rows.
    shapes = [(64, 2), (64, 1)] if width * itemsize <= 512 else []
    shapes = [x for x in [*shapes, (32, 1)] if not large or x[1] == 1]
    fitting = [x for x in shapes if shared_bytes(*x, width, itemsize, views) <= limit]
    tile, stages = fitting[0] if fitting else (16, 1)
    return {"BM": tile, "BN": tile, "num_warps": 8 if large else 4, "num_stages": stages}


def with_unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def next_power(count: int) -> int:
    """Number of counters as the kernels hold them."""
    return max(1, triton.next_power_of_2(count))


def padded_list(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """float32 tensor of at least one entry, read-only."""
    values = values or (0.0,)
    return remembered(
        ("list", values, device),
        device,
        # No copy from the host, which a CUDA graph could not capture.
        lambda: torch.stack([torch.full((), x, dtype=torch.float32, device=device) for x in values]),
    )
