"""Public entmax attention: validation and dispatch."""

from __future__ import annotations

import math

import torch

from ..attention.api import _check_operands, _per_head
from ..geometry import build_geometry, constant
from ..validation import autocast_device, check_number, check_parameter, choose
from . import reference
from .operator import entmax_forward

# Closest to softmax that alpha may come; float32 cannot tell 1 + 2^-24 from 1.
LEAST_EPS = 2.0**-20
# Codes of the kernels: any alpha, and those with closed steps.
ANY, ONE_AND_A_HALF, TWO = 0, 1, 2


def entmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    alpha: float | torch.Tensor = 1.5,
    scale: float | None = None,
    theta: float | torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    causal: bool = True,
    query_offset: int | torch.Tensor = 0,
    lengths: torch.Tensor | None = None,
    query_lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    implementation: str = "auto",
    list_from: int | None = None,
) -> torch.Tensor:
    r"""alpha-entmax attention: ``o_i = sum_j p_ij v_j``, p_i = entmax_alpha of the scores that row i sees.

    ``p_j = [(alpha - 1) z_j - tau]_+^(1 / (alpha - 1))`` with the tau that makes them sum to 1 (Peters et al., ACL
    2019), of the scores ``z_ij = scale * temperature_i * <q_i, k_j>``. ASEntmax (arXiv 2506.16640) has
    ``temperature = delta + softplus(w_b.x) (log n)^tanh(w_g.x)``, or ``1 / theta`` for each head. A row that sees no
    key, or only scores of -inf, is exactly 0.

    Parameters
    ----------
    q : torch.Tensor
        Queries, (B, H, T, D); float32, float16, bfloat16, or float64 (not on Triton). Any strides.
    k : torch.Tensor
        Keys, (B, G, S, D), H a multiple of G (grouped-query attention). 1 <= D <= 256.
    v : torch.Tensor
        Values, (B, G, S, E), 1 <= E <= 256.
    alpha : float or torch.Tensor
        In (1, 2]; a scalar or shape (H,). Differentiable. Values on a CUDA device are not checked, which would wait
        for it, but brought into [1 + 2^-20, 2]. The numbers 1.5 and 2 have closed forms, some three times as fast, also
        under torch.compile; so has a CPU tensor of one of them alone, but none whose values are not read: on a CUDA
        device, or while a graph is traced.
    scale : float, optional
        Factor of every score; None takes D^-0.5.
    theta : float or torch.Tensor, optional
        Divides the scores, > 0; a scalar or shape (H,). Differentiable. A larger one gives a larger support.
    temperature : torch.Tensor, optional
        Multiplies the scores, >= 0; broadcastable to (B, H, T). Differentiable. Excludes theta. Values on a CUDA device
        are not checked; a negative one gives NaN.
    causal, query_offset, lengths, query_lengths, cu_seqlens, cu_seqlens_k, max_seqlen
        As in :func:`theory_kernels.threshold_attention`.
    implementation : str
        "auto" (Triton on CUDA, chunked elsewhere), "reference", "chunked" or "triton".
    list_from : int, optional
        Number of keys from which the Triton implementation lists the keys that can matter; None takes the measured
        default.

    Returns
    -------
    torch.Tensor
        (B, H, T, E) in v's dtype (under autocast, in its dtype).

    Raises
    ------
    TypeError
        For a wrong dtype or something that is not a tensor.
    ValueError
        For shapes, devices, or values out of range.
    """
    _check_operands(("q", "k", "v"), (q, k, v))
    if torch.is_autocast_enabled(autocast_device(v)):
        dtype = torch.get_autocast_dtype(autocast_device(v))
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    elif isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    elif not math.isfinite(scale) or scale < 0:
        raise ValueError(f"scale must be finite and >= 0, got {scale!r}")
    if list_from is not None and list_from < 0:
        raise ValueError(f"list_from must be at least 0, got {list_from}")
    eps, mode = _eps(alpha, q)
    factor = _factor(float(scale), theta, temperature, q)
    geometry = build_geometry(
        q, k, causal=causal, query_offset=query_offset, lengths=lengths, query_lengths=query_lengths,
        cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, max_seqlen=max_seqlen,
    )  # fmt: skip
    chosen = choose(implementation, q)
    if chosen == "reference":
        with torch.autocast(autocast_device(v), enabled=False):
            return reference.forward(q, k, v, factor, eps, geometry)
    trained = torch.is_grad_enabled()
    keep = trained and any(x.requires_grad for x in (q, k, v, factor, eps))
    out, *_ = entmax_forward(
        q, k, v, factor, eps, geometry.layout, geometry.sequences, geometry.max_q, geometry.max_k, geometry.offset,
        geometry.packed, geometry.causal, mode, chosen, keep, trained and factor.requires_grad,
        trained and eps.requires_grad, list_from,
    )  # fmt: skip
    return out


