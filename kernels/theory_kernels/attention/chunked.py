"""Threshold attention in plain torch, a block of query rows at a time: O(T) memory, any device.

The forward keeps only the output; the backward recomputes the scores block by block.
Half-precision inputs are normalized in float32, rounded back, and multiplied in float32, which is
what the Triton kernels do; float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..geometry import (
    Geometry,
    Gradients,
    split_packed,
    tau_coefficients,
    visible_counts,
    visible_mask,
    without_padding,
)

# Scores held at once; 2^22 float32 are 16 MiB.
_SCORES = 1 << 22
_MAX_ROWS = 256


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _prepare(x: torch.Tensor, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Operand in the accumulation dtype and reciprocal norms (1 without normalization)."""
    wide = x.to(_wide(x.dtype))
    if not normalize:
        return wide, torch.ones_like(wide[..., :1])
    largest = wide.abs().amax(-1, keepdim=True) if wide.shape[-1] else wide[..., :1]
    scaled = wide / torch.where(largest > 0, largest, 1.0)
    norm = scaled.square().sum(-1, keepdim=True).sqrt()
    inverse = torch.where(norm > 0, 1.0 / torch.where(norm > 0, norm, 1.0), 0.0)
    unit = (scaled * inverse).to(x.dtype).to(wide.dtype)
    return unit, inverse / torch.where(largest > 0, largest, 1.0)


