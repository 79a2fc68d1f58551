"""Launches of the Triton kernels: which one, with what tile shapes. Imports triton: load this module lazily."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ..geometry import Geometry, Gradients, rows_of, tau_coefficients, visible_counts
from ..primitives import INTERPRETED
from ..screen import Gate, Operands, cleaned, padded, prepare, quantize, screen, transpose
from .backward import key_kernel, query_kernel
from .forward import forward_kernel
from .lists import Lists, fill_lists, make_lists
from .paths import choose_paths
from .plan import DENSE, LISTS, SPLIT_ROWS, TILE, TILES, Plan, mark_words

Views = list[tuple[torch.Tensor, torch.Tensor]]


class Tiles(NamedTuple):
    """Tile shape and launch options of one kernel."""

    rows: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def _tiles(kind: str, dim: int, views: int, dtype: torch.dtype, keys: int = 0, rows: int = 0) -> Tiles:
    """Tile shapes by padded head dim, keys and rows; found on an H200, see kernels/README.md."""
    wide = dim * (2 if dtype == torch.float32 else 1)
    if kind == "lists" and wide <= 64:
        return Tiles(TILE, TILE, 4, 3)
    if kind in ("tiles", "lists"):
        return Tiles(TILE, TILE, 4 if wide <= 128 else 8, 2 if wide <= 128 else 1)
    if INTERPRETED:
        return Tiles(32, 32, 4, 1)
    if kind == "split":
        return Tiles(16 if rows <= 16 or wide > 128 else 32, 64 if wide <= 128 else 32, 4, 2)
    if wide > 256:
        # float32 with large head dims: the operands of one tile are all that shared memory holds.
        return Tiles(32, 32, 4, 1) if kind == "forward" and views == 1 else Tiles(16, 16, 4, 1)
    if kind == "forward":
        if wide <= 64:
            if views == 2 or keys <= 4096:
                return Tiles(64, 64, 4, 3)
            return Tiles(64, 128, 4, 3) if keys <= 32768 else Tiles(128, 64, 4, 3)
        return Tiles(128, 64, 8, 2) if wide <= 128 else Tiles(64, 32, 8, 1)
    if wide <= 64:
        return Tiles(64, 64, 4, 4 if views == 1 else 3)
    return Tiles(64, 64, 8, 1) if wide <= 128 else Tiles(32, 32, 8, 1)


def row_coefficients(geometry: Geometry, rows: int, kappa: float, head_dim: int, device: torch.device) -> torch.Tensor:
    """tau / beta of every stored row, float32 of shape (B or 1, rows)."""
    table = tau_coefficients(geometry.max_k, kappa, head_dim, torch.float32, device)
    if geometry.layout is None:
        low = geometry.offset + 1
        if geometry.causal and low >= 0 and low + rows <= table.shape[0]:
            return table[None, low : low + rows]
        return table[visible_counts(geometry._replace(sequences=1), device)]
    if not geometry.packed:
        return table[visible_counts(geometry, device)]
    q0, _, _, k_len, offset = rows_of(geometry, device)
    row = torch.arange(rows, device=device)
    n = torch.searchsorted(q0, row, right=True) - 1
    seen = k_len[n]
    if geometry.causal:
        seen = torch.minimum((row - q0[n] + offset[n] + 1).clamp_min(0), seen)
    return table[seen][None]


def _width(dim: int, dtype: torch.dtype) -> int:
    """Padded head dim. Triton 3.6 reads past shared memory in a 16-bit product of 64x64 with 64x32 tiles."""
    return padded(dim) if INTERPRETED or dtype == torch.float32 else max(64, padded(dim))


class _Call:
    """Arguments that the kernels of one call share."""

    def __init__(
        self,
        views: Views,
        v: torch.Tensor,
        beta: torch.Tensor,
        lam: torch.Tensor | None,
        geometry: Geometry,
        kappa: float,
        power: float,
    ):
        q, k = views[0]
        self.geometry, self.views = geometry, len(views)
        self.b, self.h, self.t, self.d = q.shape
        self.g, self.s = k.shape[1:3]
        self.e = v.shape[-1]
        self.v = v if v.stride(-1) == 1 else v.contiguous()
        self.c = row_coefficients(geometry, self.t, kappa, self.d, q.device)
        self.beta = beta.float()
        self.tau = torch.empty((self.b, self.h, self.t), dtype=torch.float32, device=q.device)
        self.lam = beta if lam is None else lam
        self.ragged = geometry.layout is not None
        self.layout = geometry.layout if geometry.layout is not None else self.tau
        self.dims = (
            geometry.sequences, self.h, self.g, self.t, self.s, geometry.max_q, geometry.max_k, geometry.offset,
        )  # fmt: skip
        self.v_strides = self.v.stride()[:3]
        self.width = max(_width(self.d, q.dtype), _width(self.e, q.dtype))
        self.flags: dict[str, object] = {
            "D": self.d, "DP": _width(self.d, q.dtype), "E": self.e, "EP": _width(self.e, q.dtype), "VIEWS": self.views,
            "POWER": power, "CAUSAL": geometry.causal, "RAGGED": self.ragged, "PACKED": geometry.packed,
            # float16 tiles are widened, float32 products are three tf32 products.
            "PREC": "tf32x3" if q.dtype == torch.float32 else "tf32", "WIDE": q.dtype == torch.float16,
            "UPCAST": INTERPRETED,
        }  # fmt: skip

    def prepare(
        self, view: tuple[torch.Tensor, torch.Tensor], normalize: bool, screened: bool, raw_keys: bool = False
    ) -> Operands:
        """Operands of a view; fills ``tau``. ``raw_keys`` leaves normalizing the keys to the kernel that loads them."""
        if screened:
            view = cleaned(view, self.geometry)
        return prepare(*view, normalize, screened, self.c[:, None, :], self.beta, self.tau, raw_keys)

    @property
    def folded(self) -> int:
        """Rows of a key head with the rows of all its query heads one after another."""
        return self.t if self.geometry.packed else self.t * (self.h // self.g)

    @property
    def empty(self) -> bool:
        return min(self.geometry.sequences, self.t, self.s, self.geometry.max_q, self.geometry.max_k) == 0

    def like(self, x: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """An output: only ragged layouts leave rows unwritten, so only they pay for zeros."""
        make = torch.zeros if self.ragged else torch.empty
        return make(x.shape if shape is None else shape, dtype=x.dtype, device=x.device)


def _last_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() else x.contiguous()


def forward(
    views: Views,
    v: torch.Tensor,
    beta: torch.Tensor,
    lam: torch.Tensor | None,
    geometry: Geometry,
    kappa: float,
    power: float,
    normalize: bool,
    rms_eps: float | None,
    plan: Plan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, output scale, bitmap, lists, their spans and paths; see :mod:`.operator`."""
    call = _Call(views, v, beta, lam, geometry, kappa, power)
    q = views[0][0]
    shape = (call.b, call.h, call.t, call.e)
    words = torch.zeros(plan.bitmap, dtype=torch.int32, device=q.device)
    paths = torch.empty(plan.paths, dtype=torch.int32, device=q.device)
    kept = _Kept(words, *make_lists(plan.marks, plan.capacity, q.device), paths)
    if call.empty:
        scale = torch.full(shape[:3] if rms_eps is not None else (0,), (rms_eps or 1.0) ** -0.5, device=q.device)
        return torch.zeros(shape, dtype=v.dtype, device=q.device), scale, *kept
    out = call.like(v, shape)
    scale = torch.empty(shape[:3] if rms_eps is not None else (0,), dtype=torch.float32, device=q.device)
    if rms_eps is not None and call.ragged:
        scale.fill_(rms_eps**-0.5)
    split = not plan.screened and geometry.max_q <= SPLIT_ROWS and geometry.max_k > 4 * TILE
    raw = split and normalize and call.folded <= SPLIT_ROWS and all(k.is_contiguous() for _, k in views)
    operands = [call.prepare(view, normalize, plan.screened, raw) for view in views]
    rows = [(x.q, x.k) for x in operands]
    if split:
        _split_forward(call, rows, out, scale, kept, rms_eps, raw)
        return out, scale, *kept
    if plan.screened:
        choose_paths(operands, geometry, paths, plan.capacity > 0)
        # The rows of packed sequences share one int8 scale, so no head of theirs can be left out.
        gate = None if geometry.packed else Gate(paths, DENSE)
        small = [quantize(x, gate) for x in operands]
        for index, x in enumerate(small):
            screen(x, geometry, words, TILE, Gate(paths, TILES), index > 0)
        if plan.capacity:
            fill_lists(Lists(kept.items, kept.spans), small, geometry, plan.marks[2], words, paths, False)
    for path, kind in _kernels(kept, "forward"):
        _run_forward(call, rows, out, scale, kept, path, kind, rms_eps)
    return out, scale, *kept