def _eps(alpha: float | torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, int]:
    """alpha - 1, (H,) in the dtype of sums, and the code of the kernels that fit."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = q.shape[1]
    if not isinstance(alpha, torch.Tensor):
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            raise TypeError(f"alpha must be a number or a tensor, got {type(alpha).__name__}")
        if not 1.0 < alpha <= 2.0:
            raise ValueError(f"alpha must lie in (1, 2], got {alpha!r}")
        mode = {1.5: ONE_AND_A_HALF, 2.0: TWO}.get(float(alpha), ANY)
        value = max(float(alpha) - 1.0, LEAST_EPS)
        if type(q) in (torch.Tensor, torch.nn.Parameter):
            return constant(value, heads, dtype, q.device), mode
        # Subclasses (fake tensors of a tracer, say) must not meet remembered plain ones.
        return torch.full((heads,), value, dtype=dtype, device=q.device), mode
    mode = ANY
    if alpha.device.type == "cpu" and alpha.is_floating_point() and alpha.numel() and not torch.compiler.is_compiling():
        low, high = float(alpha.detach().min()), float(alpha.detach().max())
        if not (low > 1.0 and high <= 2.0):
            raise ValueError(f"alpha must lie in (1, 2], got values from {low:g} to {high:g}")
        if low == high:
            mode = {1.5: ONE_AND_A_HALF, 2.0: TWO}.get(low, ANY)
    # Subtracted before it is narrowed: 1 + 1e-6 has few digits left in float32.
    eps = _per_head("alpha", alpha.double() - 1.0 if alpha.is_floating_point() else alpha, q)
    # The gradient passes outside too, so that an alpha beyond its range can come back.
    return eps + (eps.clamp(LEAST_EPS, 1.0) - eps).detach(), mode


def _factor(
    scale: float, theta: float | torch.Tensor | None, temperature: torch.Tensor | None, q: torch.Tensor
) -> torch.Tensor:
    """What <q, k> is multiplied with: broadcastable to (B, H, T), in the dtype of sums."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if theta is not None and temperature is not None:
        raise ValueError("theta excludes temperature: give one of the two")
    if theta is not None:
        if not isinstance(theta, torch.Tensor):
            theta = check_number("theta", theta, 0.0, False)
        elif theta.device.type == "cpu" and theta.numel() and not torch.compiler.is_compiling():
            low = float(theta.detach().min())
            if not low > 0:
                raise ValueError(f"theta must be > 0, got a smallest value of {low:g}")
        return scale / _per_head("theta", theta, q)[None, :, None]
    if temperature is None:
        if type(q) in (torch.Tensor, torch.nn.Parameter):
            return constant(scale, 1, dtype, q.device)[:, None, None]
        return torch.full((1, 1, 1), scale, dtype=dtype, device=q.device)
    if not isinstance(temperature, torch.Tensor):
        raise TypeError(f"temperature must be a tensor, got {type(temperature).__name__}")
    check_parameter("temperature", temperature, q)
    try:
        fits = torch.broadcast_shapes(temperature.shape, q.shape[:3]) == q.shape[:3]
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"temperature must broadcast to {tuple(q.shape[:3])}, got {tuple(temperature.shape)}")
    if temperature.device.type == "cpu" and temperature.numel() and not torch.compiler.is_compiling():
        low = float(temperature.detach().min())
        if not low >= 0:
            raise ValueError(f"temperature must be >= 0, got a smallest value of {low:g}")
    factor = scale * temperature.to(device=q.device, dtype=dtype)
    return factor[(None,) * (3 - factor.dim())]
