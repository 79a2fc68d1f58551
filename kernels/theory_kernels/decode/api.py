"""Public elastic decoding: validation and dispatch."""

from __future__ import annotations

import math

import torch

from ..geometry import MAX_HEAD_DIM, tau_coefficients
from ..validation import check_float, check_number, check_parameter, choose
from .bounds import BlockBounds, check_bounds
from .cache import INTEGERS, Paging
from .operator import call, run, wanted
from .problem import DecodeStatistics, Problem, View

WEIGHTS = ("softmax", "tra", "tda")
# Query rows a sequence: more are a prefill, for which other kernels are made.
MAX_ROWS = 16
# A block without bounds.
DEFAULT_BLOCK = 64


def elastic_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_bounds: BlockBounds | None,
    tau: float | torch.Tensor | None = None,
    *,
    weights: str = "softmax",
    q2: torch.Tensor | None = None,
    k2_cache: torch.Tensor | None = None,
    block_bounds2: BlockBounds | None = None,
    lam: float | torch.Tensor | None = None,
    beta: float | torch.Tensor | None = None,
    kappa: float = 1.0,
    power: float = 2.0,
    scale: float | None = None,
    normalize: bool | None = None,
    lengths: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    rms_eps: float | None = None,
    return_statistics: bool = False,
    implementation: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, DecodeStatistics]:
    r"""Attention of a few new tokens to a KV cache that reads only the blocks of keys that can matter.

    Keys below a row's threshold get the weight 0 exactly, so a block whose bound lies below it is not read. No key
    that reaches the threshold in the arithmetic used is ever left out (:mod:`theory_kernels.decode.bounds`).

    - ``softmax``: ``softmax`` over the keys with ``s >= tau``, s = scale <q, k> (hard pruning of elastic threshold
      attention, arXiv 2609.20888).
    - ``tra``: ``max(<q, k> - tau, 0)^power``, ``tda``: that minus ``lam`` times the same of a second view
      (arXiv 2601.12145).

    A row without a survivor is exactly 0. The last query row stands at a sequence's last key, the others before it.

    Parameters
    ----------
    q : torch.Tensor
        Queries of the newest tokens, (B, H, T, D) with T from 1 to 16; float32, float16, bfloat16, or float64 (not on
        Triton).
    k_cache, v_cache : torch.Tensor
        (B, G, S, D) and (B, G, S, E), H a multiple of G; or with ``page_table`` (pages, G, page size, D and E). They
        already hold the new tokens. What lies past a sequence's end does not matter.
    block_bounds : BlockBounds or None
        From :func:`make_block_bounds`, up to date (:func:`update_block_bounds`); None reads every block.
    tau : float or torch.Tensor, optional
        Threshold: a number, (H,), or (B, H, T). For ``tra`` and ``tda`` give either it or ``beta``.
    weights : str
        "softmax", "tra" or "tda".
    q2, k2_cache, block_bounds2, lam : torch.Tensor, torch.Tensor, BlockBounds, float or torch.Tensor, optional
        Second view of ``tda`` and its weight, a scalar or (H,).
    beta : float or torch.Tensor, optional
        ``tau = beta sqrt(2 max(0, log(n / kappa)) / D)`` for a row that sees n keys; a scalar or (H,).
    kappa : float
        Expected number of false survivors a row, > 0.
    power : float
        Exponent of ``tra`` and ``tda``, >= 1.
    scale : float, optional
        Factor of the scores, > 0; 1 / sqrt(D) for softmax, 1 otherwise.
    normalize : bool, optional
        Divide the queries by their norms first; by default for ``tra`` and ``tda``, whose cache is expected to hold
        keys divided by theirs.
    lengths : torch.Tensor, optional
        Keys of each sequence, the new ones included, integer (B,); by default all S. Read on the device.
    page_table : torch.Tensor, optional
        Integer (B, pages a sequence): page of each stretch of keys, also those not yet in use (any valid page).
    rms_eps : float, optional
        Divide each output row by ``sqrt(mean(o^2) + rms_eps)``.
    return_statistics : bool
        Also return survivors, blocks read and, for softmax, the log-sum-exp.
    implementation : str
        "auto" (Triton on CUDA, chunked elsewhere), "reference", "chunked" or "triton". The Triton form launches fixed
        grids and never waits for the device: it can be captured in a CUDA graph and replayed as a sequence grows.

    Returns
    -------
    torch.Tensor or tuple
        (B, H, T, E) in the values' dtype; with ``return_statistics`` a :class:`DecodeStatistics` beside it.

    Raises
    ------
    TypeError
        For a wrong dtype or something that is not a tensor.
    ValueError
        For shapes, devices, or values out of range.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    softmax, two = weights == "softmax", weights == "tda"
    paging = Paging.of(k_cache, page_table)
    _check_query("q", q, "k_cache", k_cache, paging)
    _check_values(v_cache, k_cache)
    for name, given in (("q2", q2), ("k2_cache", k2_cache), ("lam", lam)):
        if (given is not None) != two:
            raise ValueError(f"{name} must be {'given' if two else 'left out'} for weights={weights!r}")
    if block_bounds2 is not None and not two:
        raise ValueError(f"block_bounds2 must be left out for weights={weights!r}")
    views = [View(q, k_cache, block_bounds)]
    if q2 is not None and k2_cache is not None:
        if q2.shape != q.shape or k2_cache.shape != k_cache.shape:
            raise ValueError(
                f"q2 and k2_cache must be shaped like q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)}, got "
                f"{tuple(q2.shape)} and {tuple(k2_cache.shape)}"
            )
        _check_query("q2", q2, "k2_cache", k2_cache, paging)
        if q2.dtype != q.dtype:
            raise TypeError(f"q2 must be {q.dtype} like q, got {q2.dtype}")
        if (block_bounds is None) != (block_bounds2 is None):
            raise ValueError("block_bounds and block_bounds2 must both be given or both be None")
        views.append(View(q2, k2_cache, block_bounds2))
    for name, view in zip(("block_bounds", "block_bounds2"), views, strict=False):
        if view.bounds is not None:
            check_bounds(name, view.bounds, view.k, paging)
    if block_bounds is not None and block_bounds2 is not None:
        made, other = ((x.kind, x.block) for x in (block_bounds, block_bounds2))
        if made != other:
            raise ValueError(f"block_bounds2 must be of kind and block {made} like block_bounds, got {other}")
    scale = (q.shape[3] ** -0.5 if softmax else 1.0) if scale is None else check_number("scale", scale, 0.0, False)
    kappa, power = check_number("kappa", kappa, 0.0, False), check_number("power", power, 1.0, True)
    if rms_eps is not None:
        rms_eps = check_number("rms_eps", rms_eps, 0.0, False)
    if lengths is not None:
        lengths = _lengths(lengths, paging)
    if (tau is None) == (beta is None) or (softmax and beta is not None):
        raise ValueError(f"tau must be given{'' if softmax else ', or beta in its place,'} for weights={weights!r}")
    problem = Problem(
        views,
        v_cache,
        q.new_zeros(0),
        None if lam is None else _per_head("lam", lam, q),
        lengths,
        paging,
        DEFAULT_BLOCK if block_bounds is None else block_bounds.block,
        scale,
        softmax,
        power,
        not softmax if normalize is None else normalize,
        rms_eps,
    )
    problem = problem._replace(tau=_tau(tau, problem) if beta is None else _from_beta(beta, kappa, problem))
    chosen = choose(implementation, q)
    out, found = (call if wanted(q) else run)(problem, return_statistics, chosen)
    return (out, found) if return_statistics and found is not None else out


def _tau(tau: float | torch.Tensor | None, problem: Problem) -> torch.Tensor:
    """(B, H, T), without a copy where the dtype is right."""
    q = problem.views[0].q
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    shape = tuple(q.shape[:3])
    if not isinstance(tau, torch.Tensor):
        if isinstance(tau, bool) or not isinstance(tau, (int, float)) or math.isnan(tau):
            raise TypeError(f"tau must be a number or a tensor, got {tau!r}")
        return torch.full((1, 1, 1), float(tau), dtype=dtype, device=q.device).expand(shape)
    check_parameter("tau", tau, q)
    tau = tau.to(device=q.device, dtype=dtype)
    if tau.numel() == 1:
        return tau.reshape(1, 1, 1).expand(shape)
    if tau.shape == (shape[1],):
        return tau[None, :, None].expand(shape)
    if tau.shape != shape:
        raise ValueError(f"tau must be a scalar or have shape ({shape[1]},) or {shape}, got {tuple(tau.shape)}")
    return tau


def _from_beta(beta: float | torch.Tensor, kappa: float, problem: Problem) -> torch.Tensor:
    q = problem.views[0].q
    head = _per_head("beta", beta, q)
    table = tau_coefficients(problem.paging.capacity, kappa, q.shape[-1], head.dtype, q.device)
    seen = (problem.last_keys() + 1).clamp(0, problem.paging.capacity)
    return head[None, :, None] * table.to(head.dtype)[seen.long()][:, None]


def _per_head(name: str, value: float | torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    dtype, heads = torch.float64 if q.dtype == torch.float64 else torch.float32, q.shape[1]
    if not isinstance(value, torch.Tensor):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise TypeError(f"{name} must be a finite number or a tensor, got {value!r}")
        return torch.full((heads,), float(value), dtype=dtype, device=q.device)
    check_parameter(name, value, q)
    if value.numel() != 1 and value.shape != (heads,):
        raise ValueError(f"{name} must be a scalar or have shape ({heads},), got {tuple(value.shape)}")
    return value.to(device=q.device, dtype=dtype).reshape(-1).expand(heads).contiguous()


def _lengths(lengths: torch.Tensor, paging: Paging) -> torch.Tensor:
    if not isinstance(lengths, torch.Tensor) or lengths.dtype not in INTEGERS:
        got = lengths.dtype if isinstance(lengths, torch.Tensor) else type(lengths).__name__
        raise TypeError(f"lengths must be an integer tensor, got {got}")
    if lengths.shape != (paging.batch,):
        raise ValueError(f"lengths must have shape ({paging.batch},), got {tuple(lengths.shape)}")
    if lengths.device.type == "cpu" and lengths.numel() and not torch.compiler.is_compiling():
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > paging.capacity:
            raise ValueError(f"lengths must lie in 0..{paging.capacity}, got values from {low} to {high}")
    return lengths.to(device=paging.device, dtype=torch.int32)


def _check_query(name: str, q: torch.Tensor, k_name: str, k: torch.Tensor, paging: Paging) -> None:
    check_float(name, q)
    if q.dtype != k.dtype:
        raise TypeError(f"{name} must be {k.dtype} like {k_name}, got {q.dtype}")
    if q.device != k.device:
        raise ValueError(f"{name} must be on {k.device} like {k_name}, got {q.device}")
    if q.dim() != 4 or q.shape[0] != paging.batch or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{name} must have shape ({paging.batch}, a multiple of {k.shape[1]} heads, rows, {k.shape[3]}), got "
            f"{tuple(q.shape)}"
        )
    if q.shape[2] > MAX_ROWS:
        raise ValueError(f"{name} must have at most {MAX_ROWS} rows a sequence, got {tuple(q.shape)}")


def _check_values(v: torch.Tensor, k: torch.Tensor) -> None:
    check_float("v_cache", v)
    if v.dtype != k.dtype:
        raise TypeError(f"v_cache must be {k.dtype} like k_cache, got {v.dtype}")
    if v.device != k.device:
        raise ValueError(f"v_cache must be on {k.device} like k_cache, got {v.device}")
    if v.dim() != 4 or v.shape[:3] != k.shape[:3] or not 1 <= v.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"v_cache must have shape {tuple(k.shape[:3])} + (1..{MAX_HEAD_DIM},), got {tuple(v.shape)}")