class _Kept(NamedTuple):
    """What the screen leaves for the exact kernels; empty without a screen."""

    words: torch.Tensor
    items: torch.Tensor
    spans: torch.Tensor
    paths: torch.Tensor

    def sizes(self) -> tuple[int, int, int, int]:
        """Blocks and words of the bitmap, blocks and capacity of the lists."""
        return (*self.words.shape[1:], self.spans.shape[2], self.items.shape[1])


def _kernels(kept: _Kept, kind: str) -> list[tuple[int, str]]:
    """Paths to launch and the tile shapes of each: every head takes one, and the choice never leaves the device."""
    tiles = [(TILES, "tiles")] if kept.words.numel() else []
    lists = [(LISTS, "lists")] if kept.items.numel() else []
    return [*tiles, *lists, (DENSE, kind)]


def _run_forward(
    call: _Call,
    operands: Views,
    out: torch.Tensor,
    scale: torch.Tensor,
    kept: _Kept,
    path: int,
    kind: str,
    rms_eps: float | None,
) -> None:
    (q1, k1), (q2, k2) = operands[0], operands[-1]
    tiles = _tiles(kind, call.width, call.views, q1.dtype, call.geometry.max_k)
    blocks = triton.cdiv(call.geometry.max_q, tiles.rows)
    forward_kernel[(call.geometry.sequences * call.h * blocks,)](
        q1, k1, q2, k2, call.v, call.tau, call.lam, out, scale, *kept, call.layout, *call.dims, *kept.sizes(), 0,
        blocks, 1, 0, 1, *call.tau.stride()[:2], *call.v_strides, 0.0 if rms_eps is None else rms_eps,
        **call.flags, BM=tiles.rows, BN=tiles.keys, PATH=path, SPLIT=False, FOLD=False, UNIT=False,
        GATE=kept.paths.numel() > 0, RMS=rms_eps is not None, **tiles.options(),
    )  # fmt: skip


