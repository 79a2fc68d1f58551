"""Launches of the decode kernels: fixed grids, nothing read from the device. Imports triton: load lazily."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from ..primitives import INTERPRETED
from ..screen import padded
from .bounds import ULP, BlockBounds
from .cache import Paging
from .problem import DecodeStatistics, Problem
from .triton_bounds import bounds_kernel
from .triton_decode import attend_kernel, combine_kernel
from .triton_screen import pack_kernel, screen_kernel

_KINDS = {"norm": 1, "minmax": 2, "ball": 3, "cap": 4, "int8": 5}
# Units that one step of a scan over them takes.
_UNITS = 1024
# Parts that one step of their sum joins.
SPAN = 32
# Read the values of survivors only, not those of all keys of a block.
LAZY = True
# Launch each kernel while the one before still runs (programmatic dependent launch).
EARLY = False


class Options(NamedTuple):
    """Tile shapes and launch options of the attention kernel; found on an H200, see kernels/README.md."""

    rows: int
    keys: int
    warps: int
    stages: int
    per_sm: int
    registers: int | None = None


class Screening(NamedTuple):
    """Blocks that a program of the screen looks at, how many at a time, and launch options."""

    blocks: int
    step: int
    warps: int
    stages: int


def options(rows: int, dim: int, views: int, dtype: torch.dtype) -> Options:
    """Options by query rows of a key head, padded head dim and bytes of an element."""
    wide = dim * (2 if dtype == torch.float32 else 1)
    if INTERPRETED:
        return Options(16 if rows <= 16 else 32, 32, 4, 1, 5)
    most = 64 if wide <= 128 else 32 if wide <= 256 else 16
    bm = min(most, max(16, triton.next_power_of_2(rows)))
    keys = 64 if wide <= 128 else 32 if wide <= 256 else 16
    if wide <= 64 and bm == 16 and views == 1:
        return Options(bm, keys, 4, 3, 4, 128)
    return Options(bm, keys, 4, 3 if wide * views <= 128 else 2, 2)


def screen_options(rows: int, dim: int, views: int, dtype: torch.dtype, keys: int) -> Screening:
    """Options by rows of a tile, padded head dim and views: a step has to fit registers and shared memory.

    ``keys``: of a block whose keys are all looked at (int8), else 0.
    """
    if INTERPRETED:
        return Screening(32, 16, 4, 1)
    if keys:
        step = max(1, 128 * 128 // (max(64, dim) * max(1, rows // 32)) // keys)
        return Screening(64 * step, step, 4, 3 if views == 1 else 2)
    wide = dim * (2 if dtype == torch.float32 else 1) * max(1, rows // 32)
    step = max(16, 64 * 128 // max(128, wide))
    return Screening(512, step, 8 if wide > 256 else 4, 3 if wide * views <= 128 else 2)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _width(dim: int, dtype: torch.dtype) -> int:
    """Padded head dim. Triton 3.6 reads past shared memory in some 16-bit products with narrow tiles.

    Products of int8, of queries of any dtype, have at least 32 terms.
    """
    if INTERPRETED:
        return padded(dim)
    return max(32 if dtype == torch.float32 else 64, padded(dim))


def _place(paging: Paging, count: int, gathered: bool) -> int:
    """How :func:`.triton_cache.cache_rows` finds ``count`` rows side by side, or (gathered) several times so many."""
    if paging.table is None:
        return 3 if gathered else 0
    return 2 if gathered or paging.page_size % count else 1


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(problem: Problem, counted: bool) -> tuple[torch.Tensor, DecodeStatistics | None]:
    """Output (B, H, T, E), and with ``counted`` what was met."""
    views, paging = problem.views, problem.paging
    one, two = views[0], views[-1]
    q1, q2 = _unit_stride(one.q), _unit_stride(two.q)
    k1, k2, v = _unit_stride(one.k), _unit_stride(two.k), _unit_stride(problem.v)
    (b, h, t, d), g, e = q1.shape, k1.shape[1], v.shape[-1]
    device, rows = q1.device, h // g * t
    width = max(_width(d, q1.dtype), _width(e, q1.dtype))
    bounds = [x.bounds for x in views]
    chosen = options(rows, width, len(views), q1.dtype)
    row_blocks = triton.cdiv(rows, chosen.rows)
    units, per = b * g * row_blocks, min(rows, chosen.rows)
    blocks = triton.cdiv(paging.capacity, problem.block)
    screening = screen_options(
        chosen.rows, width, len(views), q1.dtype, problem.block if bounds[0] and bounds[0].kind == "int8" else 0
    )
    # A short cache: too few programs to read its bounds at full speed, unless each takes fewer blocks.
    busy = _processors(device)
    while units * triton.cdiv(blocks, screening.blocks) < busy and screening.blocks >= 4 * screening.step:
        screening = screening._replace(blocks=screening.blocks // 2)
    tiles = triton.cdiv(blocks, screening.blocks)
    programs = _processors(device) * chosen.per_sm

    def whole(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def part(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    out = torch.empty((b, h, t, e), dtype=v.dtype, device=device)
    stats = (whole(b, h, t), part(b, h, t), part(b, h, t)) if counted else None
    if not out.numel():
        empty = DecodeStatistics(whole(b, h, t), torch.zeros((b, g), dtype=torch.int32, device=device), None, None)
        return out, empty if counted else None
    if not paging.capacity:
        tiles = 0
    found, counts, packed, totals = whole(units, blocks), whole(units, tiles), whole(units, blocks), whole(units)
    parts = programs + units
    sums = part(parts, per, e)
    peak, mass = (part(parts, per), part(parts, per)) if problem.softmax else (sums, sums)
    alive = whole(parts, per) if counted else totals
    tau, lengths = problem.tau, totals if problem.lengths is None else problem.lengths
    table = totals if paging.table is None else paging.table
    flags = {
        "D": d, "DP": _width(d, q1.dtype), "BM": chosen.rows, "VIEWS": len(views),
        "RAGGED": problem.lengths is not None, "NORMALIZE": problem.normalize, "UPCAST": INTERPRETED,
        # float32 products are three tf32 products.
        "PREC": "tf32x3" if q1.dtype == torch.float32 else "tf32", "BLOCK": problem.block,
    }  # fmt: skip
    early = {"EARLY": True, "launch_pdl": True} if EARLY and not INTERPRETED else {"EARLY": False}
    queries = (*q1.stride()[:3], *q2.stride()[:3])
    kept = [_tensors(x, totals) for x in (bounds[0], bounds[-1])]
    if tiles:
        screen_kernel[(units * tiles,)](
            q1, q2, tau, lengths, *kept[0], *kept[1], found, counts, g, h, t, paging.capacity, rows, row_blocks, blocks,
            tiles, *queries, *tau.stride(), problem.scale, COUNT=screening.blocks, STEP=screening.step,
            KIND=0 if bounds[0] is None else _KINDS[bounds[0].kind], ULP=ULP, **flags, **early,
            num_warps=screening.warps, num_stages=screening.stages,
        )  # fmt: skip
        pack_kernel[(units * tiles,)](
            found, counts, packed, totals, blocks, tiles, COUNT=screening.blocks,
            CHUNK=min(256, triton.next_power_of_2(tiles)), **early, num_warps=2,
        )  # fmt: skip
    else:
        totals.zero_()
    ub = min(_UNITS, triton.next_power_of_2(units))
    shared = {"E": e, "EP": _width(e, q1.dtype), "UB": ub, "SOFTMAX": problem.softmax, "COUNTED": counted}
    place = _place(paging, min(chosen.keys, problem.block), problem.block < chosen.keys)
    # Looking up blocks or pages takes two steps of the software pipeline.
    stages = chosen.stages + (2 if place and not INTERPRETED else 0)
    # The compiler's pipeline cannot move products of 64 rows (warp groups) ahead of the loads that wait for them.
    lazy = LAZY and chosen.rows < 64
    attend_kernel[(programs,)](
        q1, k1, q2, k2, v, tau, totals if problem.lam is None else problem.lam, lengths, table, packed, totals, sums,
        peak, mass, alive, units, g, h, t, paging.capacity, rows, row_blocks, blocks, paging.page_size,
        table.shape[-1], programs, *queries, *k1.stride()[:3], *k2.stride()[:3], *v.stride()[:3], *tau.stride(),
        problem.scale, BN=chosen.keys, POWER=problem.power, PLACE=place, WIDE=v.dtype == torch.float16 and not
        problem.softmax, LAZY=lazy, **flags, **shared, **early, num_warps=chosen.warps, num_stages=stages,
        maxnreg=chosen.registers,
    )  # fmt: skip
    eps = problem.rms_eps
    combine_kernel[(units * per,)](
        sums, peak, mass, alive, totals, tau, out, *((alive,) * 3 if stats is None else (stats[1], stats[2], stats[0])),
        units, g, h, t, rows, row_blocks, programs, *tau.stride(), 0.0 if eps is None else eps, BM=chosen.rows,
        SPAN=SPAN, RMS=eps is not None, UPCAST=INTERPRETED, **shared, **early, num_warps=4,
    )  # fmt: skip
    if stats is None:
        return out, None
    read = totals.view(b, g, row_blocks).sum(-1, dtype=torch.int32)
    soft = stats[1:] if problem.softmax else (None, None)
    return out, DecodeStatistics(stats[0], read, *soft)


def _tensors(bounds: BlockBounds | None, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, vectors and scalars; ``other`` stands in for what is not there."""
    if bounds is None:
        return other, other, other
    vectors, scalars = bounds.vectors, bounds.scalars
    return (
        bounds.norm, vectors if vectors.numel() else bounds.norm, scalars if scalars.numel() else bounds.norm,
    )  # fmt: skip


def update(
    bounds: BlockBounds,
    k_cache: torch.Tensor,
    paging: Paging,
    start: torch.Tensor,
    length: torch.Tensor,
    touched: int,
) -> None:
    """Compute ``touched`` blocks of every head anew, from the one that ``start`` lies in on."""
    k = _unit_stride(k_cache)
    g, d = k.shape[1], k.shape[-1]
    table = start if paging.table is None else paging.table
    norm, vectors, scalars = _tensors(bounds, bounds.norm)
    dp = padded(d)
    bounds_kernel[(paging.batch * g * touched,)](
        k, table, norm, vectors, scalars, start, length, *start.stride(), *length.stride(), g, paging.capacity,
        norm.shape[2], touched, paging.page_size, table.shape[-1], *k.stride()[:3], D=d, DP=dp, BLOCK=bounds.block,
        KIND=_KINDS[bounds.kind], PLACE=_place(paging, bounds.block, False), UPCAST=INTERPRETED,
        num_warps=8 if bounds.block * dp > 8192 else 4,
    )  # fmt: skip
