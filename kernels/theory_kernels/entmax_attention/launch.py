"""Launches of the Triton kernels and their tile shapes. Imports triton: load this module lazily."""

from __future__ import annotations

import torch

from ..geometry import Geometry, remembered
from ..primitives import INTERPRETED
from .backward import key_kernel, query_kernel
from .decode import CHUNK, finish_kernel, scores_kernel, sums_kernel, threshold_kernel, values_kernel
from .forward import forward_kernel
from .lists import bounds_kernel, lists_kernel, norms_kernel
from .plan import BLOCK, FEW_ROWS, PAD, Plan, room

# How often the forward looks for the threshold anew when the weights, once summed, miss 1 by more than rounding.
TRIES = 3
# Decoding: from so many tiles of keys on, rows of more than ALONE tiles with a possible weight are solved by several
# programs each, in TURNS launches (any alpha, 1.5, 2); what is left after those, one program does.
SPLIT_FROM, ALONE, TURNS = 1024, 64, (5, 3, 3)
# Values of so many tiles are on their way at once.
VALUE_STAGES = 3


# As Triton's own, which take as long as a launch: they can be called in kernels too.
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is not less than n."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def padded(dim: int) -> int:
    """Head dim as products see it: a power of two, at least 16."""
    return max(16, power_of_two(dim))


