"""Public statistics of attention maps: validation and dispatch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..geometry import constant, remembered
from ..validation import check_heads, check_number, check_operands, choose
from .chunked import statistics as chunked_statistics
from .reference import statistics as reference_statistics
from .request import NEED, WEIGHTS, Request
from .results import AttentionStatistics
from .visibility import Visibility

READINGS = ("logit", "weight")
_LOGITS = ("softmax", "entmax", "eta")


@torch.no_grad()
def attention_statistics(
    q: torch.Tensor,
    k: torch.Tensor,
    q2: torch.Tensor | None = None,
    k2: torch.Tensor | None = None,
    *,
    weights: str = "softmax",
    scale: float | None = None,
    alpha: float = 1.5,
    beta: float | torch.Tensor = 1.0,
    lam: float | torch.Tensor = 0.5,
    kappa: float = 1.0,
    power: float = 2.0,
    normalize: bool | None = None,
    eta_threshold: float | torch.Tensor | None = None,
    eta_sharpness: float = 10.0,
    eta_reading: str = "logit",
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    query_offset: int | torch.Tensor = 0,
    window: int | None = None,
    key_starts: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    query_starts: torch.Tensor | None = None,
    query_lengths: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    near_zero: Sequence[float] = (1e-6, 1e-3),
    levels: Sequence[float] = (),
    exponents: Sequence[float] = (),
    moment_gap: int = 1,
    need: Sequence[str] = ("rows", "columns", "near_zero"),
    implementation: str = "auto",
    screen_from: int | None = None,
) -> AttentionStatistics:
    """Statistics of the attention map of q and k, which is never held: O(T) memory.

    Softmax ``exp(z_ij) / sum_j exp(z_ij)``; entmax ``[(alpha - 1) z_ij - tau_i]_+^(1 / (alpha - 1))`` (Peters et al.
    2019); TRA ``max(s_ij - tau_i, 0)^p`` and TDA, the difference of two such views (arXiv 2601.12145); ETA, softmax
    of ``m z`` ("logit") or of ``z + log m`` ("weight") with ``m = sigmoid(sharpness (z - threshold))`` (arXiv
    2609.20888). Here ``s_ij = <q_i, k_j>`` and ``z_ij = scale s_ij``, soft-capped if asked for.

    Parameters
    ----------
    q, k : torch.Tensor
        (B, H, T, D) and (B, G, S, D), H a multiple of G; float32, float16, bfloat16, float64 (not on triton).
        Any strides. Computed in float32, or float64 for float64.
    q2, k2 : torch.Tensor, optional
        The second view, TDA only; shaped like q and k.
    weights : str
        "softmax", "entmax", "tra", "tda" or "eta".
    scale : float, optional
        Of the logits of softmax, entmax and ETA; ``D ** -0.5`` if left out.
    alpha : float
        Of entmax, in (1, 2].
    beta, lam : float or torch.Tensor
        TRA and TDA: threshold scale, and weight of the second view; numbers or (H,).
    kappa, power : float
        TRA and TDA: ``tau_i = beta sqrt(2 max(0, log(n_i / kappa)) / D)`` with n_i the keys the row sees; p >= 1.
    normalize : bool, optional
        Divide queries and keys by their norms first; True for TRA and TDA, else False, if left out.
    eta_threshold : float or torch.Tensor, optional
        ETA: threshold of the logits, a number, (H,) or (B, H, T). Required there.
    eta_sharpness : float
        ETA: slope of the mask.
    eta_reading : str
        ETA: "logit" or "weight".
    softcap : float, optional
        Logits become ``softcap tanh(z / softcap)``. Softmax, entmax and ETA.
    sinks : torch.Tensor, optional
        (H,) logits that join the softmax denominator and hold no weight. Softmax only.
    causal : bool
        Row i, at position ``i + query_offset``, sees the keys up to its position.
    query_offset : int or torch.Tensor
        Position of row 0, an integer or (B,).
    window : int, optional
        Causal: a row at position i sees i - window < j <= i. Otherwise |i - j| <= window.
    key_starts, lengths : torch.Tensor, optional
        (B,) integers: first key that exists (left padding), one past the last (right padding).
    query_starts, query_lengths : torch.Tensor, optional
        (B,) integers: first row that exists, one past the last. If left out and the call is causal or T = S, the
        rows at positions of existing keys; otherwise all rows.
    mask : torch.Tensor, optional
        bool (B or 1, H or 1, T, S), True for visible; joins everything above. Not on triton.
    near_zero : sequence of float
        Bounds for the near-zero counts, > 0.
    levels, exponents : sequence of float
        Levels whose exceedances are counted, and arguments of the moment generating function, of the scores s_ij
        (without scale).
    moment_gap : int
        Only pairs with i - j >= moment_gap (|i - j| when not causal) enter the score statistics.
    need : sequence of str
        Which parts to compute: "rows" (mass, entropy, support, maximum, survivors, consensus), "columns",
        "near_zero", "scores". The score statistics are left out unless asked for: they need every pair, while TRA
        and TDA skip tiles without a survivor. They are computed as well if levels or exponents are given.
    implementation : str
        "reference" (the whole map in float64: defines correct), "chunked" (plain torch), "triton", or "auto":
        triton for CUDA tensors where it can, else chunked.
    screen_from : int, optional
        TRA and TDA on triton: number of keys from which tiles are screened.

    Returns
    -------
    AttentionStatistics

    Raises
    ------
    TypeError, ValueError
        For operands that do not fit together, or values out of range; the line names the argument.

    Notes
    -----
    Weights of softmax and ETA are never exactly 0, whatever underflows: their support is every visible key.
    Inputs that are not finite give undefined results, except in padding, where anything may lie. Two runs agree
    bit for bit.

    After one call with the same shapes and positions, a CUDA graph can capture another (Triton; not of float64 and
    not with a mask); whoever keeps the graph keeps ``theory_kernels.geometry.held_tables()``, which it reads.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    views = _views(q, k, q2, k2, weights)
    parts = _parts(need, levels, exponents)
    b, h, t, d = q.shape
    thresholded = weights in ("tra", "tda")
    for name, value, kinds in (
        ("softcap", softcap, _LOGITS), ("sinks", sinks, ("softmax",)), ("eta_threshold", eta_threshold, ("eta",)),
        ("scale", scale, _LOGITS),
    ):  # fmt: skip
        if value is not None and weights not in kinds:
            raise ValueError(f"{name} belongs to weights {', '.join(kinds)}, got it with weights={weights!r}")
    if weights == "eta" and eta_threshold is None:
        raise ValueError("eta_threshold must be given for weights='eta': a number, (H,) or (B, H, T)")
    if eta_reading not in READINGS:
        raise ValueError(f"eta_reading must be one of {', '.join(READINGS)}, got {eta_reading!r}")
    alpha = check_number("alpha", alpha, 1.0, False)
    if alpha > 2.0:
        raise ValueError(f"alpha must lie in (1, 2], got {alpha!r}")
    see = _visibility(
        q, k, causal, query_offset, window, key_starts, lengths, query_starts, query_lengths, mask
    )  # fmt: skip
    request = Request(
        weights=weights,
        see=see,
        scale=d**-0.5 if scale is None else check_number("scale", scale, 0.0, False),
        alpha=alpha,
        beta=_per_head("beta", beta, q),
        lam=_per_head("lam", lam, q),
        kappa=check_number("kappa", kappa, 0.0, False),
        power=check_number("power", power, 1.0, True),
        normalize=thresholded if normalize is None else bool(normalize),
        eta_threshold=None if eta_threshold is None else _row_threshold(eta_threshold, q),
        eta_sharpness=check_number("eta_sharpness", eta_sharpness, 0.0, False),
        eta_reading=eta_reading,
        softcap=None if softcap is None else check_number("softcap", softcap, 0.0, False),
        sinks=None if sinks is None else _per_head("sinks", sinks, q),
        near_zero=tuple(check_number("near_zero", x, 0.0, False) for x in near_zero),
        levels=tuple(check_number("levels", x, -math.inf, False) for x in levels),
        exponents=tuple(check_number("exponents", x, -math.inf, False) for x in exponents),
        moment_gap=_integer("moment_gap", moment_gap, 0),
        need=parts,
    )
    if screen_from is not None:
        screen_from = _integer("screen_from", screen_from, 0)
    chosen = _implementation(implementation, q, mask)
    if min(b, h, t, k.shape[2]) == 0:
        chosen = "chunked"
    with torch.autocast(q.device.type, enabled=False):
        if chosen == "reference":
            return reference_statistics(views, request)
        if chosen == "chunked":
            return chunked_statistics(views, request)
        from .triton_statistics import statistics

        return statistics(views, request, screen_from)


