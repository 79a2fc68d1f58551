"""Launches of the row kernels: whole rows where they fit a program, parts of rows above. Imports triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ..primitives import INTERPRETED
from .triton_long import join_backward, join_forward, parts_backward, parts_forward, passes_forward
from .triton_rows import rows_backward, rows_forward

# Newton's steps for alpha <= 2 double the digits; halving [-log n, 0] to float32's takes 40.
_MOST = 64
# Steps on a part of a row: a few leave little above its bound, and any number is right.
_PART_STEPS = 12
# Slots for the kept scores of a row, in the registers of one program.
_SLOTS = 16384


class Shape(NamedTuple):
    """Rows and elements of a row in one program, and its warps."""

    rows: int
    block: int
    warps: int


def whole(n: int, power: int) -> Shape | None:
    """The program for whole rows of ``n``, or None above what registers hold; found on an H200."""
    if INTERPRETED and n > 512:
        return None  # the same kernels, at sizes that the interpreter can run
    if n > (32768 if power else 8192):
        return None
    block = max(16, triton.next_power_of_2(n))
    rows = max(1, 1024 // block)
    # Few warps with much in registers: sums over a row then cross few of them. The functions of any other alpha
    # want registers of their own.
    return Shape(rows, block, min(16, max(1, rows * block // (2048 if power else 512))))


def group(x: torch.Tensor) -> int:
    """Neighbors in one thread: the elements of a 16-byte load."""
    return 16 // x.element_size()


def parts(n: int) -> Shape:
    """The program for a part of a row of ``n``."""
    return Shape(1, 512, 4) if INTERPRETED else Shape(1, 16384, 16)


def forward(x: torch.Tensor, alpha: torch.Tensor | None, power: int, low: float, high: float) -> torch.Tensor:
    """Weights (R, n) of rows; ``alpha`` (1,) or (R,) in [low, high], or a closed-form ``power``."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, n = x.shape
    p = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    steps = alpha.float().contiguous() if alpha is not None else p
    stride = 0 if alpha is None or alpha.shape[0] == 1 else 1
    kind: dict[str, object] = {
        "POWER": power, "STEEP": power == 0 and high > 2.0, "PLAIN": low >= 1.1, "MOST": _MOST, "UPCAST": INTERPRETED
    }  # fmt: skip
    shape = whole(n, power)
    if shape is not None:
        rows_forward[(triton.cdiv(rows, shape.rows),)](
            x, p, steps, rows, n, x.stride(0), stride, BLOCK=shape.block, R=shape.rows, GROUP=group(x), **kind,
            num_warps=shape.warps,
        )  # fmt: skip
        return p
    shape = parts(n)
    count = triton.cdiv(n, shape.block)
    padded = triton.next_power_of_2(count)
    capacity = max(16, min(shape.block, (512 if INTERPRETED else _SLOTS) // padded))
    scores = torch.empty((rows, count, capacity), dtype=torch.float32, device=x.device)
    places = torch.empty((rows, count, capacity), dtype=torch.int32, device=x.device)
    counts = torch.empty((rows, count), dtype=torch.int32, device=x.device)
    tops = torch.empty((rows, count), dtype=torch.float32, device=x.device)
    parts_forward[(rows * count,)](
        x, p, steps, scores, places, counts, tops, n, count, x.stride(0), stride, BLOCK=shape.block,
        GROUP=group(x), CAPACITY=capacity, POWER=power, PLAIN=kind["PLAIN"], MOST=_PART_STEPS, UPCAST=INTERPRETED,
        num_warps=shape.warps,
    )  # fmt: skip
    join_forward[(rows,)](
        p, steps, scores, places, counts, n, count, stride, PARTS_P=padded, CAPACITY=capacity, **kind,
        num_warps=min(16, max(4, padded * capacity // 1024)),
    )  # fmt: skip
    passes_forward[(rows,)](
        x, p, steps, counts, tops, n, count, x.stride(0), stride, PARTS_P=padded, BLOCK=shape.block,
        CAPACITY=capacity, **kind, num_warps=shape.warps,
    )  # fmt: skip
    return p


def backward(
    grad: torch.Tensor, p: torch.Tensor, alpha: torch.Tensor | None, power: int, wants_alpha: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x (R, n) and of every row's alpha (R,), empty where not wanted."""
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    rows, n = p.shape
    dx = torch.empty_like(p)
    dalpha = torch.empty(rows if wants_alpha else 0, dtype=torch.float32, device=p.device)
    steps = alpha.float().contiguous() if alpha is not None else p
    stride = 0 if alpha is None or alpha.shape[0] == 1 else 1
    shape = whole(n, power)
    if shape is not None:
        rows_backward[(triton.cdiv(rows, shape.rows),)](
            p, grad, dx, steps, dalpha, rows, n, grad.stride(0), stride, BLOCK=shape.block, R=shape.rows,
            POWER=power, WANTS_ALPHA=wants_alpha, UPCAST=INTERPRETED, num_warps=shape.warps,
        )  # fmt: skip
        return dx, dalpha
    shape = parts(n)
    count = triton.cdiv(n, shape.block)
    sums = torch.empty((4, rows, count), dtype=torch.float32, device=p.device)
    parts_backward[(rows * count,)](
        p, grad, steps, sums, n, count, grad.stride(0), stride, BLOCK=shape.block, POWER=power,
        WANTS_ALPHA=wants_alpha, num_warps=shape.warps,
    )  # fmt: skip
    join_backward[(rows * count,)](
        p, grad, dx, steps, sums, dalpha, n, count, grad.stride(0), stride, BLOCK=shape.block,
        PARTS_P=triton.next_power_of_2(count), POWER=power, WANTS_ALPHA=wants_alpha, UPCAST=INTERPRETED,
        num_warps=shape.warps,
    )  # fmt: skip
    return dx, dalpha