def _tiles(kind: str, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile shapes and launch options by padded head dim; found on an H200, see kernels/README.md."""
    wide = dim * (2 if dtype == torch.float32 else 1)
    if INTERPRETED:
        small = {"bounds": {"BM": 32, "BN": 32, "NS": 2}, "lists": {"OWN": 128, "M": 16}}
        return small.get(kind, {"BM": 64, "BN": 64})
    if kind == "bounds":
        if wide <= 64:
            return {"BM": 128, "BN": 128, "NS": 8, "num_warps": 4, "num_stages": 3}
        if wide <= 128:
            return {"BM": 128, "BN": 128, "NS": 8, "num_warps": 8, "num_stages": 2}
        if wide <= 256:
            return {"BM": 64, "BN": 64, "NS": 8, "num_warps": 4, "num_stages": 2}
        return {"BM": 32, "BN": 32, "NS": 4, "num_warps": 4, "num_stages": 1}
    if kind == "lists":
        if wide <= 64:
            return {"OWN": 128, "M": 128, "num_warps": 4, "num_stages": 3}
        if wide <= 128:
            return {"OWN": 128, "M": 128, "num_warps": 8, "num_stages": 2}
        if wide <= 256:
            return {"OWN": 64, "M": 64, "num_warps": 4, "num_stages": 2}
        return {"OWN": 64, "M": 16, "num_warps": 4, "num_stages": 1}
    if wide <= 64:
        return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}
    if wide <= 128:
        return {"BM": 64, "BN": 64, "num_warps": 4 if kind == "query" else 8, "num_stages": 2}
    if wide <= 256:
        return {"BM": 64 if kind == "forward" else 32, "BN": 32, "num_warps": 8, "num_stages": 1}
    # float32 with large head dims: the operands of one tile are all that registers and shared memory hold.
    return {"BM": 16, "BN": 16, "num_warps": 4, "num_stages": 1}


def _width(dim: int, dtype: torch.dtype) -> int:
    """Padded head dim. Triton 3.6 reads past shared memory in a 16-bit product of 64x64 with 64x32 tiles."""
    return padded(dim) if INTERPRETED or dtype == torch.float32 else max(64, padded(dim))


class _Call:
    """Arguments that the kernels of one call share."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        factor: torch.Tensor,
        eps: torch.Tensor,
        geometry: Geometry,
        mode: int,
    ):
        self.q, self.k, self.v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        self.geometry = geometry
        self.b, self.h, self.t, self.d = q.shape
        self.g, self.s = k.shape[1:3]
        self.e = v.shape[-1]
        factor = factor.float().expand(self.b, self.h, self.t)
        self.eps, self.factor = eps.float().contiguous(), factor
        self.ragged = geometry.layout is not None
        layout = self.eps if geometry.layout is None else geometry.layout
        self.dims = (
            layout, geometry.sequences, self.h, self.g, self.t, self.s, geometry.max_q, geometry.max_k, geometry.offset,
        )  # fmt: skip
        self.strides = (*self.q.stride()[:3], *self.k.stride()[:3])
        self.exact_strides = (*self.strides, *self.v.stride()[:3], *factor.stride())
        self.d_wide, self.e_wide = _width(self.d, q.dtype), _width(self.e, q.dtype)
        self.width = max(self.d_wide, self.e_wide)
        self.heads = geometry.sequences * self.h
        self.plane = self.b * self.h * self.t
        self.sweep = {
            "D": self.d, "DP": self.d_wide, "CAUSAL": geometry.causal, "RAGGED": self.ragged,
            # float32 products are three tf32 products.
            "PACKED": geometry.packed, "PREC": "tf32x3" if q.dtype == torch.float32 else "tf32", "UPCAST": INTERPRETED,
        }  # fmt: skip
        self.exact = {
            **self.sweep, "E": self.e, "EP": self.e_wide, "MODE": mode, "B": BLOCK, "WIDE": q.dtype == torch.float16,
        }  # fmt: skip

    @property
    def empty(self) -> bool:
        return min(self.heads, self.t, self.s, self.geometry.max_q, self.geometry.max_k) == 0

    @property
    def few(self) -> bool:
        """Few rows a key head, and scores that take no more than keys and values: packed lengths may be unknown."""
        bound = self.geometry
        scores = 4 * self.heads * bound.max_q * bound.max_k
        given = self.k.shape[0] * self.g * self.s * (self.d + self.e) * self.k.element_size()
        return bound.max_q * (self.h // self.g) <= FEW_ROWS and scores <= given

    def like(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """An output: only ragged layouts leave rows unwritten, so only they pay for zeros."""
        return (torch.zeros if self.ragged else torch.empty)(shape, dtype=x.dtype, device=x.device)

    def identity(self, listed: bool) -> torch.Tensor:
        """The list of everything, for blocks without one: 0, 1, 2, ... past the last key and row."""
        if not listed:
            return torch.empty(0, dtype=torch.int32, device=self.q.device)
        length = power_of_two(max(self.geometry.max_q, self.geometry.max_k) + PAD)
        device = self.q.device
        make = lambda: torch.arange(length, dtype=torch.int32, device=device)  # noqa: E731 - built where it is used
        return remembered(("identity", length, device), device, make)

    def bounds(self, rows: torch.Tensor) -> None:
        """Fill ``rows`` (4, B, H, T): anchor, bound of the state, level, limit of the factor."""
        norms = torch.zeros(self.geometry.sequences * self.g, dtype=torch.int32, device=self.q.device)
        block = 256 if self.d_wide <= 64 else 64
        blocks = cdiv(self.geometry.max_k, block)
        layout, n, h, g, _, _, max_q, max_k, offset = self.dims
        norms_kernel[(norms.numel() * blocks,)](
            self.k, norms, layout, n, h, g, max_q, max_k, offset, blocks, *self.k.stride()[:3], D=self.d,
            DP=padded(self.d), BR=block, RAGGED=self.ragged, PACKED=self.geometry.packed, num_warps=4,
        )  # fmt: skip
        options = _tiles("bounds", self.d_wide, self.q.dtype)
        blocks = cdiv(max_q, options["BM"])
        bounds_kernel[(self.heads * blocks,)](
            self.q, self.k, self.factor, self.eps, norms, rows, *self.dims, self.plane, blocks, *self.strides,
            *self.factor.stride(), **self.sweep, MODE=self.exact["MODE"], **options,
        )  # fmt: skip

    def lists(self, levels: torch.Tensor, items: torch.Tensor, counts: torch.Tensor, by_rows: bool) -> None:
        """List keys for blocks of rows, or (``by_rows``) rows for blocks of keys."""
        options = _tiles("lists", self.d_wide, self.q.dtype)
        length = self.geometry.max_k if by_rows else self.geometry.max_q
        blocks = cdiv(length, options["OWN"])
        lists_kernel[(self.heads * blocks,)](
            self.q, self.k, levels, items, counts, *self.dims, items.shape[1], items.shape[2], blocks, *self.strides,
            **self.sweep, B=BLOCK, PAD=PAD, BY_ROWS=by_rows, **options,
        )  # fmt: skip


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    factor: torch.Tensor,
    eps: torch.Tensor,
    geometry: Geometry,
    mode: int,
    keep: bool,
    plan: Plan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, tilted output, rows, lists and their lengths; see :mod:`.operator`."""
    call = _Call(q, k, v, factor, eps, geometry, mode)
    shape = (*q.shape[:3], call.e)
    rows = torch.empty((4, *q.shape[:3]), dtype=torch.float32, device=q.device)
    items = torch.empty(plan.items, dtype=torch.int32, device=q.device)
    counts = torch.empty(plan.items[:2], dtype=torch.int32, device=q.device)
    if call.empty:
        none = v.new_zeros(shape if keep else (0, 0, 0, 0))
        return v.new_zeros(shape), none, rows, items, counts
    if not keep and call.few:
        return _few_rows(call, mode), v.new_empty((0, 0, 0, 0)), rows, items, counts
    out = call.like(v, shape)
    tilted = call.like(v, shape) if keep else v.new_empty((0, 0, 0, 0))
    call.bounds(rows)
    if plan.listed:
        call.lists(rows[2], items, counts, False)
    options = _tiles("forward", call.width, q.dtype)
    blocks = cdiv(geometry.max_q, options["BM"])
    forward_kernel[(call.heads * blocks,)](
        call.q, call.k, call.v, call.factor, call.eps, rows, items, counts, call.identity(plan.listed), out,
        tilted, *call.dims, *items.shape[1:], call.plane, blocks, *call.exact_strides, **call.exact, LISTED=plan.listed,
        KEEP=keep, TRIES=TRIES, **options,
    )  # fmt: skip
    return out, tilted, rows, items, counts


def _few_rows(call: _Call, mode: int) -> torch.Tensor:
    """Output of a call with few query rows and no backward to follow."""
    device = call.q.device
    layout, n, h, g, _, _, max_q, max_k, offset = call.dims
    programs, folded = n * g, max_q * (h // g)
    # One program holds the largest scores of all tiles in registers: at most 16,384.
    keys = max(16 if INTERPRETED else 64, power_of_two(cdiv(max_k, 16384)))
    tiles = cdiv(max_k, keys)
    scores = torch.empty((n * h * max_q, tiles * keys), dtype=torch.float32, device=device)
    maxima = torch.empty((n * h * max_q, tiles), dtype=torch.float32, device=device)
    found = torch.empty_like(maxima, dtype=torch.int32)
    counts = torch.empty(n * h * max_q, dtype=torch.int32, device=device)
    span = max(4, cdiv(tiles * programs, 528))
    splits = cdiv(tiles, span)
    scores_kernel[(programs * splits,)](
        call.q, call.k, scores, maxima, *call.dims, tiles, splits, span, *call.strides, **call.sweep,
        BM=max(16, power_of_two(folded)), BN=keys, num_warps=4, num_stages=3 if call.d_wide <= 128 else 2,
    )  # fmt: skip
    flags = {"MODE": mode, "RAGGED": call.ragged, "PACKED": call.geometry.packed, "BN": keys}
    split = tiles >= SPLIT_FROM
    turns = TURNS[mode]
    rows = torch.empty((4 * turns + 1 if split else 2, len(counts)), dtype=torch.float32, device=device)
    place = (layout, n, h, max_q, max_k, offset, tiles, rows.shape[1], ALONE)
    threshold_kernel[(len(counts),)](
        scores, maxima, call.factor, call.eps, found, rows, counts, *place, *call.factor.stride(),
        NP=max(16, power_of_two(tiles)), CHUNK=CHUNK, SPLIT=split, **flags, num_warps=8,
    )  # fmt: skip
    if split:
        shares = max(2, min(64, cdiv(tiles, CHUNK), cdiv(1056, len(counts))))
        sums = torch.empty((3 * turns, len(counts), shares), dtype=torch.float32, device=device)
        steps = (scores, call.factor, call.eps, found, rows, counts, sums, *place)
        fixed = {"CHUNK": CHUNK, "PARTS": power_of_two(shares), **flags, "num_warps": 8}
        for turn in range(1, turns + 1):
            sums_kernel[(len(counts) * shares,)](*steps, turn, shares, *call.factor.stride(), **fixed)
        finish_kernel[(len(counts),)](*steps, turns + 1, shares, *call.factor.stride(), **fixed)
    # Rows of many tiles want more programs, those of few have none to give them.
    shares = min(tiles, max(16, cdiv(1056, len(counts)) if split else 0))
    parts = torch.empty((shares, len(counts), call.e), dtype=torch.float32, device=device)
    values_kernel[(shares * len(counts),)](
        scores, call.v, call.factor, call.eps, found, rows, counts, parts, layout, n, h, g, max_q, max_k, offset, tiles,
        rows.shape[1], shares, len(counts), *call.v.stride()[:3], *call.factor.stride(), E=call.e,
        EP=padded(call.e), STAGES=VALUE_STAGES, **flags, num_warps=4,
    )  # fmt: skip
    total = parts.sum(0).to(call.v.dtype)
    if not call.geometry.packed:
        return total.view(call.b, h, max_q, call.e)
    # Rows of a packed batch lie where their sequences do.
    total = total.view(n, h, max_q, call.e)
    first, length = layout[0].long(), layout[1].long()
    row = torch.arange(call.t, device=device)
    own = torch.searchsorted(first, row, right=True) - 1
    within = row - first[own]
    inside = (within < length[own]) & (within < max_q)
    picked = total[own, :, within.clamp(0, max_q - 1)]
    return torch.where(inside[:, None, None], picked, 0.0).to(call.v.dtype).transpose(0, 1)[None].contiguous()


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    factor: torch.Tensor,
    eps: torch.Tensor,
    tilted: torch.Tensor,
    rows: torch.Tensor,
    items: torch.Tensor,
    counts: torch.Tensor,
    geometry: Geometry,
    mode: int,
    want_factor: bool,
    want_alpha: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, of the factor of every row, and of alpha; see :mod:`.operator`."""
    call = _Call(q, k, v, factor, eps, geometry, mode)
    if call.empty:
        zeros = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        return (zeros[0], zeros[1], zeros[2], rows.new_zeros(rows.shape[1:]), torch.zeros_like(eps))
    grad = grad.contiguous()
    dq, dk, dv = (call.like(x, (*x.shape,)) for x in (q, k, v))
    pairs = torch.empty((*rows.shape[1:], 2), dtype=torch.float32, device=q.device)
    # Where factors or states of single rows matter to the kernel that owns keys.
    rowwise = mode == 0 or call.factor.stride(2) != 0
    more = torch.empty_like(pairs)
    # Elsewhere they matter to key heads with a row whose factor has a limit, which only the device knows.
    hot = torch.zeros(geometry.sequences * call.g, dtype=torch.int32, device=q.device)
    make = torch.zeros if call.ragged or not want_factor else torch.empty
    dfactor = make(rows.shape[1:], dtype=torch.float32, device=q.device)
    dalpha = torch.zeros(rows.shape[1:], dtype=torch.float32, device=q.device) if want_alpha else dfactor
    listed = items.numel() > 0
    options = _tiles("query", call.width, q.dtype)
    blocks = cdiv(geometry.max_q, options["BM"])
    query_kernel[(call.heads * blocks,)](
        call.q, call.k, call.v, grad, tilted, call.factor, call.eps, rows, items, counts, call.identity(listed), dq,
        pairs, more, hot, dfactor, dalpha, *call.dims, *items.shape[1:], call.plane, blocks, *call.exact_strides,
        **call.exact, LISTED=listed, TEMPERED=want_factor, ALPHA=want_alpha, **options,
    )  # fmt: skip
    if listed:
        items = items.new_empty((call.heads, cdiv(geometry.max_k, BLOCK), room(geometry.max_q, True)))
        counts = counts.new_empty(items.shape[:2])
        call.lists(rows[2], items, counts, True)
    options = _tiles("key", call.width, q.dtype)
    blocks = cdiv(geometry.max_k, options["BN"])
    for each in (True,) if rowwise else (False, True):
        key_kernel[(geometry.sequences * call.g * blocks,)](
            call.q, call.k, call.v, grad, pairs, more, hot, call.factor, call.eps, items, counts, call.identity(listed),
            dk, dv, *call.dims, *items.shape[1:], call.plane, blocks, *call.exact_strides, **call.exact, LISTED=listed,
            ROWWISE=each, GATED=not rowwise, **options,
        )  # fmt: skip
    alpha = dalpha.sum((0, 2)).to(eps.dtype) if want_alpha else torch.zeros_like(eps)
    return dq, dk, dv, dfactor, alpha