def _grouped(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, H, T, D) seen as (B, G, H / G, T, D) for G = heads."""
    return x.unflatten(1, (heads, x.shape[1] // heads))


class _Blocks:
    """What forward and backward share: prepared operands and the loop over row blocks."""

    def __init__(
        self,
        views: list[tuple[torch.Tensor, torch.Tensor]],
        v: torch.Tensor,
        beta: torch.Tensor,
        lam: torch.Tensor | None,
        geometry: Geometry,
        kappa: float,
        power: float,
        normalize: bool,
    ):
        self.geometry, self.power = geometry, power
        views = [(without_padding(q, geometry, False), without_padding(k, geometry, True)) for q, k in views]
        v = without_padding(v, geometry, True)
        self.operands = []
        for q, k in views:
            (qn, rq), (kn, rk) = _prepare(q, normalize), _prepare(k, normalize)
            self.operands.append((_grouped(qn, v.shape[1]), kn[:, :, None], rq, rk))
        wide = self.operands[0][0].dtype
        self.v = v.to(wide)[:, :, None]
        q = views[0][0]
        self.shape = (q.shape[0], v.shape[1], q.shape[1] // v.shape[1])
        table = tau_coefficients(geometry.max_k, kappa, q.shape[-1], q.dtype, q.device)
        self.c = table.to(wide)[visible_counts(geometry, q.device)]
        self.beta = beta.to(wide).view(1, v.shape[1], -1, 1, 1)
        self.lam = None if lam is None else lam.to(wide).view(1, v.shape[1], -1, 1, 1)

    def spans(self) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Yield (first row, stop row, number of keys to look at)."""
        b, g, r = self.shape
        t, s, device = self.geometry.max_q, self.geometry.max_k, self.v.device
        step = max(1, min(_MAX_ROWS, _SCORES // max(1, b * g * r * s)))
        for first in range(0, t, step):
            stop, keys = min(first + step, t), s
            if self.geometry.causal and self.geometry.layout is None:
                keys = max(0, min(s, stop + self.geometry.offset))
            if keys:
                yield first, stop, keys, visible_mask(self.geometry, first, stop, keys, device)[:, None, None]

    def excess(self, view: int, first: int, stop: int, keys: int, mask: torch.Tensor) -> torch.Tensor:
        """max(s - tau, 0), zero where masked; shape (B, G, H / G, rows, keys)."""
        q, k, _, _ = self.operands[view]
        tau = self.beta * self.c[:, None, None, first:stop, None]
        x = q[..., first:stop, :] @ k[..., :keys, :].transpose(-1, -2) - tau
        # Masked before the rectifier: a negative tau would let a masked score survive.
        return torch.where(mask, x, 0.0).clamp_min(0.0)

    def weight(self, x: torch.Tensor) -> torch.Tensor:
        if self.power == 1.0:
            return x
        return x * x if self.power == 2.0 else torch.where(x == 0, 0.0, x**self.power)

    def slope(self, x: torch.Tensor) -> torch.Tensor:
        if self.power == 1.0:
            return (x > 0).to(x.dtype)
        return 2.0 * x if self.power == 2.0 else torch.where(x > 0, self.power * x ** (self.power - 1.0), 0.0)


def forward(
    views: list[tuple[torch.Tensor, torch.Tensor]],
    v: torch.Tensor,
    beta: torch.Tensor,
    lam: torch.Tensor | None,
    geometry: Geometry,
    kappa: float,
    power: float,
    normalize: bool,
    rms_eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, H, T, E) in v's dtype and the applied output scale (B, H, T)."""
    q = views[0][0]
    out = torch.zeros((*q.shape[:3], v.shape[-1]), dtype=_wide(v.dtype), device=v.device)
    if geometry.packed:
        for rows, keys, part in split_packed(geometry):
            cut = [(a[:, :, rows], b[:, :, keys]) for a, b in views]
            piece = _raw(cut, v[:, :, keys], beta, lam, part, kappa, power, normalize)
            out[:, :, rows] = piece
    else:
        out = _raw(views, v, beta, lam, geometry, kappa, power, normalize)
    scale = torch.ones_like(out[..., 0])
    if rms_eps is not None:
        scale = torch.rsqrt(out.square().mean(-1) + rms_eps)
        out = out * scale[..., None]
    return out.to(v.dtype), scale


def _raw(
    views: list[tuple[torch.Tensor, torch.Tensor]],
    v: torch.Tensor,
    beta: torch.Tensor,
    lam: torch.Tensor | None,
    geometry: Geometry,
    kappa: float,
    power: float,
    normalize: bool,
) -> torch.Tensor:
    q = views[0][0]
    blocks = _Blocks(views, v, beta, lam, geometry, kappa, power, normalize)
    out = torch.zeros((*blocks.shape, q.shape[2], v.shape[-1]), dtype=blocks.v.dtype, device=v.device)
    for first, stop, keys, mask in blocks.spans():
        a = blocks.weight(blocks.excess(0, first, stop, keys, mask))
        if blocks.lam is not None:
            a = a - blocks.lam * blocks.weight(blocks.excess(1, first, stop, keys, mask))
        out[..., first:stop, :] = a @ blocks.v[..., :keys, :]
    return out.flatten(1, 2)


def backward(
    grad: torch.Tensor,
    views: list[tuple[torch.Tensor, torch.Tensor]],
    v: torch.Tensor,
    beta: torch.Tensor,
    lam: torch.Tensor | None,
    geometry: Geometry,
    kappa: float,
    power: float,
    normalize: bool,
) -> Gradients:
    """Gradients for ``grad`` (B, H, T, E), the gradient of the output before its scale."""
    if not geometry.packed:
        return _backward(grad, views, v, beta, lam, geometry, kappa, power, normalize)
    total = Gradients(
        [(torch.zeros_like(q), torch.zeros_like(k)) for q, k in views],
        torch.zeros_like(v),
        torch.zeros_like(beta),
        torch.zeros_like(beta),
    )
    for rows, keys, part in split_packed(geometry):
        cut = [(a[:, :, rows], b[:, :, keys]) for a, b in views]
        one = _backward(grad[:, :, rows], cut, v[:, :, keys], beta, lam, part, kappa, power, normalize)
        for (dq, dk), (dq1, dk1) in zip(total.views, one.views, strict=True):
            dq[:, :, rows] = dq1
            dk[:, :, keys] = dk1
        total.v[:, :, keys] = one.v
        total.beta.add_(one.beta)
        total.lam.add_(one.lam)
    return total


def _backward(
    grad: torch.Tensor,
    views: list[tuple[torch.Tensor, torch.Tensor]],
    v: torch.Tensor,
    beta: torch.Tensor,
    lam: torch.Tensor | None,
    geometry: Geometry,
    kappa: float,
    power: float,
    normalize: bool,
) -> Gradients:
    blocks = _Blocks(views, v, beta, lam, geometry, kappa, power, normalize)
    do = _grouped(without_padding(grad.to(blocks.v.dtype), geometry, False), v.shape[1])
    signs: list[torch.Tensor | None] = [None] if blocks.lam is None else [None, -blocks.lam]
    dq = [torch.zeros_like(o[0]) for o in blocks.operands]
    dk = [torch.zeros_like(o[1][:, :, 0]) for o in blocks.operands]
    dv = torch.zeros_like(blocks.v[:, :, 0])
    dbeta = torch.zeros(blocks.shape[1:], dtype=dv.dtype, device=v.device)
    dlam = torch.zeros_like(dbeta)
    for first, stop, keys, mask in blocks.spans():
        do_rows = do[..., first:stop, :]
        dp = do_rows @ blocks.v[..., :keys, :].transpose(-1, -2)
        a = torch.zeros_like(dp)
        for index, sign in enumerate(signs):
            x = blocks.excess(index, first, stop, keys, mask)
            w, ds = blocks.weight(x), dp * blocks.slope(x)
            if sign is None:
                a = a + w
            else:
                a, ds = a + sign * w, sign * ds
                dlam -= (dp * w).sum((0, 3, 4))
            q, k, _, _ = blocks.operands[index]
            dq[index][..., first:stop, :] = ds @ k[..., :keys, :]
            dk[index][..., :keys, :] += (ds.transpose(-1, -2) @ q[..., first:stop, :]).sum(2)
            # d tau_i / d beta = c_i; tau enters every excess with a minus sign.
            dbeta -= (ds.sum(-1) * blocks.c[:, None, None, first:stop]).sum((0, 3))
        dv[..., :keys, :] += (a.transpose(-1, -2) @ do_rows).sum(2)
    pairs = []
    for index, (q, k) in enumerate(views):
        qn, kn, rq, rk = blocks.operands[index]
        gq = dq[index].flatten(1, 2)
        gk = dk[index]
        if normalize:
            gq, gk = _through_norm(gq, qn.flatten(1, 2), rq), _through_norm(gk, kn[:, :, 0], rk)
        pairs.append((gq.to(q.dtype), gk.to(k.dtype)))
    return Gradients(pairs, dv.to(v.dtype), dbeta.flatten().to(beta.dtype), dlam.flatten().to(beta.dtype))


def _through_norm(grad: torch.Tensor, unit: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Gradient of x for y = x / |x|: (g - y <y, g>) / |x|."""
    return inverse * (grad - unit * (unit * grad).sum(-1, keepdim=True))
