"""Launches of the elastic kernels. Imports triton: load this module lazily."""

from __future__ import annotations

import torch
import triton

from ..attention.launch import Tiles, _width
from ..geometry import Geometry
from ..primitives import INTERPRETED
from .chunked import Gradients
from .triton_elastic import elastic_forward, elastic_keys, elastic_queries

_PRUNINGS = {"": 0, "drop": 1, "renormalize": 2, "exact": 3}


def tiles(kind: str, dim: int, dtype: torch.dtype) -> Tiles:
    """Tile shapes by padded head dim; found on an H200."""
    wide = dim * (2 if dtype == torch.float32 else 1)
    if INTERPRETED:
        return Tiles(32, 32, 4, 1)
    if wide > 256:
        return Tiles(32, 32, 4, 1) if kind == "forward" else Tiles(16, 16, 4, 1)
    if kind == "forward":
        if wide <= 64:
            return Tiles(128, 64, 4, 3)
        return Tiles(128, 64, 8, 2) if wide <= 128 else Tiles(64, 32, 8, 1)
    if wide <= 64:
        return Tiles(64, 64, 4, 2)
    return Tiles(64, 64, 8, 1) if wide <= 128 else Tiles(32, 32, 8, 1)


class _Call:
    """Arguments that the kernels of one call share."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: torch.Tensor, sharpness: torch.Tensor,
        geometry: Geometry, scale: float, reading: str, prune: str,
    ):  # fmt: skip
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.tau, self.slope = tau.float().contiguous(), sharpness.float().contiguous()
        self.geometry, self.scale = geometry, scale
        self.h, self.t, d = q.shape[1:]
        self.g, self.s, e = *k.shape[1:3], v.shape[-1]
        self.ragged = geometry.layout is not None
        self.layout = geometry.layout if geometry.layout is not None else self.tau
        self.dims = (
            geometry.sequences, self.h, self.g, self.t, self.s, geometry.max_q, geometry.max_k, geometry.offset,
        )  # fmt: skip
        self.width = max(_width(d, q.dtype), _width(e, q.dtype))
        self.flags: dict[str, object] = {
            "D": d, "DP": _width(d, q.dtype), "E": e, "EP": _width(e, q.dtype), "WEIGHT": reading == "weight",
            "PRUNE": _PRUNINGS[prune], "CAUSAL": geometry.causal, "RAGGED": self.ragged, "PACKED": geometry.packed,
            "PREC": "tf32x3" if q.dtype == torch.float32 else "tf32", "WIDE": q.dtype == torch.float16,
            "UPCAST": INTERPRETED,
        }  # fmt: skip

    @property
    def empty(self) -> bool:
        return min(self.geometry.sequences, self.t, self.s, self.geometry.max_q, self.geometry.max_k) == 0

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """An output: only ragged layouts leave rows unwritten, so only they pay for zeros."""
        make = torch.zeros if self.ragged else torch.empty
        return make(x.shape, dtype=x.dtype, device=x.device)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: torch.Tensor, sharpness: torch.Tensor, geometry: Geometry,
    scale: float, reading: str, prune: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output (B, H, T, E) and log sums (B, H, T); see :mod:`.operator`."""
    call = _Call(q, k, v, tau, sharpness, geometry, scale, reading, prune)
    shape = (*q.shape[:3], v.shape[-1])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if call.ragged or call.empty:
        lse.fill_(torch.inf)
    if call.empty:
        return torch.zeros(shape, dtype=v.dtype, device=q.device), lse
    out = (torch.zeros if call.ragged else torch.empty)(shape, dtype=v.dtype, device=q.device)
    tile = tiles("forward", call.width, q.dtype)
    blocks = triton.cdiv(geometry.max_q, tile.rows)
    elastic_forward[(geometry.sequences * call.h * blocks,)](
        call.q, call.k, call.v, call.tau, call.slope, out, lse, call.layout, *call.dims, blocks, scale, **call.flags,
        BM=tile.rows, BN=tile.keys, **tile.options(),
    )  # fmt: skip
    return out, lse


def backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: torch.Tensor, sharpness: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, geometry: Geometry, scale: float, reading: str, prune: str,
) -> Gradients:  # fmt: skip
    """Gradients for ``grad``, the gradient of the output."""
    call = _Call(q, k, v, tau, sharpness, geometry, scale, reading, prune)
    if call.empty:
        return Gradients(*(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, tau, sharpness)))
    grad = grad.contiguous()
    delta = (grad.float() * out.float()).sum(-1)
    dq, dk, dv = call.like(call.q), call.like(call.k), call.like(call.v)
    dtau, dslope = call.like(call.tau), call.like(call.tau)
    tile = tiles("backward", call.width, q.dtype)
    fixed = {**call.flags, "BM": tile.rows, "BN": tile.keys, **tile.options()}
    blocks = triton.cdiv(geometry.max_q, tile.rows)
    elastic_queries[(geometry.sequences * call.h * blocks,)](
        call.q, call.k, call.v, grad, call.tau, call.slope, lse, delta, dq, dtau, dslope, call.layout, *call.dims,
        blocks, scale, **fixed,
    )  # fmt: skip
    blocks = triton.cdiv(geometry.max_k, tile.keys)
    elastic_keys[(geometry.sequences * call.g * blocks,)](
        call.q, call.k, call.v, grad, call.tau, call.slope, lse, delta, dk, dv, call.layout, *call.dims, blocks,
        scale, **fixed,
    )  # fmt: skip
    return Gradients(dq, dk, dv, dtau.to(tau.dtype), dslope.sum((0, 2)).to(sharpness.dtype))
