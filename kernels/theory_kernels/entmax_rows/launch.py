"""Launches of the row kernels: short rows in registers, longer ones streamed, the longest in parts. Imports triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ..primitives import INTERPRETED
from .triton_long import join_backward, parts_backward
from .triton_rows import rows_backward, rows_forward
from .triton_stream import join_forward, parts_forward, stream_forward
from .triton_warp import GROUP, warp_forward

# Newton's steps for alpha <= 2 double the digits; halving [-log n, 0] to float32's takes 40.
_MOST = 64
# Longest rows whose weights are found in registers, and longest whose scores one program streams.
_IN_REGISTERS, _IN_ONE = (512, 1000) if INTERPRETED else (2048, 32768)
# Most groups of a row of several parts: their maxima lie in the registers of one program, and int16 counts them.
_WIDTH = 16384


class Shape(NamedTuple):
    """Rows and elements of a row in one program, and its warps."""

    rows: int
    block: int
    warps: int


class Stream(NamedTuple):
    """How long rows are streamed: elements of a tile, tiles of a part, parts of a row, and warps of a program.

    ``join`` warps solve a row of several parts, ``chunk`` scores at a time, with room for ``capacity`` of weight.
    """

    block: int
    pieces: int
    parts: int
    warps: int
    join: int
    chunk: int
    capacity: int


class Warp(NamedTuple):
    """Rows in one warp each: groups of a row, groups that are solved in registers, and registers a thread."""

    width: int
    capacity: int
    registers: int


def whole(n: int, power: int, most: int) -> Shape | None:
    """The program for whole rows of ``n`` in registers, or None above ``most``; found on an H200."""
    if n > (512 if INTERPRETED else most):
        return None  # in the interpreter, the kernels for long rows at sizes that it can run
    block = max(16, triton.next_power_of_2(n))
    rows = max(1, 1024 // block)
    # Few warps with much in registers: sums over a row then cross few of them. The functions of any other alpha
    # want registers of their own.
    return Shape(rows, block, min(16, max(1, rows * block // (2048 if power else 512))))


def group(x: torch.Tensor) -> int:
    """Neighbors in one thread: the elements of a 16-byte load."""
    return 16 // x.element_size()


def aligned(x: torch.Tensor) -> bool:
    """Whether 16 bytes of a row can be loaded at once, as far as the compiler is told."""
    return x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0


def stream(n: int, group: int, power: int) -> Stream:
    """The programs for long rows of ``n`` scores, of which ``group`` are loaded at once."""
    if INTERPRETED:
        pieces, parts = (3, 1) if n <= _IN_ONE else (2, triton.cdiv(n, 512))
        return Stream(256, pieces, parts, 4, 4, 256, 64)
    # Eight loads in flight a thread. Short rows in few warps: their sums cross fewer.
    warps = 1 if n <= 4096 else 2 if n <= 8192 else 4
    block = 256 * warps * group
    pieces = triton.cdiv(n, block)
    if n <= _IN_ONE:
        return _sized(block, pieces, 1, warps, warps, power)
    # As even as tiles allow.
    parts = min(max(1, _WIDTH // (256 * warps)), triton.cdiv(n, 8 * block))
    pieces = triton.cdiv(pieces, parts)
    parts = triton.cdiv(n, pieces * block)
    return _sized(block, pieces, parts, warps, min(16, max(4, triton.next_power_of_2(parts))), power)


def _sized(block: int, pieces: int, parts: int, warps: int, join: int, power: int) -> Stream:
    # Eight scores a thread: with more, fewer programs fit a multiprocessor.
    return Stream(block, pieces, parts, warps, join, 256 * join, 256 * max(join, 1 if power else 2))


def warp(n: int, group: int, power: int) -> Warp | None:
    """The program for rows of ``n`` scores in one warp each, of which ``group`` are loaded at once; None for none.

    4096 rows of 4096 in bf16 on an H200: 0.0199 ms, streamed 0.030, in registers 0.029; a copy 0.0174.
    """
    if INTERPRETED or power == 0 or group != GROUP or not 2048 < n <= 4096:
        return None
    return Warp(width=512, capacity=64, registers=64)


def parts(n: int) -> Shape:
    """The program for a part of a row of ``n`` gradients."""
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
    shape = whole(n, power, 4096 if power and x.dtype == torch.float32 and aligned(x) else _IN_REGISTERS)
    if shape is not None:
        rows_forward[(triton.cdiv(rows, shape.rows),)](
            x, p, steps, rows, n, x.stride(0), stride, BLOCK=shape.block, R=shape.rows, GROUP=group(x), **kind,
            num_warps=shape.warps,
        )  # fmt: skip
        return p
    each = group(x) if aligned(x) else 1
    one = warp(n, each, power) if each > 1 and x.storage_offset() % 2 == 0 else None
    if one is not None:
        return _warp(x, p, power, one)
    long = stream(n, each, power)
    span, width = long.pieces * long.block, long.parts * (long.block // each)
    pieces = triton.next_power_of_2(long.pieces)
    groups = torch.empty((rows, width), dtype=torch.int16, device=x.device)
    places = torch.empty((rows, long.capacity), dtype=torch.int32, device=x.device)
    kind |= {
        "BLOCK": long.block, "GROUP": each, "PIECES_P": pieces, "CHUNK": max(1, long.chunk // (pieces * each)),
        "CAPACITY": long.capacity,
    }  # fmt: skip
    if long.parts == 1:
        stream_forward[(rows,)](x, p, steps, groups, places, n, span, x.stride(0), stride, **kind, num_warps=long.warps)
        return p
    tops = torch.empty((rows, width), dtype=torch.float32, device=x.device)
    parts_forward[(rows * long.parts,)](
        x, p, tops, n, span, long.parts, x.stride(0), BLOCK=long.block, GROUP=each, UPCAST=INTERPRETED,
        num_warps=long.warps,
    )  # fmt: skip
    join_forward[(rows,)](
        x, p, steps, tops, groups, places, n, span, long.parts, x.stride(0), stride,
        PARTS_P=triton.next_power_of_2(long.parts), **kind, num_warps=long.join,
    )  # fmt: skip
    return p


# What -inf is, twice in 16 bits.
_NOTHING = {torch.bfloat16: -0x7F0080, torch.float16: -0x3FF0400}
# Scores of groups that are read at a time where they are too many for registers.
_AT_ONCE = 512


def _warp(x: torch.Tensor, p: torch.Tensor, power: int, shape: Warp) -> torch.Tensor:
    """Weights ``p`` of rows ``x`` of 16 bits, a warp a row."""
    rows, n = x.shape
    words = x.view(torch.int32)
    places = torch.empty((rows, shape.width), dtype=torch.int16, device=x.device)
    options = {"maxnreg": shape.registers} if shape.registers else {}
    warp_forward[(rows,)](
        x, words, p, places, n, words.shape[1], x.stride(0), words.stride(0), WIDTH=shape.width,
        CAPACITY=shape.capacity, CHUNK=_AT_ONCE // GROUP, THREADS=32, POWER=power,
        NOTHING=_NOTHING[x.dtype], FULL=shape.width * GROUP == n, MOST=_MOST, UPCAST=INTERPRETED, num_warps=1,
        **options,
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
    shape = whole(n, power, 32768 if power else 8192)
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
