"""Public entmax of rows: validation and dispatch."""

from __future__ import annotations

import math

import torch

from ..validation import check_float, check_parameter, choose
from .operator import entmax_forward

METHODS = ("auto", "exact", "newton")


def entmax(
    x: torch.Tensor,
    alpha: float | torch.Tensor = 1.5,
    dim: int = -1,
    *,
    method: str = "auto",
    implementation: str = "auto",
) -> torch.Tensor:
    r"""alpha-entmax: ``p_j = [(alpha - 1) x_j - tau]_+^(1 / (alpha - 1))`` with tau such that p sums to one.

    alpha = 1 is softmax, 2 sparsemax (arXiv 1602.02068), 1.5 entmax15 (arXiv 1905.05702); above 2 weights
    are sparser still. Weights sum to one within rounding of the solver, without being divided by their sum.

    Parameters
    ----------
    x : torch.Tensor
        Scores of any shape and strides; float32, float16, bfloat16, or float64 (not on Triton). An entry of
        -inf has weight 0, a row of nothing else has weights 0. A row with NaN or +inf has weights NaN.
    alpha : float or torch.Tensor
        At least 1 and finite. A tensor broadcasts to the shape of x with 1 at ``dim``, may differ by row and
        receives a gradient; its values are trusted on CUDA, where a check would wait for the device.
    dim : int
        The dimension along which weights sum to one.
    method : str
        "exact" for alpha of 1.5 or 2, given as numbers: sorting (reference), or Newton steps in closed form;
        "newton" for the solver of any alpha; "auto" is "exact" where it can be.
    implementation : str
        "auto" (Triton on CUDA, chunked elsewhere), "reference", "chunked" or "triton".

    Returns
    -------
    torch.Tensor
        Weights in the shape and dtype of x.

    Raises
    ------
    TypeError
        For a wrong dtype or something that is not a tensor.
    ValueError
        For an alpha, dim, method or implementation out of range.
    """
    check_float("x", x)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, got a scalar")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must lie in {-x.dim()}..{x.dim() - 1}, got {dim}")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    chosen = choose(implementation, x)
    number, rows = _alpha(alpha, x, dim)
    closed = number in (1.5, 2.0)
    if method == "exact" and not closed:
        raise ValueError(f"method 'exact' takes an alpha of 1.5 or 2.0 as a number, got {alpha!r}")
    moved = x.movedim(dim, -1)
    if moved.numel() == 0:
        return x.clone()
    flat = moved.reshape(-1, moved.shape[-1])
    power = round(1.0 / (number - 1.0)) if closed and method != "newton" and number is not None else 0
    if rows is None:
        rows = torch.full((1,), number, dtype=_wide(x), device=x.device) if power == 0 and number is not None else None
    low, high = (1.0, math.inf) if number is None else (number, number)
    p = entmax_forward(flat, rows, power, low, high, chosen)
    return p.reshape(moved.shape).movedim(-1, dim)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _alpha(alpha: float | torch.Tensor, x: torch.Tensor, dim: int) -> tuple[float | None, torch.Tensor | None]:
    """alpha as a number, or as a tensor (1,) or (rows,) that keeps its graph."""
    if not isinstance(alpha, torch.Tensor):
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            raise TypeError(f"alpha must be a number or a tensor, got {type(alpha).__name__}")
        if not (math.isfinite(alpha) and alpha >= 1.0):
            raise ValueError(f"alpha must be finite and >= 1, got {alpha!r}")
        return float(alpha), None
    check_parameter("alpha", alpha, x)
    if alpha.device.type == "cpu" and alpha.numel() and not torch.compiler.is_compiling():
        low, high = float(alpha.detach().min()), float(alpha.detach().max())
        if not (low >= 1.0 and math.isfinite(high)):
            raise ValueError(f"alpha must be finite and >= 1, got values from {low!r} to {high!r}")
    value = alpha.to(device=x.device, dtype=_wide(x))
    if alpha.numel() == 1:
        return None, value.reshape(1)
    shape = list(x.shape)
    shape[dim] = 1
    try:
        full = value.expand(shape)
    except RuntimeError:
        raise ValueError(f"alpha must broadcast to {tuple(shape)}, got {tuple(alpha.shape)}") from None
    return None, full.movedim(dim, -1).reshape(-1)