def _implementation(implementation: str, q: torch.Tensor, mask: torch.Tensor | None) -> str:
    chosen = choose(implementation, q)
    if chosen == "triton" and mask is not None:
        if implementation == "auto":
            return "chunked"
        raise ValueError("mask is taken by implementation 'chunked' and 'reference' only, got it with 'triton'")
    return chosen


def _views(
    q: torch.Tensor, k: torch.Tensor, q2: torch.Tensor | None, k2: torch.Tensor | None, weights: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    given = {"q": q, "k": k}
    if weights == "tda":
        for name, x in (("q2", q2), ("k2", k2)):
            if x is None:
                raise ValueError(f"{name} must be given for weights='tda', which has two views")
            given[name] = x
    elif q2 is not None or k2 is not None:
        raise ValueError(f"q2 and k2 belong to weights='tda', got them with weights={weights!r}")
    check_operands(tuple(given), tuple(given.values()), data=True)
    for name, x in given.items():
        if len(name) == 2 and x.shape != given[name[0]].shape:
            raise ValueError(
                f"{name} must be shaped like {name[0]} {tuple(given[name[0]].shape)}, got {tuple(x.shape)}"
            )
    check_heads("q", q, "k", k)
    tensors = [x.detach() for x in given.values()]
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _parts(need: Sequence[str], levels: Sequence[float], exponents: Sequence[float]) -> frozenset[str]:
    if isinstance(need, str):
        need = (need,)
    for name in need:
        if name not in NEED:
            raise ValueError(f"need must hold some of {', '.join(NEED)}, got {name!r}")
    more = {"scores"} if len(levels) or len(exponents) else set()
    return frozenset(need) | more


def _integer(name: str, value: int, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return value


def _per_head(name: str, value: float | torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    heads = q.shape[1]
    if not isinstance(value, torch.Tensor):
        number = check_number(name, value, -math.inf, False)
        return constant(number, heads, torch.float64, q.device)
    if not value.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {value.dtype}")
    if value.numel() != 1 and value.shape != (heads,):
        raise ValueError(f"{name} must be a scalar or have shape ({heads},), got {tuple(value.shape)}")
    return value.detach().to(device=q.device, dtype=torch.float64).reshape(-1).expand(heads)


def _row_threshold(value: float | torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    rows = tuple(q.shape[:3])
    if isinstance(value, torch.Tensor) and value.dim() == 3:
        if not value.is_floating_point():
            raise TypeError(f"eta_threshold must have a floating-point dtype, got {value.dtype}")
        if tuple(value.shape) != rows:
            raise ValueError(
                f"eta_threshold must be a number or have shape ({rows[1]},) or {rows}, got {tuple(value.shape)}"
            )
        return value.detach().to(device=q.device, dtype=torch.float64)
    return _per_head("eta_threshold", value, q)[None, :, None].expand(rows)


def _row_of_integers(name: str, value: torch.Tensor | None, q: torch.Tensor, limit: int | None) -> torch.Tensor | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be an integer tensor, got {type(value).__name__}")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be an integer tensor, got dtype {value.dtype}")
    if value.shape != (q.shape[0],):
        raise ValueError(f"{name} must have shape ({q.shape[0]},), got {tuple(value.shape)}")
    if limit is None:
        return value.to(device=q.device, dtype=torch.int64)
    if value.device.type == "cpu" and value.numel():
        low, high = int(value.min()), int(value.max())
        if low < 0 or high > limit:
            raise ValueError(f"{name} must lie in 0..{limit}, got values from {low} to {high}")
    return value.to(device=q.device, dtype=torch.int64).clamp(0, limit)


def _visibility(
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool,
    query_offset: int | torch.Tensor,
    window: int | None,
    key_starts: torch.Tensor | None,
    lengths: torch.Tensor | None,
    query_starts: torch.Tensor | None,
    query_lengths: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> Visibility:
    (b, h, t, _), s = q.shape, k.shape[2]
    if window is not None:
        window = _integer("window", window, 1)
    padding = (key_starts, lengths, query_starts, query_lengths)
    if type(query_offset) is int and mask is None and all(x is None for x in padding):
        first = query_offset
        key = (b, t, s, causal, window, first, q.device)
        bounds = remembered(("bounds", *key), q.device, lambda: _plain_bounds(b, t, s, first, q.device))
        return Visibility(bounds, t, s, causal, window, None, key)
    if isinstance(query_offset, torch.Tensor):
        if query_offset.dim() == 0:
            query_offset = query_offset.expand(b)
        offset = _row_of_integers("query_offset", query_offset, q, None)
        assert offset is not None
    elif isinstance(query_offset, bool) or not isinstance(query_offset, int):
        raise TypeError(f"query_offset must be an int or an integer tensor, got {type(query_offset).__name__}")
    else:
        offset = torch.full((b,), query_offset, dtype=torch.int64, device=q.device)
    key0 = _row_of_integers("key_starts", key_starts, q, s)
    key1 = _row_of_integers("lengths", lengths, q, s)
    row0 = _row_of_integers("query_starts", query_starts, q, t)
    row1 = _row_of_integers("query_lengths", query_lengths, q, t)
    zero = torch.zeros_like(offset)
    # In self-attention a row whose own key is padding is padding.
    paired = causal or t == s
    if row0 is None:
        row0 = (key0 - offset).clamp(0, t) if paired and key0 is not None else zero
    if row1 is None:
        row1 = (key1 - offset).clamp(0, t) if paired and key1 is not None else zero + t
    key0 = zero if key0 is None else key0
    key1 = zero + s if key1 is None else key1
    if mask is not None:
        if not isinstance(mask, torch.Tensor):
            raise TypeError(f"mask must be a bool tensor, got {type(mask).__name__}")
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool, True for visible, got {mask.dtype}")
        if mask.dim() != 4 or mask.shape[0] not in (1, b) or mask.shape[1] not in (1, h) or mask.shape[2:] != (t, s):
            raise ValueError(f"mask must have shape ({b} or 1, {h} or 1, {t}, {s}), got {tuple(mask.shape)}")
        if mask.device != q.device:
            raise ValueError(f"mask must be on {q.device} like q, got {mask.device}")
    return Visibility(torch.stack([row0, row1, key0, key1, offset]), t, s, causal, window, mask)


def _plain_bounds(b: int, t: int, s: int, offset: int, device: torch.device) -> torch.Tensor:
    """Bounds of sequences without padding, int64 (5, B)."""
    # No copy from the host, which a CUDA graph could not capture.
    return torch.stack([torch.full((b,), x, dtype=torch.int64, device=device) for x in (0, t, 0, s, offset)])
