"""Attention weights computed again from a call, and how far a model's own may be from them."""

from __future__ import annotations

import torch

from theory_lab.probes import AttentionCall, Visibility


def seen_keys(call: AttentionCall) -> torch.Tensor:
    """Visible pairs (B, 1 or H, T, S), from ``statistics_arguments`` alone."""
    given = call.statistics_arguments()
    names = ("causal", "query_offset", "window", "key_starts", "lengths", "mask")
    visibility = Visibility(**{name: given[name] for name in names})
    return visibility.materialize(call.q.shape[0], call.q.shape[2], call.k.shape[2])


def valid_rows(call: AttentionCall) -> torch.Tensor:
    """Queries that are no padding (B, T)."""
    given, row = call.statistics_arguments(), torch.arange(call.q.shape[2])
    valid = torch.ones(call.q.shape[0], len(row), dtype=torch.bool)
    if given["query_starts"] is not None:
        valid &= row >= given["query_starts"][:, None]
    if given["query_lengths"] is not None:
        valid &= row < given["query_lengths"][:, None]
    return valid


def weights(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (B, H, T, S) in float64, and the largest difference that rounding can make to those of the model.

    Logits of D products have an error of at most (D + 2) eps |q| |k| scale; exponentials turn it into a factor, the sum
    of S of them and the division add (S + 4) eps, and storing the weight in the model's type one more eps.
    """
    given = call.statistics_arguments()
    groups = call.q.shape[1] // call.k.shape[1]
    q, k = call.q.double(), call.k.double().repeat_interleave(groups, dim=1)
    logits = given["scale"] * q @ k.mT
    if given["softcap"] is not None:
        logits = given["softcap"] * torch.tanh(logits / given["softcap"])
    hidden = ~seen_keys(call)
    logits = logits.masked_fill(hidden, -torch.inf)
    joined = logits
    if given["sinks"] is not None:
        sinks = given["sinks"].double().reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        joined = torch.cat([logits, sinks], dim=-1)
    exact = torch.exp(logits - joined.logsumexp(-1, keepdim=True)).nan_to_num(0.0)
    eps = torch.finfo(call.q.dtype).eps
    size = given["scale"] * q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
    spread = (call.q.shape[-1] + 6) * eps * size.amax(-1, keepdim=True) + 4 * eps  # of every logit of the row
    single = torch.finfo(torch.float32).eps  # softmax itself runs in float32, also for smaller types
    tiny = torch.finfo(call.q.dtype).smallest_normal
    budget = exact * (torch.expm1(2 * spread) + (call.k.shape[2] + 4) * single + eps) + tiny
    return exact, budget


def assert_explains(call: AttentionCall, shown: torch.Tensor) -> None:
    """The call must give the model's own map ``shown`` (B, H, T, S) in every row that is no padding."""
    exact, budget = weights(call)
    shown = shown.double()
    if shown.shape[-1] > exact.shape[-1]:
        shown = shown[..., : exact.shape[-1]]
    rows = valid_rows(call)[:, None, :, None]
    over = ((shown - exact).abs() - budget).masked_fill(~rows, 0.0)
    assert bool((over <= 0).all()), f"{call}: beyond the budget by {over.max():.3g}"
    assert torch.equal((shown > 0) & rows, (exact > 0) & rows)
