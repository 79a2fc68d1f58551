"""Public elastic attention: validation and dispatch."""

from __future__ import annotations

import torch

from ..attention.api import _check_operands, _per_head
from ..geometry import build_geometry
from ..validation import autocast_device, check_number, check_parameter, choose
from . import reference
from .operator import elastic_forward

READINGS = ("logit", "weight")
PRUNINGS = (None, "drop", "renormalize", "exact")


def elastic_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tau: float | torch.Tensor | None = None,
    predictor: tuple[torch.Tensor, torch.Tensor] | None = None,
    sharpness: float | torch.Tensor = 10.0,
    reading: str = "logit",
    prune: str | None = None,
    scale: float | None = None,
    causal: bool = True,
    query_offset: int | torch.Tensor = 0,
    lengths: torch.Tensor | None = None,
    query_lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    r"""Elastic threshold attention (ETA, arXiv 2609.20888): scores below a threshold are suppressed by a soft mask.

    With ``s = scale <q, k>`` and ``m = sigmoid(sharpness (s - tau))`` the weights are ``softmax(m s)`` (reading
    "logit", with a uniform floor: a suppressed score becomes 0) or ``softmax(s + log m)`` (reading "weight", the
    printed formula m exp(s) / sum m exp(s), without a floor).

    Parameters
    ----------
    q : torch.Tensor
        Queries, (B, H, T, D); float32, float16, bfloat16, or float64 (not on Triton). Any strides.
    k : torch.Tensor
        Keys, (B, G, S, D), H a multiple of G (grouped-query attention). 1 <= D <= 256.
    v : torch.Tensor
        Values, (B, G, S, E), 1 <= E <= 256.
    tau : float or torch.Tensor
        Threshold in units of the scores: a number, or a tensor that broadcasts to (B, H, T). Differentiable.
    predictor : (torch.Tensor, torch.Tensor)
        W (H, D) and b (H,) in place of tau, which is then sigmoid(<W, q> + b) for every query. Differentiable.
    sharpness : float or torch.Tensor
        Slope of the mask, > 0; a scalar or (H,). Differentiable. Values of a tensor are trusted.
    reading : str
        "logit" or "weight".
    prune : str, optional
        None keeps the soft mask. Otherwise keys with s < tau have weight exactly 0, and the others "drop": their
        soft weights (the row then sums to 1 minus what was suppressed), "renormalize": those divided by their sum,
        or "exact": the softmax of their scores. A row without a survivor is 0.
    scale : float, optional
        Factor of the scores, 1 / sqrt(D) if not given.
    causal, query_offset, lengths, query_lengths, cu_seqlens, cu_seqlens_k, max_seqlen
        As in :func:`theory_kernels.threshold_attention`.
    implementation : str
        "auto" (Triton on CUDA, chunked elsewhere), "reference", "chunked" or "triton".

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
    if reading not in READINGS:
        raise ValueError(f"reading must be one of {', '.join(READINGS)}, got {reading!r}")
    if prune not in PRUNINGS:
        raise ValueError(f"prune must be None, drop, renormalize or exact, got {prune!r}")
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("scale", scale, 0.0, False)
    if not isinstance(sharpness, torch.Tensor):
        sharpness = check_number("sharpness", sharpness, 0.0, False)
    slope = _per_head("sharpness", sharpness, q)
    geometry = build_geometry(
        q, k, causal=causal, query_offset=query_offset, lengths=lengths, query_lengths=query_lengths,
        cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, max_seqlen=max_seqlen,
    )  # fmt: skip
    chosen = choose(implementation, q)
    with torch.autocast(autocast_device(v), enabled=False):
        rows = _thresholds(tau, predictor, q)
        if chosen == "reference":
            return reference.forward(q, k, v, rows, slope, geometry, scale, reading, prune)
        out, _ = elastic_forward(
            q, k, v, rows, slope, geometry.layout, geometry.sequences, geometry.max_q, geometry.max_k,
            geometry.offset, geometry.packed, geometry.causal, scale, reading, prune or "", chosen,
        )  # fmt: skip
    return out


def _thresholds(
    tau: float | torch.Tensor | None, predictor: tuple[torch.Tensor, torch.Tensor] | None, q: torch.Tensor
) -> torch.Tensor:
    """tau of every row, (B, H, T) in float32 or float64, with its graph."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if (tau is None) == (predictor is None):
        raise ValueError(f"give tau or predictor, one of the two, got {'neither' if tau is None else 'both'}")
    if predictor is not None:
        w, b = predictor
        for name, x, shape in (("w", w, (q.shape[1], q.shape[3])), ("b", b, (q.shape[1],))):
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                raise TypeError(f"predictor {name} must be a floating-point tensor, got {type(x).__name__}")
            if x.shape != shape:
                raise ValueError(f"predictor {name} must have shape {shape}, got {tuple(x.shape)}")
        logit = (q.to(wide) @ w.to(q.device, wide)[:, :, None])[..., 0]
        return torch.sigmoid(logit + b.to(q.device, wide)[:, None])
    if not isinstance(tau, torch.Tensor):
        if isinstance(tau, bool) or not isinstance(tau, (int, float)):
            raise TypeError(f"tau must be a number or a tensor, got {type(tau).__name__}")
        tau = torch.tensor(check_number("tau", tau, -float("inf"), False), dtype=wide, device=q.device)
    check_parameter("tau", tau, q)
    try:
        return tau.to(q.device, wide).expand(q.shape[:3]).contiguous()
    except RuntimeError:
        raise ValueError(f"tau must broadcast to {tuple(q.shape[:3])}, got {tuple(tau.shape)}") from None