def _split_forward(
    call: _Call,
    operands: Views,
    out: torch.Tensor,
    scale: torch.Tensor,
    kept: _Kept,
    rms_eps: float | None,
    raw: bool,
) -> None:
    """Few rows, many keys: programs share the keys of a row; the parts add up without any rescaling.

    The query heads of a key head are folded into one head, so that they share its loads.
    """
    (q1, k1), (q2, k2) = operands[0], operands[-1]
    geometry, fold = call.geometry, call.folded > call.t
    heads, length = (call.g, call.folded) if fold else (call.h, geometry.max_q)
    dims = (geometry.sequences, heads, call.g, call.folded if fold else call.t, *call.dims[4:])
    tiles = _tiles("split", call.width, call.views, out.dtype, rows=length)
    blocks = triton.cdiv(length, tiles.rows)
    steps = triton.cdiv(geometry.max_k, tiles.keys)
    span = max(4, triton.cdiv(steps * geometry.sequences * heads * blocks, 528))
    splits = triton.cdiv(steps, span)
    make = torch.zeros if call.ragged else torch.empty
    parts = make((splits, *out.shape), dtype=torch.float32, device=out.device)
    tau_b, tau_h = call.tau.stride()[:2]
    forward_kernel[(geometry.sequences * heads * blocks * splits,)](
        q1, k1, q2, k2, call.v, call.tau, call.lam, parts, scale, *kept, call.layout, *dims, *kept.sizes(),
        parts[0].numel() // call.e, blocks, splits, span, call.t, tau_b, tau_h * (call.h // heads), *call.v_strides,
        0.0, **call.flags, BM=tiles.rows, BN=tiles.keys, PATH=DENSE, SPLIT=True, FOLD=fold, UNIT=raw,
        GATE=False, RMS=False, **tiles.options(),
    )  # fmt: skip
    total = parts.sum(0)
    if rms_eps is not None:
        torch.rsqrt(total.square().mean(-1) + rms_eps, out=scale)
        total = total * scale[..., None]
    out.copy_(total)


