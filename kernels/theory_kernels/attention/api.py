"""Public threshold attention: validation and dispatch."""

# mypy: disable-error-code="no-untyped-def"
# The private functions repeat the types of the public ones, all at once.
from __future__ import annotations

import torch

from ..geometry import MAX_HEAD_DIM, build_geometry, constant
from ..validation import (
    autocast_device,
    check_heads,
    check_number,
    check_operands,
    check_parameter,
    choose,
)
from . import reference
from .operator import threshold_forward
from .plan import SCREEN_FROM_TRAINING


def threshold_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    beta: float | torch.Tensor,
    kappa: float = 1.0,
    power: float = 2.0,
    normalize: bool = True,
    causal: bool = True,
    query_offset: int | torch.Tensor = 0,
    lengths: torch.Tensor | None = None,
    query_lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    rms_eps: float | None = None,
    implementation: str = "auto",
    screen_from: int | None = None,
) -> torch.Tensor:
    r"""Threshold rectified attention (TRA): ``o_i = sum_j max(<q_i, k_j> - tau_i, 0)^p v_j``.

    The threshold is ``tau_i = beta * sqrt(2 max(0, log(n_i / kappa)) / d)`` with n_i the number of
    keys that row i sees (arXiv 2601.12145, section 3 and Theorem 4.3; the clamp is ours, the printed
    formula is imaginary for n_i < kappa). A row without a survivor is exactly 0.

    Parameters
    ----------
    q : torch.Tensor
        Queries, (B, H, T, D); float32, float16, bfloat16, or float64 (not on Triton). Any strides.
    k : torch.Tensor
        Keys, (B, G, S, D), H a multiple of G (grouped-query attention). 1 <= D <= 256.
    v : torch.Tensor
        Values, (B, G, S, E), 1 <= E <= 256.
    beta : float or torch.Tensor
        Threshold scale, dimensionless; a scalar or shape (H,). Differentiable. May be negative.
    kappa : float
        Expected number of false survivors a row, > 0.
    power : float
        p >= 1, any real number.
    normalize : bool
        Divide queries and keys by their norms first (cosine scores). Zero rows stay zero.
    causal : bool
        Row i sees the keys j <= i + query_offset; otherwise all keys.
    query_offset : int or torch.Tensor
        Key position of query row 0, an int or an integer tensor (B,): S - T for decoding and chunked
        prefill with a KV cache. Rows with a negative position see nothing.
    lengths : torch.Tensor, optional
        Number of valid keys of each sequence, integer (B,). Keys after it are ignored; with
        ``causal`` so are query rows whose position is past it (their output is 0).
    query_lengths : torch.Tensor, optional
        Number of valid query rows, integer (B,).
    cu_seqlens, cu_seqlens_k : torch.Tensor, optional
        Packed sequences: q is (1, H, total, D) and sequence n takes rows cu[n] .. cu[n + 1] - 1.
        ``cu_seqlens_k`` defaults to ``cu_seqlens``. Values of CUDA tensors are trusted, those of CPU tensors
        checked: a check would wait for the device. The same holds for the lengths, which are clamped.
    max_seqlen : int, optional
        Bound of the packed lengths, trusted; without it the total is used, which is slower and never wrong.
    rms_eps : float, optional
        Divide each output row by ``sqrt(mean(o^2) + rms_eps)``; None leaves the output as it is.
    implementation : str
        "auto" (Triton on CUDA, chunked elsewhere), "reference", "chunked" or "triton".
    screen_from : int, optional
        Number of keys from which the Triton implementation screens tiles; None takes the measured default
        (lower where a gradient is wanted, because the backward uses the bitmap too).

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
    return _attention(
        [(q, k)], v, beta, None, kappa, power, normalize, causal, query_offset, lengths, query_lengths,
        cu_seqlens, cu_seqlens_k, max_seqlen, rms_eps, implementation, screen_from, ("q", "k"),
    )  # fmt: skip


def differential_threshold_attention(
    q1: torch.Tensor,
    k1: torch.Tensor,
    q2: torch.Tensor,
    k2: torch.Tensor,
    v: torch.Tensor,
    *,
    beta: float | torch.Tensor,
    lam: float | torch.Tensor,
    kappa: float = 1.0,
    power: float = 2.0,
    normalize: bool = True,
    causal: bool = True,
    query_offset: int | torch.Tensor = 0,
    lengths: torch.Tensor | None = None,
    query_lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    rms_eps: float | None = None,
    implementation: str = "auto",
    screen_from: int | None = None,
) -> torch.Tensor:
    """Threshold differential attention (TDA): TRA weights of view 1 minus ``lam`` times those of view 2.

    ``o_i = sum_j (a1_ij - lam a2_ij) v_j`` (arXiv 2601.12145, section 3); the paper then divides by the
    root mean square of o_i without naming an epsilon: ``rms_eps`` names it.

    Parameters
    ----------
    q1, k1, q2, k2 : torch.Tensor
        The two views, shaped and typed alike, as in :func:`threshold_attention`.
    v : torch.Tensor
        Values, (B, G, S, E).
    beta, lam : float or torch.Tensor
        Threshold scale and weight of the second view; scalars or shape (H,). Differentiable.
    kappa, power, normalize, causal, query_offset, lengths, query_lengths, cu_seqlens, cu_seqlens_k
        As in :func:`threshold_attention`.
    max_seqlen, rms_eps, implementation, screen_from
        As in :func:`threshold_attention`.

    Returns
    -------
    torch.Tensor
        (B, H, T, E).

    Raises
    ------
    TypeError, ValueError
        As in :func:`threshold_attention`; also when the views differ in shape, dtype or device.
    """
    for name, a, b in (("q2", q1, q2), ("k2", k1, k2)):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape != b.shape:
            raise ValueError(f"{name} must be shaped like {name[0]}1 {tuple(a.shape)}, got {tuple(b.shape)}")
    return _attention(
        [(q1, k1), (q2, k2)], v, beta, lam, kappa, power, normalize, causal, query_offset, lengths,
        query_lengths, cu_seqlens, cu_seqlens_k, max_seqlen, rms_eps, implementation, screen_from,
        ("q1", "k1", "q2", "k2"),
    )  # fmt: skip


def _attention(
    views, v, beta, lam, kappa, power, normalize, causal, query_offset, lengths, query_lengths,
    cu_seqlens, cu_seqlens_k, max_seqlen, rms_eps, implementation, screen_from, names,
) -> torch.Tensor:  # fmt: skip
    operands = [x for view in views for x in view]
    _check_operands((*names, "v"), (*operands, v))
    if torch.is_autocast_enabled(autocast_device(v)):
        dtype = torch.get_autocast_dtype(autocast_device(v))
        views = [(q.to(dtype), k.to(dtype)) for q, k in views]
        v = v.to(dtype)
    q, k = views[0]
    kappa, power = check_number("kappa", kappa, 0.0, False), check_number("power", power, 1.0, True)
    if rms_eps is not None:
        rms_eps = check_number("rms_eps", rms_eps, 0.0, False)
    if screen_from is not None and screen_from < 0:
        raise ValueError(f"screen_from must be at least 0, got {screen_from}")
    beta = _per_head("beta", beta, q)
    lam = None if lam is None else _per_head("lam", lam, q)
    geometry = build_geometry(
        q, k, causal=causal, query_offset=query_offset, lengths=lengths, query_lengths=query_lengths,
        cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, max_seqlen=max_seqlen,
    )  # fmt: skip
    chosen = choose(implementation, q)
    trained = (*(x for view in views for x in view), v, beta, *([] if lam is None else [lam]))
    if screen_from is None and torch.is_grad_enabled() and any(x.requires_grad for x in trained):
        screen_from = SCREEN_FROM_TRAINING
    if chosen == "reference":
        with torch.autocast(autocast_device(v), enabled=False):
            return reference.forward(views, v, beta, lam, geometry, kappa, power, normalize, rms_eps)
    q2, k2 = views[1] if len(views) == 2 else (None, None)
    out, *_ = threshold_forward(
        q, k, q2, k2, v, beta, lam, geometry.layout, geometry.sequences, geometry.max_q, geometry.max_k,
        geometry.offset, geometry.packed, geometry.causal, kappa, power, normalize, rms_eps, chosen, screen_from,
    )  # fmt: skip
    return out


def _per_head(name: str, value: float | torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(H,) in float32, or float64 for float64 inputs, on q's device; keeps the autograd graph."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = q.shape[1]
    if not isinstance(value, torch.Tensor):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
        if type(q) in (torch.Tensor, torch.nn.Parameter):
            return constant(float(value), heads, dtype, q.device)
        # Subclasses (fake tensors of a tracer, say) must not meet remembered plain ones.
        return torch.full((heads,), float(value), dtype=dtype, device=q.device)
    check_parameter(name, value, q)
    if value.numel() != 1 and value.shape != (heads,):
        raise ValueError(f"{name} must be a scalar or have shape ({heads},), got {tuple(value.shape)}")
    return value.to(device=q.device, dtype=dtype).reshape(-1).expand(heads).contiguous()


def _check_operands(names: tuple[str, ...], tensors: tuple[torch.Tensor, ...]) -> None:
    first = tensors[0]
    # Autocast brings the dtypes together.
    mixed = isinstance(first, torch.Tensor) and torch.is_autocast_enabled(autocast_device(first))
    check_operands(names, tensors, mixed=mixed)
    q, k, v = tensors[0], tensors[1], tensors[-1]
    check_heads(names[0], q, names[1], k)
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must have shape {tuple(k.shape[:3])} + (E,) like {names[1]}, got {tuple(v.shape)}")
    if not 1 <= v.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"v must have a head dim of 1 to {MAX_HEAD_DIM}, got {tuple(v.shape)}")
