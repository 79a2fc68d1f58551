"""Public counts: validation and dispatch."""

# mypy: disable-error-code="no-untyped-def"
# The private functions repeat the types of the public ones, all at once.
from __future__ import annotations

import torch

from ..geometry import build_geometry, split_packed
from ..validation import check_heads, check_operands, choose
from . import chunked, reference


def survivor_counts(
    q: torch.Tensor,
    k: torch.Tensor,
    tau: float | torch.Tensor,
    *,
    normalize: bool = False,
    causal: bool = True,
    query_offset: int | torch.Tensor = 0,
    lengths: torch.Tensor | None = None,
    query_lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    implementation: str = "auto",
    screen_from: int | None = None,
) -> torch.Tensor:
    """Survivors of each row, ``S_i = #{j visible: <q_i, k_j> > tau_i}`` (arXiv 2601.12145, Theorem 4.3).

    Parameters
    ----------
    q, k : torch.Tensor
        (B, H, T, D) and (B, G, S, D), H a multiple of G; float32, float16, bfloat16, float64.
    tau : float or torch.Tensor
        Threshold in units of the score; broadcastable to (B, H, T). Used in float32 (float64 for float64
        inputs), whatever the dtype of q.
    normalize : bool
        Divide queries and keys by their norms first.
    causal, query_offset, lengths, query_lengths, cu_seqlens, cu_seqlens_k, max_seqlen
        As in :func:`theory_kernels.threshold_attention`.
    implementation : str
        "auto", "reference", "chunked" or "triton".
    screen_from : int, optional
        Number of keys from which the Triton implementation screens tiles.

    Returns
    -------
    torch.Tensor
        int32, (B, H, T).

    Raises
    ------
    TypeError, ValueError
        For operands that do not fit together, or values out of range.
    """
    return _counts(
        [(q, k)], [tau], ("q", "k"), ("tau",), normalize, causal, query_offset, lengths, query_lengths,
        cu_seqlens, cu_seqlens_k, max_seqlen, implementation, screen_from,
    )  # fmt: skip


def consensus_counts(
    q1: torch.Tensor,
    k1: torch.Tensor,
    q2: torch.Tensor,
    k2: torch.Tensor,
    tau: float | torch.Tensor,
    tau2: float | torch.Tensor | None = None,
    *,
    normalize: bool = False,
    causal: bool = True,
    query_offset: int | torch.Tensor = 0,
    lengths: torch.Tensor | None = None,
    query_lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    implementation: str = "auto",
    screen_from: int | None = None,
) -> torch.Tensor:
    """Keys that survive in both views, ``C_i`` (arXiv 2601.12145, Theorem 4.6).

    Parameters
    ----------
    q1, k1, q2, k2 : torch.Tensor
        The two views, shaped alike.
    tau, tau2 : float or torch.Tensor
        Thresholds of the views, broadcastable to (B, H, T); ``tau2`` defaults to ``tau``.
    normalize, causal, query_offset, lengths, query_lengths, cu_seqlens, cu_seqlens_k, max_seqlen
        As in :func:`survivor_counts`.
    implementation, screen_from
        As in :func:`survivor_counts`.

    Returns
    -------
    torch.Tensor
        int32, (B, H, T).

    Raises
    ------
    TypeError, ValueError
        As in :func:`survivor_counts`; also when the views differ in shape.
    """
    for name, a, b in (("q2", q1, q2), ("k2", k1, k2)):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape != b.shape:
            raise ValueError(f"{name} must be shaped like {name[0]}1 {tuple(a.shape)}, got {tuple(b.shape)}")
    return _counts(
        [(q1, k1), (q2, k2)], [tau, tau if tau2 is None else tau2], ("q1", "k1", "q2", "k2"), ("tau", "tau2"),
        normalize, causal, query_offset, lengths, query_lengths, cu_seqlens, cu_seqlens_k, max_seqlen,
        implementation, screen_from,
    )  # fmt: skip


@torch.no_grad()
def _counts(
    views, taus, names, tau_names, normalize, causal, query_offset, lengths, query_lengths, cu_seqlens, cu_seqlens_k,
    max_seqlen, implementation, screen_from,
) -> torch.Tensor:  # fmt: skip
    check_operands(names, tuple(x for view in views for x in view), data=True)
    q, k = views[0]
    check_heads(names[0], q, names[1], k)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    levels = []
    for name, tau in zip(tau_names, taus, strict=True):
        if not isinstance(tau, (int, float, torch.Tensor)) or isinstance(tau, bool):
            raise TypeError(f"{name} must be a number or a tensor, got {type(tau).__name__}")
        level = torch.as_tensor(tau, device=q.device)
        if level.is_complex() or level.dtype == torch.bool:
            raise TypeError(f"{name} must be real, got dtype {level.dtype}")
        try:
            levels.append(level.to(dtype).expand(q.shape[:3]))
        except RuntimeError:
            raise ValueError(f"{name} must broadcast to {tuple(q.shape[:3])}, got {tuple(level.shape)}") from None
    geometry = build_geometry(
        q, k, causal=causal, query_offset=query_offset, lengths=lengths, query_lengths=query_lengths,
        cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, max_seqlen=max_seqlen,
    )  # fmt: skip
    chosen = choose(implementation, q)
    if chosen == "triton":
        from . import triton_counts

        return triton_counts.counts(views, levels, geometry, normalize, screen_from)
    form = reference if chosen == "reference" else chunked
    if not geometry.packed:
        return form.counts(views, levels, geometry, normalize)
    out = torch.zeros(q.shape[:3], dtype=torch.int32, device=q.device)
    for rows, keys, part in split_packed(geometry):
        cut = [(a[:, :, rows], b[:, :, keys]) for a, b in views]
        out[:, :, rows] = form.counts(cut, [x[:, :, rows] for x in levels], part, normalize)
    return out
