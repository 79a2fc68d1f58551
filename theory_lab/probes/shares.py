"""Weights as shares of their rows, for single keys of mechanisms whose rows do not sum to one (TRA, TDA).

Gu et al.'s sink weight is a mean of such shares. A statistic of columns alone cannot give it, as every row divides by a
sum of its own; but a few keys' columns are cheap to compute once the rows' sums are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from theory_lab.probes.measures import SHARE_EPSILON


def key_shares(
    tensors: Sequence[Tensor], arguments: Mapping[str, Any], keys: Sequence[int], visible: Tensor, mass: Tensor
) -> Tensor:
    """sum_i |w_ik| / (sum_j |w_ij| + 1e-8) of TRA or TDA weights, for the keys k.

    Parameters
    ----------
    tensors : (q, k) or (q, k, q2, k2)
        As ``attention_statistics`` takes them: (B, H, T, D) and (B, G, S, D).
    arguments : mapping
        Its keyword arguments.
    keys : sequence of int
        0-based, below S.
    visible, mass : Tensor
        (B, H, T), of its result for the same call.

    Returns
    -------
    Tensor, shape (B, H, keys)
        float64.
    """
    q = tensors[0]
    if not keys:
        return mass.new_zeros((*mass.shape[:2], 0))
    # In place where it can be: on a GPU, each operation costs a launch and a pass over the rows.
    tau = visible.to(torch.float64, copy=True).clamp_min_(1.0).div_(arguments.get("kappa", 1.0)).log_().clamp_min_(0.0)
    tau = _scaled(tau.mul_(2.0 / q.shape[-1]).sqrt_(), arguments.get("beta", 1.0))[..., None]
    views = []
    for left, right in zip(tensors[::2], tensors[1::2], strict=True):
        chosen = torch.stack([right[:, :, key] for key in keys], 2)
        cosines = _cosines(left, chosen, arguments.get("normalize") is not False)
        views.append((cosines - tau).clamp_min_(0.0).pow_(arguments.get("power", 2.0)))
    w = views[0]
    if len(views) == 2:
        w = w.sub_(_scaled(views[1], arguments.get("lam", 0.5))).abs_()
    hidden = ~(_sees(q, keys, arguments) & (visible > 0)[..., None])
    return w.masked_fill_(hidden, 0.0).div_((mass + SHARE_EPSILON)[..., None]).sum(-2)


def _scaled(x: Tensor, value: Any) -> Tensor:
    """(B, H, ...) times a number, or one a head; x may be written over."""
    if not isinstance(value, Tensor):
        return x.mul_(value)
    return x * value.to(x.device, torch.float64).reshape(1, -1, *(1,) * (x.ndim - 2))


def _cosines(q: Tensor, k: Tensor, normalize: bool) -> Tensor:
    """(B, H, T, keys), multiplied in the tensors' type or float32, as the statistics are."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1)
    if normalize:
        k = torch.nn.functional.normalize(k, dim=-1, eps=0.0).nan_to_num(0.0)
    scores = q.to(wide) @ k.transpose(-1, -2)
    if normalize:
        norm = torch.linalg.vector_norm(q, dim=-1, keepdim=True, dtype=wide)
        scores = scores / norm.clamp_min_(torch.finfo(wide).tiny)  # a row of zeros has scores of 0
    return scores.double()


def _sees(q: Tensor, chosen: Sequence[int], arguments: Mapping[str, Any]) -> Tensor:
    """Bool (B, H or 1, T, keys): which rows see the keys."""
    # Nothing is copied from the host, which a CUDA graph could not capture.
    keys = torch.stack([torch.full((), key, device=q.device) for key in chosen])
    offset = arguments.get("query_offset", 0)
    if isinstance(offset, Tensor):
        offset = offset.to(q.device).reshape(-1, 1, 1, 1)
    ahead = keys - (torch.arange(q.shape[2], device=q.device)[:, None] + offset)
    window = arguments.get("window")
    if arguments.get("causal", True):
        seen = (ahead <= 0) if window is None else (ahead <= 0) & (ahead > -window)
    else:
        seen = torch.ones_like(ahead, dtype=torch.bool) if window is None else ahead.abs() <= window
    for name, inside in (("key_starts", torch.ge), ("lengths", torch.lt)):
        bound = arguments.get(name)
        if bound is not None:
            seen = seen & inside(keys, bound.to(q.device).reshape(-1, 1, 1, 1))
    mask = arguments.get("mask")
    return seen if mask is None else seen & mask[..., list(chosen)]