def backward(
    grad: torch.Tensor,
    views: Views,
    v: torch.Tensor,
    beta: torch.Tensor,
    lam: torch.Tensor | None,
    words: torch.Tensor,
    items: torch.Tensor,
    spans: torch.Tensor,
    paths: torch.Tensor,
    geometry: Geometry,
    kappa: float,
    power: float,
    normalize: bool,
) -> Gradients:
    """Gradients for ``grad``, the gradient of the output before its scale."""
    call = _Call(views, v, beta, lam, geometry, kappa, power)
    listed = words.numel() > 0
    if call.empty:
        zeros = [(torch.zeros_like(q), torch.zeros_like(k)) for q, k in views]
        return Gradients(zeros, torch.zeros_like(v), torch.zeros_like(beta), torch.zeros_like(beta))
    grad = _last_contiguous(grad)
    lists = items.numel() > 0
    operands = [call.prepare(view, normalize, lists) for view in views]
    one, two = operands[0], operands[-1]
    dq, dk = [call.like(x.q) for x in operands], [call.like(x.k) for x in operands]
    dv = call.like(v, (*v.shape,))
    dtau = call.like(call.tau, (call.b, call.h, call.t))
    dlam = call.like(dtau) if call.views == 2 else dtau
    key_blocks = triton.cdiv(geometry.max_k, TILE)
    # A list that does not fit changes the path of its key head.
    paths = paths.clone() if lists else paths
    kept = _Kept(words, items, spans, paths)
    turned = kept._replace(words=transpose(words, key_blocks)) if listed else kept
    if lists:
        gate = None if geometry.packed else Gate(paths[words.shape[0] :], LISTS, True)
        marks = (words.shape[0], key_blocks, mark_words(geometry.max_q))
        found = make_lists(marks, items.shape[1], v.device)
        fill_lists(found, [quantize(x, gate) for x in operands], geometry, marks[2], words, paths, True)
        turned = turned._replace(items=found.items, spans=found.spans)
    for path, kind in _kernels(kept, "backward"):
        tiles = _tiles(kind, call.width, call.views, v.dtype)
        fixed = {
            **call.flags, "BM": tiles.rows, "BN": tiles.keys, "PATH": path, "GATE": listed,
            "NORMALIZE": normalize, **tiles.options(),
        }  # fmt: skip
        blocks = triton.cdiv(geometry.max_q, tiles.rows)
        query_kernel[(geometry.sequences * call.h * blocks,)](
            one.q, one.k, two.q, two.k, call.v, grad, call.tau, call.lam, one.inverse_q, two.inverse_q,
            dq[0], dq[-1], dtau, dlam, *kept, call.layout, *call.dims, *kept.sizes(), blocks,
            *call.tau.stride()[:2], *call.v_strides, **fixed,
        )  # fmt: skip
        blocks = triton.cdiv(geometry.max_k, tiles.keys)
        key_kernel[(geometry.sequences * call.g * blocks,)](
            one.q, one.k, two.q, two.k, call.v, grad, call.tau, call.lam, one.inverse_k, two.inverse_k,
            dk[0], dk[-1], dv, *turned, call.layout, *call.dims, *turned.sizes(), blocks,
            *call.tau.stride()[:2], *call.v_strides, **fixed,
        )  # fmt: skip
    dbeta = (dtau * call.c[:, None, :]).sum((0, 2))
    total = dlam.sum((0, 2)) if call.views == 2 else torch.zeros_like(beta)
    pairs = list(zip(dq, dk, strict=True))
    return Gradients(pairs, dv, dbeta.to(beta.dtype), total.to(beta.dtype))
