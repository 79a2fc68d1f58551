"""Backward of the output norm, in one pass over the gradient and the output. Imports triton: load lazily."""

# mypy: disable-error-code="no-untyped-def"
# Arguments of jitted functions are pointers and tiles that Python has no types for.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..primitives import INTERPRETED, SIZES, narrow
from ..screen import padded

_ROWS = 64


@triton.jit(do_not_specialize=SIZES)
def _norm_backward_kernel(
    GRAD, OUT, SCALE, DX, H, T, BLOCKS, grad_b, grad_h, grad_t, E: tl.constexpr, EP: tl.constexpr, BR: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    bh, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    rows, cols = block * BR + tl.arange(0, BR), tl.arange(0, EP)
    inside = (rows < T)[:, None] & (cols < E)[None, :]
    at = (bh.to(tl.int64) * T + rows)[:, None] * E + cols[None, :]
    start = GRAD + (bh // H).to(tl.int64) * grad_b + (bh % H).to(tl.int64) * grad_h
    grad = tl.load(start + rows.to(tl.int64)[:, None] * grad_t + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    out = tl.load(OUT + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(SCALE + bh.to(tl.int64) * T + rows, mask=rows < T, other=0.0)
    mean = tl.sum(grad * out, 1) * (1.0 / E)
    dx = scale[:, None] * (grad - out * mean[:, None])
    tl.store(DX + at, narrow(dx, DX.dtype.element_ty, UPCAST), mask=inside)


def norm_backward(grad: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gradient before the norm o = r x, r = (mean x^2 + eps)^(-1/2): dx = r (do - o mean(do o)).

    Parameters
    ----------
    grad : torch.Tensor
        do (B, H, T, E), any strides.
    out : torch.Tensor
        o (B, H, T, E).
    scale : torch.Tensor
        r (B, H, T), float32, contiguous.
    dtype : torch.dtype
        Of the result, (B, H, T, E) contiguous.
    """
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    out = out.contiguous()
    b, h, t, e = out.shape
    dx = torch.empty((b, h, t, e), dtype=dtype, device=out.device)
    blocks = triton.cdiv(t, _ROWS)
    if dx.numel():
        _norm_backward_kernel[(b * h * blocks,)](
            grad, out, scale, dx, h, t, blocks, *grad.stride()[:3], E=e, EP=padded(e), BR=_ROWS, UPCAST=INTERPRETED,
            num_warps=4,
        )  # fmt: skip
    return dx
